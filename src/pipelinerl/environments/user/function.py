"""Tasks from a file of examples, a user function that computes rewards, and perhaps user functions as tools."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pipelinerl.environments.chat.tool_use import Tool, ToolError, require_chat, tool_of, use_tools
from pipelinerl.environments.data import ProblemSet, read_split
from pipelinerl.environments.options import AtLeastOne, Files, FunctionName, Options, Seconds, Share, listed
from pipelinerl.environments.prompts import Message, encode_prompt, text_decoder
from pipelinerl.environments.questions import (
    NO_CHAT,
    chat_messages,
    check_chat,
    check_template_options,
    try_prompt,
    with_system,
    wrong_chat,
)
from pipelinerl.environments.single_turn import Judgement
from pipelinerl.environments.user.code import find_function, is_away, names_a_function, retried, summarize_error, try_out
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.environments.user.rewards import Functions, group_values, named_rewards, weighted_sum
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

CACHED_PROMPTS = 64
PROMPT = "prompt"
GROUP_REWARD = "group_reward"
"""Names of functions, in errors; the second is also that of a metric."""

Prompt = str | list[Message]


class FunctionOptions(Options, kw_only=True):
    data: Files
    """Files of examples, JSON objects, which are passed to the functions as dicts."""
    reward: (
        FunctionName
        | Annotated[dict[FunctionName, float], Meta(min_length=1)]
        | Annotated[list[FunctionName], Meta(min_length=1)]
    )
    """(completion, example) -> a finite number, a dict of `reward` and metrics, or (reward, metrics). The completion has no
    stop token, but other special tokens such as `<think>`, and may be empty. Several functions with their weights:
    `{rewards.py:right: 1.0, rewards.py:brief: 0.2}`; in a list, each has the weight 1."""
    group_reward: FunctionName = ""
    """(completions, example) -> a list of numbers, which are added to the rewards of a group's rollouts in training."""
    prompt: FunctionName = "prompt"
    """The field with the prompt, or a function: (example) -> a text or chat messages."""
    held_out: Share | Files = 0.1
    """Examples for evaluation, never used in training: a share of `data` (by a hash of the prompt), or files of examples."""
    chat: bool | None = None
    """Whether a text prompt becomes the user's message in the model's chat template. null: if the model has one."""
    system: str = ""
    """The system message of a chat, before the prompt; "" for none."""
    template_options: dict[str, Any] | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    isolate: bool = True
    """Call the functions in processes with limits. false: in this process, while the engine waits."""
    workers: AtLeastOne = 2
    """How many processes there may be."""
    concurrency: AtLeastOne = 64
    """How many calls of `async def` functions, which run in the generation process, may wait at the same time."""
    timeout_s: Seconds = 10.0
    """How long a call may take."""
    retries: Annotated[int, Meta(ge=0)] = 2
    """How often a call is made again, after 1, 4, 16, ... s, if it raised the error of a server that can't be reached."""
    memory_mb: AtLeastOne = 1024
    """How much memory a call may use beyond what its process uses after the imports."""
    writes: list[str] | None = None
    """The only folders below which a call, and what it starts, can write, make and remove files: [] for none. null: not
    limited. Needs Linux 5.13 or newer. Calls of `async def` functions are not limited."""
    ended_reward: float | None = None
    """Reward of an answer whose reward function exceeded a limit or crashed. null: the rollout is dropped, as it is when the
    function raises an error or does not return a number."""

    @property
    def limits(self) -> Limits:
        writes = None if self.writes is None else tuple(self.writes)
        return Limits(timeout_s=self.timeout_s, memory_mb=self.memory_mb, writes=writes)


class Function(ProblemSet):
    """Problems are the lines of a file; a user function computes the reward of an answer."""

    Options: ClassVar[type[FunctionOptions]] = FunctionOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable data or functions. Each function is called once to check it."""
        options = self.Options.read(args)
        self._tokenizer = tokenizer
        self._decode = text_decoder(tokenizer)
        self._chat = check_chat(tokenizer, options.chat)
        self._asked_for_chat, self._system = options.chat, options.system
        if not self._chat:
            options.refuse_without_effect(NO_CHAT, "system")
        self.template_options = check_template_options(tokenizer, options.template_options, chat=self._chat)
        self._ended_reward = options.ended_reward
        self._prompt_ids: dict[str, tuple[int, ...]] = {}
        self._field = None if names_a_function(options.prompt) else options.prompt
        parts = read_split(options.data, options.held_out, self._check, self._key)
        super().__init__(parts, f"function/{seed}")
        rewards = named_rewards(options.reward)
        self._weights = {name: one.weight for name, one in rewards.items()}
        self._group_reward = options.group_reward
        others = {} if self._field else {PROMPT: options.prompt}
        if self._group_reward:
            others[GROUP_REWARD] = self._group_reward
        if taken := others.keys() & rewards.keys():
            raise EnvironmentSetupError(f"environment.args.reward: a function can't be called {min(taken)}; rename it")
        self._functions = Functions(
            {name: one.spec for name, one in rewards.items()} | others,
            rewards={name: one.signature for name, one in rewards.items()},
            isolate=options.isolate,
            workers=options.workers,
            concurrency=options.concurrency,
            retries=options.retries,
            limits=options.limits,
        )
        self.scores_texts = not self.calls_async
        pooled = self._functions.any_pooled or (options.isolate and isinstance(options, ToolsOptions))
        if not pooled:
            options.refuse_without_effect("no function is called in a process", "workers", "memory_mb", "writes")
        if not self.calls_async:
            options.refuse_without_effect("no function is `async def`", "concurrency")
            if not pooled:
                options.refuse_without_effect("calls in this process have no limits", "timeout_s", "ended_reward")
        try_out(self._trial(parts.training[0]), 2 * options.limits.start_timeout_s, "an empty answer to the first example")

    @property
    def reward_notes(self) -> tuple[str, ...]:
        """The rewards that are called as by another trainer, for the user to check, and whether one may cost money."""
        untried = "rewards: not tried with wrong answers, as a call of an `async def` function may cost money"
        return (*self._functions.notes, untried) if self.calls_async else self._functions.notes

    @property
    def calls_async(self) -> bool:
        """Whether a reward is an `async def` function: a call may cost money."""
        return self._functions.any_async

    async def reward_of(self, text: str, example: dict[str, Any]) -> float:
        return (await self._score(text, example)).reward

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        key = self._key(problem)
        prompt_ids = self._prompt_ids.get(key) or self._cache_prompt(key, await self._prompt(problem.payload))
        completion = await client.generate(prompt_ids)
        text = self._decode(completion.answer_ids)
        reward, metrics = await self._score(text, problem.payload)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=reward, metrics=dict(metrics))

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        if not self._group_reward:
            return rollouts
        texts = [rollout.turns[-1].text for rollout in rollouts]
        added = group_values(await self._functions.call(GROUP_REWARD, texts, problem.payload), GROUP_REWARD, len(texts))
        return [
            msgspec.structs.replace(rollout, reward=rollout.reward + value, metrics={**rollout.metrics, GROUP_REWARD: value})
            for rollout, value in zip(rollouts, added, strict=True)
        ]

    async def _score(self, text: str, example: dict[str, Any]) -> Judgement:
        """The reward, and whether a call was ended as a metric (only with `ended_reward`)."""
        if self._ended_reward is None:
            return await weighted_sum(self._functions, self._weights, text, example)
        try:
            score = await weighted_sum(self._functions, self._weights, text, example)
        except CALL_ENDED:
            return Judgement(self._ended_reward, {"reward_ended": 1.0})
        return Judgement(score.reward, {**score.metrics, "reward_ended": 0.0})

    async def _prompt(self, example: dict[str, Any]) -> Prompt:
        value = example[self._field] if self._field else await self._functions.call(PROMPT, example)
        if wrong := self._wrong_prompt(value):
            raise RolloutError(f"prompt returned {wrong}")
        if isinstance(value, str):
            return chat_messages(self._system, value) if self._chat else value
        return with_system(self._system, value)

    def _cache_prompt(self, key: str, prompt: Prompt) -> tuple[int, ...]:
        """Encode a prompt and cache its ids: the attempts of a group share them."""
        while len(self._prompt_ids) >= CACHED_PROMPTS:
            del self._prompt_ids[next(iter(self._prompt_ids))]
        ids = self._prompt_ids[key] = encode_prompt(self._tokenizer, prompt, self.template_options)
        return ids

    async def _trial(self, problem: Problem) -> None:
        """Call each function once, so that errors appear before the first rollout."""
        try_prompt(self._tokenizer, await self._prompt(problem.payload), self.template_options)
        tried = {
            name: weight
            for name, weight in self._weights.items()
            if not self._functions.check_signature(name, "", problem.payload)
        }
        if tried:
            await weighted_sum(self._functions, tried, "", problem.payload)
        if self._group_reward and not self._functions.check_signature(GROUP_REWARD, [""], problem.payload):
            group_values(await self._functions.call(GROUP_REWARD, [""], problem.payload), GROUP_REWARD, 1)

    def _check(self, example: dict[str, Any]) -> str | None:
        if self._field is None:
            return None
        if self._field not in example:
            fields = ", ".join(example) or "none"
            return f"has no field `{self._field}` for the prompt (it has: {fields}); set environment.args.prompt"
        wrong = self._wrong_prompt(example[self._field])
        return f"has {wrong} as its `{self._field}`" if wrong else None

    def _wrong_prompt(self, value: object) -> str | None:
        """A description of `value` if it is not a valid prompt; else None."""
        if isinstance(value, str):
            return None if value else "an empty text"
        try:
            messages = msgspec.convert(value, list[dict[str, str]])
        except msgspec.ValidationError:
            return f"a {type(value).__name__} that is neither a text nor chat messages"
        if not messages or any(message.keys() != {"role", "content"} for message in messages):
            return "chat messages that are not objects of `role` and `content`"
        if self._asked_for_chat is False:
            return "chat messages, but environment.args.chat is false"
        return wrong_chat(messages, self._system)

    def _key(self, problem: Problem) -> str:
        """Identifies a problem: its prompt, or the whole example if a function makes the prompt."""
        what = problem.payload[self._field] if self._field else problem.payload
        return msgspec.json.encode(what, order="deterministic").decode()


# ---- user functions as tools


def read_tools(specs: Sequence[str], *, isolate: bool, workers: int, limits: Limits, retries: int = 0) -> list[Tool]:
    """User functions (`path/to/file.py:function`) as tools. With `isolate`, they are called in up to `workers` processes.

    Raises EnvironmentSetupError for a spec that names no function, for one that can't be described to the model, and for two
    tools with the same name.
    """
    tools = [tool_of(find_function(spec)) for spec in specs]
    names = [tool.name for tool in tools]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise EnvironmentSetupError(f"environment.args.functions has two tools called {repeated[0]!r}: rename one")
    if not isolate:
        return tools
    # The specs are registered so that a process imports their files when it starts. The pool passes positional arguments
    # only, so the workers run `call`, which takes the arguments by name.
    pool = FunctionPool({**{spec: spec for spec in specs}, "call": f"{__name__}:call"}, workers=workers, limits=limits)
    return [
        tool._replace(call=functools.partial(_call_in, pool, retries, spec)) for spec, tool in zip(specs, tools, strict=True)
    ]


async def _call_in(pool: FunctionPool, retries: int, spec: str, arguments: dict[str, Any]) -> Any:
    try:
        outcome = await retried(functools.partial(pool.call, "call", spec, arguments), retries)
    except (*CALL_ENDED, ConnectionError, RolloutError) as error:
        raise ToolError(re.sub(r"^call( \(\S*\))?:? ", "", str(error))) from None
    if "error" in outcome:
        raise ToolError(outcome["error"])
    return outcome["result"]


def call(spec: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs in a process of the pool. Returns the function's `result`, or the `error` that it raised."""
    try:
        result = find_function(spec)(**arguments)
        msgspec.json.encode(result)
        return {"result": result}
    except MemoryError:
        raise  # the state of the process is unknown: the worker exits
    except Exception as error:  # user code may raise anything; the model sees the error
        if is_away(error):
            raise ConnectionError(summarize_error(error, Path(spec.rpartition(":")[0]))) from error
        return {"error": summarize_error(error, Path(spec.rpartition(":")[0]))}


class ToolsOptions(FunctionOptions, kw_only=True):
    functions: FunctionName | Annotated[list[FunctionName], Meta(min_length=1)]
    """The tools, described to the model by their type hints and docstrings. The limits of calls also apply to them."""
    max_turns: AtLeastOne = 6
    """Turns of the model, including the answer."""


class Tools(Function):
    """A `Function` whose model may call user functions before it answers; the reward is that of the last turn's text.

    If a tool raises an error or exceeds a limit, the model is shown it.
    """

    Options = ToolsOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable arguments, and for a model without a chat template."""
        require_chat(tokenizer, "environment.kind tools")
        super().__init__(tokenizer, seed, **args)
        options = ToolsOptions.read(args)
        self._tools = read_tools(
            listed(options.functions),
            isolate=options.isolate,
            workers=options.workers,
            retries=options.retries,
            limits=options.limits,
        )
        self._max_turns = options.max_turns

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        messages = await self._prompt(problem.payload)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        used = await use_tools(
            client, messages, self._tools, max_turns=self._max_turns, template_options=self.template_options
        )
        reward, metrics = await self._score(used.answer, problem.payload)
        return used.rollout(reward, metrics)

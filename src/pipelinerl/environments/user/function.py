"""Tasks from a file of examples, user functions that compute rewards, and perhaps user functions as tools.

A function is called in a process of the pool. An `async def` function, such as a judge behind an API, runs in the event loop
of the generation process instead, where many of its calls can wait at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from pydantic import Field

from pipelinerl.config.schema import Natural
from pipelinerl.environments.chat.tool_use import Tool, ToolError, require_chat, tool_of, use_tools
from pipelinerl.environments.data import ProblemSet, read_split
from pipelinerl.environments.options import (
    NO_CHAT,
    Arguments,
    AtLeastOne,
    Files,
    FunctionName,
    Options,
    Seconds,
    Share,
    listed,
)
from pipelinerl.environments.prompts import (
    Message,
    chat_messages,
    check_chat,
    check_template_options,
    with_system,
    wrong_chat,
)
from pipelinerl.environments.single_turn import CACHED_PROMPTS, JudgedTurn, Judgement
from pipelinerl.environments.user.code import (
    TOTAL,
    describe,
    find_function,
    find_reward,
    finite_number,
    is_away,
    names_a_function,
    retried,
    score_of,
)
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

PROMPT = "prompt"
GROUP_REWARD = "group_reward"
"""Names of functions, in errors; the second is also that of a metric."""

Prompt = str | Sequence[Message]


class Functions:
    """Calls user functions by name: in processes with limits, or in this one if they are `async def` or not `isolate`d."""

    def __init__(
        self,
        specs: Mapping[str, str],
        *,
        isolate: bool,
        workers: int,
        concurrency: int,
        limits: Limits,
        retries: int = 0,
    ) -> None:
        """Raises EnvironmentSetupError."""
        self._specs, self._concurrency, self._timeout_s = dict(specs), concurrency, limits.timeout_s
        self._retries = retries
        self._found = {name: find_reward(spec) for name, spec in specs.items()}
        pooled = {
            name: spec for name, spec in specs.items() if isolate and not inspect.iscoroutinefunction(self._found[name])
        }
        self._pool = FunctionPool(pooled, workers=workers, limits=limits) if pooled else None
        self._pooled = pooled.keys()
        self.any_async = any(map(inspect.iscoroutinefunction, self._found.values()))
        called = {spec: getattr(self._found[name], "called_as", "") for name, spec in specs.items()}
        self.notes = tuple(f"reward {spec}: called {how}" for spec, how in called.items() if how)
        """The functions that are called as another trainer calls them."""
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def any_pooled(self) -> bool:
        return self._pool is not None

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns; called again if a server that it asks is away. Raises as `FunctionPool.call`."""
        return await retried(functools.partial(self._call, name, *arguments), self._retries)

    async def _call(self, name: str, *arguments: Any) -> Any:
        if self._pool is not None and name in self._pooled:
            return await self._pool.call(name, *arguments)
        function, limit = self._found[name], asyncio.timeout(self._timeout_s)
        try:
            if not inspect.iscoroutinefunction(function):
                return function(*arguments)
            async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)), limit:
                return await function(*arguments)
        except Exception as error:
            if limit.expired():
                what = f"{name} ({Path(self._specs[name]).name})"
                raise TimeoutError(f"{what}: it took longer than {self._timeout_s:g} s") from None
            kind = ConnectionError if is_away(error) else RuntimeError
            raise kind(f"{name}: {describe(error, self._specs[name])}") from error


class NamedReward(NamedTuple):
    spec: str
    weight: float


def named_rewards(reward: str | Mapping[str, float] | Sequence[str]) -> dict[str, NamedReward]:
    """The functions by the name that errors and metrics use: of several functions, each one's own.

    Raises EnvironmentSetupError if two functions have the same name.
    """
    if isinstance(reward, str):
        return {TOTAL: NamedReward(reward, 1.0)}
    weights = reward if isinstance(reward, Mapping) else dict.fromkeys(reward, 1.0)
    named = {spec.rpartition(":")[2]: NamedReward(spec, weight) for spec, weight in weights.items()}
    if len(named) < len(reward):
        raise EnvironmentSetupError("environment.args.reward: two functions have the same name; rename one of them")
    return named


async def weighted_sum(functions: Functions, weights: Mapping[str, float], *arguments: Any) -> Judgement:
    """The sum of what the functions return, times their weights. Of several functions, each value is also a metric.

    Raises RolloutError if one returns neither a finite number nor a dict with one.
    """
    calls = [asyncio.ensure_future(functions.call(name, *arguments)) for name in weights]
    try:
        values = await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
    scores = [Judgement(*score_of(value, name)) for name, value in zip(weights, values, strict=True)]
    metrics = {name: score.reward for name, score in zip(weights, scores, strict=True)} if len(weights) > 1 else {}
    for name, score in zip(weights, scores, strict=True):
        if known := metrics.keys() & score.metrics.keys():
            raise RolloutError(f"{name} returned the metric {min(known)!r}, which another function has too")
        metrics |= score.metrics
    return Judgement(sum(weights[name] * score.reward for name, score in zip(weights, scores, strict=True)), metrics)


def group_values(value: object, name: str, count: int) -> list[float]:
    """What a function returned for the `count` answers of a group. Raises RolloutError for anything but finite numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise RolloutError(f"{name} returned {value!r:.60}, not a list of {count} numbers")
    return [finite_number(entry, f"{name}[{number}]") for number, entry in enumerate(value)]


class FunctionOptions(Options, frozen=True):
    data: Files
    """Files of examples, JSON objects, which are passed to the functions as dicts."""
    reward: (
        FunctionName
        | Annotated[dict[FunctionName, float], Field(min_length=1)]
        | Annotated[list[FunctionName], Field(min_length=1)]
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
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    isolate: bool = True
    """Call the functions in processes with limits. false: in this process, while the engine waits."""
    workers: AtLeastOne = 2
    """How many processes there may be."""
    concurrency: AtLeastOne = 64
    """How many calls of `async def` functions, which run in the generation process, may wait at the same time."""
    timeout_s: Seconds = 10.0
    """How long a call may take."""
    retries: Natural = 2
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


class Function(ProblemSet, JudgedTurn):
    """Problems are the lines of a file; a user function computes the reward of an answer."""

    Options: ClassVar[type[FunctionOptions]] = FunctionOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable data or functions."""
        JudgedTurn.__init__(self, tokenizer, seed)
        self._options = options = self.Options.read(args)
        self._chat = check_chat(tokenizer, options.chat)
        if not self._chat:
            options.refuse_without_effect(NO_CHAT, "system")
        self.template_options = check_template_options(tokenizer, options.template_options, chat=self._chat)
        self._made_prompts: dict[str, Prompt] = {}
        self._field = None if names_a_function(options.prompt) else options.prompt
        ProblemSet.__init__(self, read_split(options.data, options.held_out, self._check, self._key), f"function/{seed}")
        rewards = named_rewards(options.reward)
        self._weights = {name: one.weight for name, one in rewards.items()}
        others = {} if self._field else {PROMPT: options.prompt}
        if options.group_reward:
            others[GROUP_REWARD] = options.group_reward
        if taken := others.keys() & rewards.keys():
            raise EnvironmentSetupError(f"environment.args.reward: a function can't be called {min(taken)}; rename it")
        self._functions = Functions(
            {name: one.spec for name, one in rewards.items()} | others,
            isolate=options.isolate,
            workers=options.workers,
            concurrency=options.concurrency,
            retries=options.retries,
            limits=options.limits,
        )
        self.scores_texts = not self.calls_async
        untried = "rewards: not tried with wrong answers, as a call of an `async def` function may cost money"
        self.reward_notes = (*self._functions.notes, untried) if self.calls_async else self._functions.notes
        pooled = self._functions.any_pooled or (options.isolate and isinstance(options, ToolsOptions))
        if not pooled:
            options.refuse_without_effect("no function is called in a process", "workers", "memory_mb", "writes")
        if not self.calls_async:
            options.refuse_without_effect("no function is `async def`", "concurrency")
            if not pooled:
                options.refuse_without_effect("calls in this process have no limits", "timeout_s", "ended_reward")

    @property
    def calls_async(self) -> bool:
        """Whether a reward is an `async def` function: a call may cost money."""
        return self._functions.any_async

    def prompt(self, problem: Problem) -> Prompt | Awaitable[Prompt]:
        return self._asked(problem.payload[self._field]) if self._field else self._made_prompt(problem)

    async def judge(self, problem: Problem, turn: Turn) -> Judgement:
        return await self._score(turn.text, problem.payload)

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        if not self._options.group_reward:
            return rollouts
        texts = [rollout.turns[-1].text for rollout in rollouts]
        added = group_values(await self._functions.call(GROUP_REWARD, texts, problem.payload), GROUP_REWARD, len(texts))
        return [
            msgspec.structs.replace(rollout, reward=rollout.reward + value, metrics={**rollout.metrics, GROUP_REWARD: value})
            for rollout, value in zip(rollouts, added, strict=True)
        ]

    async def _score(self, text: str, example: dict[str, Any]) -> Judgement:
        """The reward, and whether a call was ended as a metric (only with `ended_reward`)."""
        if self._options.ended_reward is None:
            return await weighted_sum(self._functions, self._weights, text, example)
        try:
            score = await weighted_sum(self._functions, self._weights, text, example)
        except CALL_ENDED:
            return Judgement(self._options.ended_reward, {"reward_ended": 1.0})
        return Judgement(score.reward, {**score.metrics, "reward_ended": 0.0})

    async def _messages(self, problem: Problem) -> Prompt:
        prompt = self.prompt(problem)
        return await prompt if isinstance(prompt, Awaitable) else prompt

    async def _made_prompt(self, problem: Problem) -> Prompt:
        """The prompt that the user's function makes, from a cache: the attempts of a group share it."""
        key = self._key(problem)
        if (known := self._made_prompts.get(key)) is not None:
            return known
        made = await self._functions.call(PROMPT, problem.payload)
        if wrong := self._wrong_prompt(made):
            raise RolloutError(f"prompt returned {wrong}")
        while len(self._made_prompts) >= CACHED_PROMPTS:
            del self._made_prompts[next(iter(self._made_prompts))]
        prompt = self._made_prompts[key] = self._asked(made)
        return prompt

    def _asked(self, value: Any) -> Prompt:
        if isinstance(value, str):
            return chat_messages(self._options.system, value) if self._chat else value
        return with_system(self._options.system, value)

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
        if self._options.chat is False:
            return "chat messages, but environment.args.chat is false"
        return wrong_chat(messages, self._options.system)

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
            raise ConnectionError(describe(error, spec)) from error
        return {"error": describe(error, spec)}


class ToolsOptions(FunctionOptions, frozen=True):
    functions: FunctionName | Annotated[list[FunctionName], Field(min_length=1)]
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
        messages = await self._messages(problem)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        used = await use_tools(
            client, messages, self._tools, max_turns=self._max_turns, template_options=self.template_options
        )
        return used.rollout(*await self._score(used.answer, problem.payload))

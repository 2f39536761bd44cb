"""Tasks from a file of examples, a user function that computes rewards, and perhaps user functions as tools."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pipelinerl.environments.chat.tool_use import Tool, ToolError, require_chat, tool_of, use_tools
from pipelinerl.environments.data import ProblemSet, read_split
from pipelinerl.environments.options import AtLeastOne, Files, FunctionName, Options, Seconds, Share, listed
from pipelinerl.environments.prompts import Message, encode_prompt, text_decoder
from pipelinerl.environments.questions import chat_messages, check_chat
from pipelinerl.environments.user.code import (
    describe,
    find_function,
    finite_number,
    names_a_function,
    summarize_error,
    try_out,
)
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

CACHED_PROMPTS = 64

Prompt = str | list[Message]


def in_process(specs: dict[str, str]) -> Callable[..., Awaitable[Any]]:
    """As `FunctionPool.call`, but in this process: no overhead, but no limits and no protection from crashes either."""
    functions = {name: find_function(spec) for name, spec in specs.items()}

    async def call(name: str, *arguments: Any) -> Any:
        try:
            return functions[name](*arguments)
        except Exception as error:
            raise RuntimeError(f"{name}: {describe(error, specs[name])}") from error

    return call


class FunctionOptions(Options, kw_only=True):
    data: Files
    """Files of examples, JSON objects, which are passed to the functions as dicts."""
    reward: FunctionName
    """(completion, example) -> a finite number. The completion is text without special tokens, and may be empty."""
    prompt: FunctionName = "prompt"
    """The field with the prompt, or a function: (example) -> a text or chat messages."""
    held_out: Share | Files = 0.1
    """Examples for evaluation, never used in training: a share of `data` (by a hash of the prompt), or files of examples."""
    chat: bool | None = None
    """Whether a text prompt becomes the user's message in the model's chat template. null: if the model has one."""
    system: str = ""
    """The system message of a chat; "" for none."""
    isolate: bool = True
    """Call the functions in processes with limits. false: in this process, while the engine waits."""
    workers: AtLeastOne = 2
    """How many processes there may be."""
    timeout_s: Seconds = 10.0
    """How long a call may take."""
    memory_mb: AtLeastOne = 1024
    """How much memory a call may use beyond what its process uses after the imports."""
    ended_reward: float | None = None
    """Reward of an answer whose reward function exceeded a limit or crashed. null: the rollout is dropped, as it is when the
    function raises an error or does not return a number."""

    @property
    def limits(self) -> Limits:
        return Limits(timeout_s=self.timeout_s, memory_mb=self.memory_mb)


class Function(ProblemSet):
    """Problems are the lines of a file; a user function computes the reward of an answer."""

    Options: ClassVar[type[FunctionOptions]] = FunctionOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable data or functions. Each function is called once to check it."""
        options = self.Options.read(args)
        self._tokenizer = tokenizer
        self._decode = text_decoder(tokenizer)
        self._chat = check_chat(tokenizer, options.chat)
        self._system = options.system
        self._ended_reward = options.ended_reward
        self._prompt_ids: dict[str, tuple[int, ...]] = {}
        self._field = None if names_a_function(options.prompt) else options.prompt
        parts = read_split(options.data, options.held_out, self._check, self._key)
        super().__init__(parts, f"function/{seed}")
        functions = {"reward": options.reward} | ({} if self._field else {"prompt": options.prompt})
        self._call = (
            FunctionPool(functions, workers=options.workers, limits=options.limits).call
            if options.isolate
            else in_process(functions)
        )
        try_out(self._trial(parts.training[0]), 2 * options.limits.start_timeout_s, "an empty answer to the first example")

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        key = self._key(problem)
        prompt_ids = self._prompt_ids.get(key) or self._cache_prompt(key, await self._prompt(problem.payload))
        completion = await client.generate(prompt_ids)
        text = self._decode(completion.token_ids)
        reward, metrics = await self._score(text, problem.payload)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=reward, metrics=metrics)

    async def _score(self, text: str, example: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """The reward, and whether the call was ended as a metric (only with `ended_reward`)."""
        ended = 0.0
        try:
            reward = await self._reward(text, example)
        except CALL_ENDED:
            if self._ended_reward is None:
                raise
            reward, ended = self._ended_reward, 1.0
        return reward, {} if self._ended_reward is None else {"reward_ended": ended}

    async def _reward(self, text: str, example: dict[str, Any]) -> float:
        return finite_number(await self._call("reward", text, example), "reward")

    async def _prompt(self, example: dict[str, Any]) -> Prompt:
        value = example[self._field] if self._field else await self._call("prompt", example)
        if wrong := _wrong_prompt(value):
            raise RolloutError(f"prompt returned {wrong}")
        if not self._chat or not isinstance(value, str):
            prompt: Prompt = value
            return prompt
        return chat_messages(self._system, value)

    def _cache_prompt(self, key: str, prompt: Prompt) -> tuple[int, ...]:
        """Encode a prompt and cache its ids: the attempts of a group share them."""
        while len(self._prompt_ids) >= CACHED_PROMPTS:
            del self._prompt_ids[next(iter(self._prompt_ids))]
        ids = self._prompt_ids[key] = encode_prompt(self._tokenizer, prompt)
        return ids

    async def _trial(self, problem: Problem) -> None:
        """Call each function once, so that errors appear before the first rollout."""
        encode_prompt(self._tokenizer, await self._prompt(problem.payload))
        await self._reward("", problem.payload)

    def _check(self, example: dict[str, Any]) -> str | None:
        if self._field is None:
            return None
        if self._field not in example:
            fields = ", ".join(example) or "none"
            return f"has no field `{self._field}` for the prompt (it has: {fields}); set environment.args.prompt"
        wrong = _wrong_prompt(example[self._field])
        return f"has {wrong} as its `{self._field}`" if wrong else None

    def _key(self, problem: Problem) -> str:
        """Identifies a problem: its prompt, or the whole example if a function makes the prompt."""
        what = problem.payload[self._field] if self._field else problem.payload
        return msgspec.json.encode(what, order="deterministic").decode()


def _wrong_prompt(value: object) -> str | None:
    """A description of `value` if it is not a valid prompt; else None."""
    if isinstance(value, str):
        return None if value else "an empty text"
    try:
        messages = msgspec.convert(value, list[dict[str, str]])
    except msgspec.ValidationError:
        return f"a {type(value).__name__} that is neither a text nor chat messages"
    if not messages or any(message.keys() != {"role", "content"} for message in messages):
        return "chat messages that are not objects of `role` and `content`"
    return None


# ---- user functions as tools


def read_tools(specs: Sequence[str], *, isolate: bool, workers: int, limits: Limits) -> list[Tool]:
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
    return [tool._replace(call=functools.partial(_call_in, pool, spec)) for spec, tool in zip(specs, tools, strict=True)]


async def _call_in(pool: FunctionPool, spec: str, arguments: dict[str, Any]) -> Any:
    try:
        outcome = await pool.call("call", spec, arguments)
    except (*CALL_ENDED, RolloutError) as error:
        raise ToolError(str(error).removeprefix("call: ").removeprefix("call ")) from None
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
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the model sees the error
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
            listed(options.functions), isolate=options.isolate, workers=options.workers, limits=options.limits
        )
        self._max_turns = options.max_turns

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        messages = await self._prompt(problem.payload)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        used = await use_tools(client, messages, self._tools, max_turns=self._max_turns)
        reward, metrics = await self._score(used.answer, problem.payload)
        return used.rollout(reward, metrics)

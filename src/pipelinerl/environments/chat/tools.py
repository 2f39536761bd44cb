"""A tool-use task defined by a file of examples, user functions as tools, and a reward function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipelinerl.environments.chat.tool_use import Tool, ToolError, require_chat, tool_of, use_tools
from pipelinerl.environments.pool.messages import Limits
from pipelinerl.environments.pool.pool import FunctionPool
from pipelinerl.environments.registry import checked
from pipelinerl.environments.user.code import find_function, summarize_error
from pipelinerl.environments.user.function import Function
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout


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
    except (TimeoutError, MemoryError, ChildProcessError, RolloutError) as error:
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


class Tools(Function):
    """Problems are the lines of a file; the model may call user functions before it answers.

    functions   the tools: `path/to/file.py:function`, or a list of them, described to the model by type hints and docstring
    max_turns   turns of the model, including the answer

    The other arguments are those of `function`: `data`, `reward` (of the last turn's text), `prompt`, `held_out`, `system`,
    and the limits of calls, which also apply to tools. If a tool raises an error or exceeds a limit, the model is shown it.
    """

    def __init__(
        self, tokenizer: Tokenizer, seed: int, *, functions: str | Sequence[str], max_turns: int = 6, **task: Any
    ) -> None:
        """Raises EnvironmentSetupError for unusable arguments, and for a model without a chat template."""
        require_chat(tokenizer, "environment.kind tools")
        own = checked(_Own, functions=functions, max_turns=max_turns)
        super().__init__(tokenizer, seed, **task)
        self._tools = read_tools(own.names, isolate=self._isolate, workers=self._workers, limits=self._limits)
        self._max_turns = own.max_turns

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        messages = await self._prompt(problem.payload)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        used = await use_tools(client, messages, self._tools, max_turns=self._max_turns)
        reward, metrics = await self._score(used.answer, problem.payload)
        return used.rollout(reward, metrics)


class _Own(msgspec.Struct, kw_only=True):
    functions: str | Annotated[list[str], Meta(min_length=1)]
    max_turns: Annotated[int, Meta(ge=1)]

    @property
    def names(self) -> list[str]:
        return [self.functions] if isinstance(self.functions, str) else self.functions

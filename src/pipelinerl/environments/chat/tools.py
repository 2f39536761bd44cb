"""A task with tools that is a file of examples and some functions of the user: what may be called, and what comes of it."""

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
from pipelinerl.environments.user.code import find_function, told
from pipelinerl.environments.user.function import Function
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

# ------------------------------------------------------------------------------------------------------------------------
# Tools that are functions in a user's file, called in processes of their own or here.


def read_tools(specs: Sequence[str], *, isolate: bool, workers: int, limits: Limits) -> list[Tool]:
    """The tools of `path/to/file.py:function` and the like; with `isolate`, called in up to `workers` processes.

    Raises EnvironmentSetupError for what is no function or can't be described, and for two of one name.
    """
    tools = [tool_of(find_function(spec)) for spec in specs]
    names = [tool.name for tool in tools]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise EnvironmentSetupError(f"environment.args.functions has two tools called {repeated[0]!r}: rename one")
    if not isolate:
        return tools
    # The files are imported when a process starts; `call` is what is called there, as calls of a pool have no names.
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
    """In a process of the pool: the function's `result`, or the `error` that it raised."""
    try:
        result = find_function(spec)(**arguments)
        msgspec.json.encode(result)
        return {"result": result}
    except MemoryError:
        raise  # nothing is sure after that: the process ends
    except Exception as error:  # noqa: BLE001 - code that isn't ours: the model is told
        return {"error": told(error, Path(spec.rpartition(":")[0]))}


class Tools(Function):
    """Problems are the lines of a file; the model may call functions of the user before it answers.

    functions   `path/to/file.py:function`, or a list of them: the tools. Type hints and docstring tell the model of them
    max_turns   turns of the model, the answer included

    All else is as in `function`: `data`, `reward` (of the last turn's text), `prompt`, `held_out`, `system`, and the limits
    of calls, which are those of tools as well. What a tool raises, or that it ran into a limit, is told to the model.
    """

    def __init__(
        self, tokenizer: Tokenizer, seed: int, *, functions: str | Sequence[str], max_turns: int = 6, **task: Any
    ) -> None:
        """Raises EnvironmentSetupError for what can't be used, and for a model without a chat template."""
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
        reward, metrics = await self._judged(used.answer, problem.payload)
        return used.rollout(reward, metrics)


class _Own(msgspec.Struct, kw_only=True):
    functions: str | Annotated[list[str], Meta(min_length=1)]
    max_turns: Annotated[int, Meta(ge=1)]

    @property
    def names(self) -> list[str]:
        return [self.functions] if isinstance(self.functions, str) else self.functions

"""Tools that are functions in a user's file, called in processes of their own or here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.environments.pool.messages import Limits
from pipelinerl.environments.pool.pool import FunctionPool
from pipelinerl.environments.tool_use import Tool, ToolError, tool_of
from pipelinerl.environments.user_files import told
from pipelinerl.environments.user_functions import find_function
from pipelinerl.errors import EnvironmentSetupError, RolloutError


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

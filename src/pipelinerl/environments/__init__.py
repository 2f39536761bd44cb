"""Tasks: where problems come from and how attempts are judged.

`SingleTurn` is the shortest way to one of your own, `ToolTask` to one with tools.
"""

from typing import TYPE_CHECKING, Any

from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.single_turn import SingleTurn

if TYPE_CHECKING:
    from pipelinerl.environments.chat.tool_use import ToolTask

__all__ = ["SingleTurn", "ToolTask", "make_environment"]


def __getattr__(name: str) -> Any:
    """`ToolTask`, imported when it is used: most environments have no tools."""
    if name == "ToolTask":
        from pipelinerl.environments.chat.tool_use import ToolTask  # noqa: PLC0415

        return ToolTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Tasks: where problems come from and how attempts are judged.

`SingleTurn` is the shortest way to one of your own, `ToolTask` to one with tools.
"""

from pipelinerl.environments.chat.tool_use import ToolTask
from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.single_turn import SingleTurn

__all__ = ["SingleTurn", "ToolTask", "make_environment"]

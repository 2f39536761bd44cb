"""Tasks: where problems come from and how attempts are judged. `SingleTurn` is the shortest way to one of your own."""

from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.single_turn import SingleTurn

__all__ = ["SingleTurn", "make_environment"]

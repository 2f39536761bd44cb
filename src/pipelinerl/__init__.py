"""Reinforcement learning for language models with in-flight weight updates (the PipelineRL method).

    import pipelinerl
    run = pipelinerl.train({"trainer.steps": 20}, environment="gcd")
    run.summary["reward_last"], run.metrics, run.load_model()

The engine can be used on its own: `pipelinerl.engine.LocalEngine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipelinerl._version import __version__
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import StopRun

if TYPE_CHECKING:
    from pipelinerl.api import Run, StartedRun, start, train, try_run
    from pipelinerl.config.load import load_config

__all__ = ["Run", "RunConfig", "StartedRun", "StopRun", "__version__", "load_config", "start", "train", "try_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("pipelinerl.api"), name)  # a run's processes start no run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

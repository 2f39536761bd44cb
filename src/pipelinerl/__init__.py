"""Reinforcement learning for language models with in-flight weight updates (the PipelineRL method).

    import pipelinerl
    summary = pipelinerl.train(pipelinerl.load_config(None, ["--trainer.steps", "20"]))

The engine can be used on its own: `pipelinerl.engine.LocalEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.schema import RunConfig

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "load_config", "train"]


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The configuration of a run file (None: the demo's) with settings on top (see `pipelinerl.config.load.load_config`)."""
    from pipelinerl.config import load  # noqa: PLC0415 - a run's processes load no run file

    return load.load_config(path, overrides)


def train(config: RunConfig, *, resume: str | Path | None = None) -> dict[str, Any]:
    """Run the training of `config` and return the contents of `summary.json` (see `pipelinerl.launch.run.train`)."""
    from pipelinerl.launch import run  # noqa: PLC0415 - most users of this package start no run

    return run.train(config, resume=None if resume is None else Path(resume))

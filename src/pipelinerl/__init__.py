"""Reinforcement learning for language models with in-flight weight updates (the PipelineRL method).

    import pipelinerl
    summary = pipelinerl.train(pipelinerl.load_config(None, ["--trainer.steps", "20"]))

The engine can be used on its own: `pipelinerl.engine.LocalEngine`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig, load_config

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "load_config", "train"]


def train(config: RunConfig, *, resume: str | Path | None = None) -> dict[str, Any]:
    """Run the training of `config` and return the contents of `summary.json` (see `pipelinerl.launch.run.train`)."""
    from pipelinerl.launch import run  # noqa: PLC0415 - most users of this package start no run

    return run.train(config, resume=None if resume is None else Path(resume))

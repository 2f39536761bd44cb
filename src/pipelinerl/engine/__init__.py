"""The embedded engine: continuous batching over slots, with weight updates between two decode steps."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from pipelinerl.engine.local import LocalEngine
from pipelinerl.errors import UnsupportedModelError

__all__ = ["LocalEngine", "make_engine"]

_log = logging.getLogger(__name__)


def make_engine(model: nn.Module, *, decoding: Literal["auto", "packed", "static"] = "auto", **options: Any) -> LocalEngine:
    """The embedded engine. `decoding`: see the run file's `engine.decoding`; `options`: see `LocalEngine`."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if decoding == "static" or (decoding == "auto" and on_gpu):
        from pipelinerl.engine.static import StaticEngine  # noqa: PLC0415 - for GPUs

        try:
            return StaticEngine(model, **options)
        except UnsupportedModelError as reason:
            if decoding == "static":
                raise
            _log.warning("%s runs without static decode steps: %s", type(model).__name__, reason)
    return LocalEngine(model, **options)

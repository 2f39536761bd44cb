"""The embedded engine: continuous batching over slots, with weight updates between two decode steps."""

from pipelinerl.engine.local import LocalEngine

__all__ = ["LocalEngine"]

"""How many groups may wait in the rollout stream."""

from __future__ import annotations

from pipelinerl.config.checks import groups_needed
from pipelinerl.config.schema import RunConfig


def stream_capacity(config: RunConfig) -> int:
    """`stream.capacity`, or twice what the trainer takes at once: a batch being read and the next being made."""
    return config.stream.capacity or 2 * groups_needed(config)

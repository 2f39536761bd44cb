"""What the processes of a run are called: in messages, in the names of their logs, and on their command lines."""

from __future__ import annotations

from pipelinerl.config.schema import RunConfig

TRAINING = "training"


def generation_roles(config: RunConfig) -> list[str]:
    """By process: numbered only if there are several."""
    processes = config.engine.processes
    return ["generation"] if processes == 1 else [f"generation-{index}" for index in range(processes)]

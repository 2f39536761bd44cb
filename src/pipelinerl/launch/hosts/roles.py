"""Names (roles) of a run's processes, used in messages, log names and command lines, and the stages of each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import Board
from pipelinerl.status.reporter import generation_stages
from pipelinerl.types import PREPROCESSOR, TRAINER, StageStatus

TRAINING = "training"
PREPROCESSING = "preprocessing"


def generation_roles(config: RunConfig) -> list[str]:
    """The generation processes, numbered only if there are several."""
    processes = config.engine.processes
    return ["generation"] if processes == 1 else [f"generation-{index}" for index in range(processes)]


def server_roles(config: RunConfig) -> list[str]:
    """The engine servers that the run starts itself."""
    if config.engine.kind == "local" or config.engine.urls:
        return []
    return [f"server-{index}" for index in range(config.engine.servers)]


def worker_roles(config: RunConfig) -> list[str]:
    """The processes that run stages and publish their statuses."""
    preprocessing = [PREPROCESSING] if config.launch.preprocessor == "process" else []
    return [*generation_roles(config), *preprocessing, TRAINING]


def worker_stages(config: RunConfig) -> list[str]:
    """The names on the status board of the stages of these processes."""
    preprocessor = [PREPROCESSOR] if config.launch.preprocessor == "process" else []
    generation = [stage for stages in generation_stages(config.engine.processes) for stage in stages]
    return [*generation, *preprocessor, TRAINER]


def starting(board: Board, stages: Iterable[str], detail: str) -> None:
    """Publish the status of stages of this process that are still starting, with what they are doing."""
    now = time.monotonic()
    for stage in stages:
        board.publish(StageStatus(stage=stage, pid=os.getpid(), state="starting", detail=detail, since_s=now, written_s=now))

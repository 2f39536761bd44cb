"""What stages say of themselves before they are there to say it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from pipelinerl.interfaces import Board
from pipelinerl.types import StageStatus


def starting(board: Board, stages: Iterable[str], detail: str) -> None:
    """Publish that these stages, all of this process, are starting, and what they are at."""
    now = time.monotonic()
    for stage in stages:
        board.publish(StageStatus(stage=stage, pid=os.getpid(), state="starting", detail=detail, since_s=now, written_s=now))

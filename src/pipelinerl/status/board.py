"""The status board: every stage publishes what it does and waits for. It outlives the stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pipelinerl.errors import INVALID_DATA
from pipelinerl.interfaces import Board
from pipelinerl.types import StageStatus


class MemoryBoard:
    """A status board within one process."""

    def __init__(self) -> None:
        self._statuses: dict[str, StageStatus] = {}

    def publish(self, status: StageStatus) -> None:
        self._statuses[status.stage] = status

    def read(self, stage: str) -> StageStatus | None:
        return self._statuses.get(stage)

    def stages(self) -> Sequence[str]:
        return sorted(self._statuses.copy())  # another thread may publish


def last_statuses(board: Board) -> dict[str, StageStatus]:
    """The last status of every stage on the board."""
    found = {stage: board.read(stage) for stage in board.stages()}
    return {stage: status for stage, status in found.items() if status is not None}


def write_statuses(path: Path, statuses: Mapping[str, StageStatus]) -> None:
    """Write statuses for processes that are not of the run, such as `watch`. Readers see all of them, or the ones before.

    Nothing is written on a full disk.
    """
    temporary = path.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(statuses))
        os.replace(temporary, path)


def read_statuses(path: Path) -> dict[str, StageStatus]:
    """What `write_statuses` wrote last; nothing if it has not."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, StageStatus])
    except (OSError, *INVALID_DATA):
        return {}

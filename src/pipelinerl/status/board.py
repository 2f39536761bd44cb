"""The status board: every stage publishes what it does and waits for. It outlives the stages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.errors import INVALID_DATA
from pipelinerl.interfaces import Board
from pipelinerl.types import ACTOR, ENGINE, Progress, StageState, StageStatus


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


REFRESH_S = 0.2
"""Interval at which the status is published while the state stays the same."""


class GenerationStages(NamedTuple):
    """The names of one generation process's stages on the status board."""

    engine: str = ENGINE
    actor: str = ACTOR


ALONE = GenerationStages()


def generation_stages(processes: int) -> list[GenerationStages]:
    """Stage names for each process, numbered (`engine-0`, `actor-0`) only if there are several processes."""
    numbers = [f"-{index}" for index in range(processes)] if processes > 1 else [""]
    return [GenerationStages(ENGINE + number, ACTOR + number) for number in numbers]


def starting(board: Board, stages: Iterable[str], detail: str) -> None:
    """Publish the status of stages of this process that are still starting, with what they are doing."""
    now = time.monotonic()
    for stage in stages:
        board.publish(StageStatus(stage=stage, pid=os.getpid(), state="starting", detail=detail, since_s=now, written_s=now))


class StatusReporter:
    """Publishes the status of one stage. `clock` is `time.monotonic`, or a fake in tests."""

    def __init__(self, board: Board, stage: str, clock: Callable[[], float]) -> None:
        self._board = board
        self._stage = stage
        self._clock = clock
        self._state: StageState | None = None
        self._since_s = 0.0
        self._written_s = 0.0

    def due(self, state: StageState) -> bool:
        """Whether `report` would publish `state` now. Check this before formatting an expensive message."""
        return state != self._state or self._clock() - self._written_s >= REFRESH_S

    def report(
        self,
        state: StageState,
        detail: str,
        progress: Callable[[], Progress | None] = lambda: None,
        *,
        waits_for: tuple[str, ...] = (),
        now: bool = False,
    ) -> None:
        """Publish if the state changed, `REFRESH_S` has passed, or `now` is set. `progress` is called only then."""
        if not (now or self.due(state)):
            return
        time_s = self._clock()
        if state != self._state:
            self._state, self._since_s = state, time_s
        self._written_s = time_s
        self._board.publish(
            StageStatus(
                stage=self._stage,
                pid=os.getpid(),
                state=state,
                detail=detail,
                waits_for=waits_for,
                since_s=self._since_s,
                written_s=time_s,
                progress=progress(),
            )
        )

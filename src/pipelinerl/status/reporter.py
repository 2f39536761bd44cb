"""What a stage says of itself on the board: often enough to be true, seldom enough to cost nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from pipelinerl.interfaces import Board
from pipelinerl.types import ACTOR, ENGINE, Progress, StageState, StageStatus

REFRESH_S = 0.2
"""While the state stays the same, the status is written again after this long."""


class GenerationStages(NamedTuple):
    """The stages of one generation process, as they are called on the board."""

    engine: str = ENGINE
    actor: str = ACTOR


ALONE = GenerationStages()


def generation_stages(processes: int) -> list[GenerationStages]:
    """By process: numbered (`engine-0`, `actor-0`) only if there are several."""
    if processes == 1:
        return [ALONE]
    return [GenerationStages(f"{ENGINE}-{index}", f"{ACTOR}-{index}") for index in range(processes)]


class StatusReporter:
    """One stage's line on the board. `clock` is `time.monotonic`, or a test's."""

    def __init__(self, board: Board, stage: str, clock: Callable[[], float]) -> None:
        self._board = board
        self._stage = stage
        self._clock = clock
        self._state: StageState | None = None
        self._since_s = 0.0
        self._written_s = 0.0

    def due(self, state: StageState) -> bool:
        """Whether a report of `state` would be published: what it says need not be put into words otherwise."""
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
        """Publish if the state changed, the last time is long enough ago, or `now`; `progress` is asked for only then."""
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

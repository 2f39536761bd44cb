"""What the trainer says of itself on the board, without saying it too often."""

from __future__ import annotations

import os
from collections.abc import Callable

from pipelinerl.interfaces import Board
from pipelinerl.types import StageState, StageStatus, TrainerProgress

STAGE = "trainer"
REFRESH_S = 0.2
"""While nothing changes, the status is written again after this long."""


class StatusReporter:
    """Publishes the trainer's status when its state changes, and otherwise every `REFRESH_S`."""

    def __init__(self, board: Board, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._state: StageState | None = None
        self._since_s = 0.0
        self._written_s = 0.0

    def report(self, state: StageState, detail: str, progress: Callable[[], TrainerProgress], *, now: bool = False) -> None:
        """`progress` is called only if the status is published. `now`: publish in any case."""
        time_s = self._clock()
        if state != self._state:
            self._state, self._since_s = state, time_s
        elif not now and time_s - self._written_s < REFRESH_S:
            return
        self._written_s = time_s
        self._board.publish(
            StageStatus(
                stage=STAGE,
                pid=os.getpid(),
                state=state,
                detail=detail,
                since_s=self._since_s,
                written_s=time_s,
                progress=progress(),
            )
        )

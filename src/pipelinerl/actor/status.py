"""What the generation side says of itself on the board, often enough to be true and seldom enough to cost nothing."""

from __future__ import annotations

import os
from collections.abc import Callable

from pipelinerl.interfaces import Board
from pipelinerl.types import Progress, StageState, StageStatus

PUBLISH_EVERY_S = 0.05


class StatusReporter:
    """One stage's line on the board. `clock` is `time.monotonic`, or a test's."""

    def __init__(self, board: Board, stage: str, clock: Callable[[], float]) -> None:
        self._board = board
        self._stage = stage
        self._clock = clock
        self._state: StageState = "starting"
        self._since_s = self._written_s = clock()
        self._published = False

    def report(self, state: StageState, detail: str, progress: Callable[[], Progress]) -> None:
        """Publish if the state changed or the last time is long enough ago; `progress` is asked for only then."""
        now = self._clock()
        changed = state != self._state
        if not changed and self._published and now - self._written_s < PUBLISH_EVERY_S:
            return
        if changed:
            self._state, self._since_s = state, now
        self._written_s, self._published = now, True
        self._board.publish(
            StageStatus(
                stage=self._stage,
                pid=os.getpid(),
                state=state,
                detail=detail,
                since_s=self._since_s,
                written_s=now,
                progress=progress(),
            )
        )

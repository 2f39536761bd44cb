"""The preprocessor in a process of its own. Otherwise the trainer's reader prepares each group.

rollout stream ──▶ reader of the trainer                                                     (one process)
rollout stream ──▶ reader ──▶ PreprocessorStage ──▶ hub ──▶ trainer                          (two)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelinerl.hub.client import HubReader
from pipelinerl.interfaces import Board
from pipelinerl.status.board import StatusReporter
from pipelinerl.types import ACTOR, PREPROCESSOR, TRAINER, Prepared

POLL_S = 0.002


class PreprocessorStage:
    """The preprocessor as a separate stage.

    consumes      groups from the rollout stream, a few more than the trainer has taken
    produces      prepared groups, in the same order
    waits for     the actor, when there is no group, or the trainer, when enough groups are prepared

    If the stage is killed, the group that it had is prepared again.
    """

    def __init__(self, reader: HubReader[Prepared], *, board: Board) -> None:
        self._reader = reader
        self._status = StatusReporter(board, PREPROCESSOR, time.monotonic)

    def run(self, stop: Callable[[], bool]) -> None:
        """Call `pump` until `stop()` is true. The last status on the status board tells how the stage ended."""
        try:
            while not stop():
                if not self.pump():
                    time.sleep(POLL_S)
        except BaseException as error:
            self._status.report("failed", type(error).__name__, now=True)
            raise
        self._status.report("done", "", now=True)

    def pump(self) -> bool:
        """Prepare the next group, and pass it on. False if there is none, or no room."""
        read = self._reader.read(1)
        for offset, prepared in read:
            self._reader.pass_on(offset, prepared)
            self._status.report("working", f"group {prepared.index} is prepared")
        if not read:
            wait = "groups from the actor, or the trainer to read prepared groups"
            self._status.report("waiting", wait, waits_for=(ACTOR, TRAINER))
        return bool(read)

"""The two places where groups are prepared: in the reader of the trainer, or in a separate process between two streams.

rollout stream ──▶ PreparingReader ──▶ trainer                                                        (one process)
rollout stream ──▶ PreparingReader ──▶ PreprocessorStage ──▶ prepared stream ──▶ trainer              (two)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipelinerl.hub.client import PreparedWriter
from pipelinerl.interfaces import Board, StreamReader
from pipelinerl.preprocess.preprocessor import Preprocessor
from pipelinerl.status.board import StatusReporter
from pipelinerl.types import ACTOR, PREPROCESSOR, TRAINER, Group, Prepared

POLL_S = 0.002


class PreparingReader:
    """A reader of a stream of groups that prepares each group it reads. Offsets and counts are the stream's."""

    def __init__(self, reader: StreamReader[Group], preprocessor: Preprocessor) -> None:
        self._reader = reader
        self._preprocessor = preprocessor

    def read(self, limit: int) -> Sequence[tuple[int, Prepared]]:
        """Read up to `limit` available groups and prepare them. Raises what the reader and the preprocessor raise."""
        return [(offset, self._preprocessor.process(group)) for offset, group in self._reader.read(limit)]

    def commit(self, offset: int) -> None:
        self._reader.commit(offset)


class PreprocessorStage:
    """The preprocessor as a separate stage.

    consumes      groups from the rollout stream, one more than the prepared stream has room for
    produces      prepared groups, in the same order
    waits for     the actor, when there is no group; the trainer, when the prepared stream is full

    If the stage is killed, the group that it had is prepared again.
    """

    def __init__(self, reader: StreamReader[Prepared], writer: PreparedWriter, *, board: Board) -> None:
        self._reader = reader
        self._writer = writer
        self._status = StatusReporter(board, PREPROCESSOR, time.monotonic)
        self._pending: tuple[int, Prepared] | None = None

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
        """Prepare the next group if none is pending, and write it to the prepared stream. False if neither was possible."""
        if self._pending is None:
            self._pending = next(iter(self._reader.read(1)), None)
        if self._pending is None:
            self._status.report("waiting", "groups from the actor", waits_for=(ACTOR,))
            return False
        offset, prepared = self._pending
        if not self._writer.try_pass_on(offset, prepared):
            wait = "the trainer to read prepared groups: its stream is full"
            self._status.report("waiting", wait, waits_for=(TRAINER,))
            return False
        self._pending = None
        self._status.report("working", f"group {prepared.index} is prepared")
        return True

"""Where groups become prepared groups: as the trainer reads them, or in a process between two streams.

rollout stream ──▶ PreparingReader ──▶ trainer                                                        (one process)
rollout stream ──▶ PreparingReader ──▶ PreprocessorStage ──▶ prepared stream ──▶ trainer              (two)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipelinerl.interfaces import Board, StreamReader, StreamStats, StreamWriter
from pipelinerl.preprocess.preprocessor import Prepared, Preprocessor
from pipelinerl.status.reporter import StatusReporter
from pipelinerl.types import ACTOR, PREPROCESSOR, TRAINER, Group

POLL_S = 0.002


class PreparingReader:
    """A stream of groups, read as prepared ones. Offsets and counts are those of the stream."""

    def __init__(self, reader: StreamReader[Group], preprocessor: Preprocessor) -> None:
        self._reader = reader
        self._preprocessor = preprocessor

    def read(self, limit: int) -> Sequence[tuple[int, Prepared]]:
        """Take up to `limit` groups that are there now and prepare them. Raises what reader and preprocessor raise."""
        return [(offset, self._preprocessor.process(group)) for offset, group in self._reader.read(limit)]

    def commit(self, offset: int) -> None:
        self._reader.commit(offset)

    def stats(self) -> StreamStats:
        return self._reader.stats()

    def close(self) -> None:
        self._reader.close()


class PreprocessorStage:
    """The preprocessor as a stage of its own, one turn at a time.

    consumes      groups from the rollout stream, one more than the prepared stream has room for
    produces      prepared groups, in the same order
    waits for     the actor, when there is no group; the trainer, when the prepared stream is full

    A group is committed in the first stream once it is in the second. Killed in between, it is in both, and whoever resumes
    the run leaves it in one.
    """

    def __init__(
        self,
        reader: StreamReader[Prepared],
        writer: StreamWriter[Prepared],
        *,
        board: Board,
        name: str = PREPROCESSOR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._status = StatusReporter(board, name, clock)
        self._in_hand: tuple[int, Prepared] | None = None

    def run(self, stop: Callable[[], bool]) -> None:
        """Turns until `stop()` says so. Whatever ends it is on the board then."""
        try:
            while not stop():
                if not self.pump():
                    time.sleep(POLL_S)
        except BaseException as error:
            self._status.report("failed", type(error).__name__, now=True)
            raise
        self._status.report("done", "", now=True)

    def pump(self) -> bool:
        """One turn: prepare a group, if there is none in hand, and pass it on. False if there was nothing to do."""
        if self._in_hand is None:
            self._in_hand = next(iter(self._reader.read(1)), None)
        if self._in_hand is None:
            self._status.report("waiting", "groups from the actor", waits_for=(ACTOR,))
            return False
        offset, prepared = self._in_hand
        if not self._writer.try_write(prepared):
            wait = "the trainer to take what is prepared: the stream to it is full"
            self._status.report("waiting", wait, waits_for=(TRAINER,))
            return False
        self._reader.commit(offset + 1)
        self._in_hand = None
        self._status.report("working", f"group {prepared.index} is prepared")
        return True

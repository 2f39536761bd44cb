"""The timeline of each engine's load: at most four small records a second, one file for each generation process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines, Lines
from pipelinerl.types import EngineProgress

EVERY_S = 0.25
TIMELINE_STEM = "timeline-"


class TimelineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine at `time_s`, on the axis of `StepRecord.time_s`; `tokens_generated` is over the session.

    `in_progress` sequences have a slot, `queued` requests wait for one. Includes requests of evaluations.
    """

    worker: int
    time_s: float
    in_progress: int
    queued: int
    tokens_generated: int
    version: int


class TimelineWriter:
    """Writes `RUN_DIR/timeline-WORKER.jsonl`. Times are seconds since `origin_s` of `clock`."""

    def __init__(
        self,
        run_dir: Path,
        worker: int,
        origin_s: float,
        clock: Callable[[], float] = time.monotonic,
        lines: Callable[[Path], Lines] = JsonLines,
    ) -> None:
        self._lines = lines(run_dir / f"{TIMELINE_STEM}{worker}.jsonl")
        self._worker, self._origin_s, self._clock = worker, origin_s, clock
        self._due_s = clock()

    def note(self, progress: Callable[[], EngineProgress]) -> None:
        """Write a record if the last one is `EVERY_S` old; `progress` is called only then. Raises RunDirectoryError."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        current = progress()
        record = TimelineRecord(
            worker=self._worker,
            time_s=now_s - self._origin_s,
            in_progress=current.in_progress,
            queued=current.queued,
            tokens_generated=current.tokens_generated,
            version=current.version,
        )
        try:
            self._lines.write(record)
        except OSError as error:
            why = error.strerror or error
            raise RunDirectoryError(f"can't write the timeline: {why}; free disk space and resume") from error

    def close(self) -> None:
        self._lines.close()

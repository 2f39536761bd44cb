"""Where records are written: JSON lines in the run directory. Trackers read them there (`tail`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pipelinerl.files import JsonLines, Lines
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipelinerl.metrics.records import StepRecord

Record: TypeAlias = "StepRecord | EvaluationRecord"


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends steps to `metrics.jsonl` and evaluations to `evaluations.jsonl` in the run directory, one line each.

    Each file is opened by `lines` when its first record is written.
    """

    def __init__(self, run_dir: Path, lines: Callable[[Path], Lines] = JsonLines) -> None:
        self._run = RunDirectory(run_dir)
        self._lines = lines
        self._files: dict[Path, Lines] = {}

    def write(self, record: Record) -> None:
        path = self._run.evaluations if isinstance(record, EvaluationRecord) else self._run.metrics
        if path not in self._files:
            self._files[path] = self._lines(path)
        self._files[path].write(record)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

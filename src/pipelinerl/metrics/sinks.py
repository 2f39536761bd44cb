"""Where records are written: JSON lines in the run directory. Trackers read them there (`tail`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pipelinerl.files import JsonLines, Lines
from pipelinerl.metrics.evaluations import EvaluationRecord

if TYPE_CHECKING:
    from pipelinerl.metrics.records import StepRecord

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

Record: TypeAlias = "StepRecord | EvaluationRecord"


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends steps to `metrics.jsonl` and evaluations to `evaluations.jsonl` in the run directory, one line each.

    Each file is opened when its first record is written.
    """

    def __init__(self, run_dir: Path, lines: Callable[[Path], Lines] = JsonLines) -> None:
        """`lines` opens a file."""
        self._run_dir = run_dir
        self._lines = lines
        self._files: dict[str, Lines] = {}

    def write(self, record: Record) -> None:
        name = EVALUATIONS_FILE if isinstance(record, EvaluationRecord) else METRICS_FILE
        if name not in self._files:
            self._files[name] = self._lines(self._run_dir / name)
        self._files[name].write(record)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

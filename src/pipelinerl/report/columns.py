"""The numbers of a run's optimizer steps as columns, with what is computed from several steps: times, sums, rates."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.timeline import TimelineRecord

MOST_POINTS = 2000


def begin_s(
    steps: Sequence[StepRecord], timeline: Iterable[TimelineRecord] = (), evaluations: Sequence[EvaluationRecord] = ()
) -> float:
    """The time, on the records' axis, when all stages were ready and nothing had been generated for training.

    The trainer is ready when it begins to wait for its first step. Engines are ready at the last record of the timeline
    before any sequence is in progress, or at its first record if there is none. The result is the latest of these times and
    of the end of an evaluation before training, but not later than the start of the first step.
    """
    first = steps[0]
    latest_s = first.time_s - first.train_s
    begin = latest_s - first.wait_s
    records = sorted(timeline, key=lambda record: record.time_s)
    idle = list(takewhile(lambda record: not record.in_progress, records))
    begin = max([begin, *(record.time_s for record in idle or records[:1])])
    return min(max([begin, *(one.time_s for one in evaluations if one.when == "before")]), latest_s)


class Seen(NamedTuple):
    """The points of `Columns` that a page has: the first `points` ones, each the mean of `stride` rows, of an edition."""

    edition: int = -1
    stride: int = 1
    points: int = 0


class Columns:
    """Numbers by row, one column for each name; NaN where a row has no such number.

    A page gets at most about `MOST_POINTS` points of each column: means of so many rows that they suffice.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}
        self._edition = 0

    def __getitem__(self, name: str) -> array[float]:
        return self._columns.get(name) or array("d", [math.nan]) * self.rows

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def append(self, numbers: Mapping[str, float]) -> None:
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * self.rows
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))
        self.rows += 1

    def cut(self, rows: int) -> None:
        """Remove all but the first `rows` rows: a resumed run repeats the others."""
        if rows < self.rows:
            self.rows, self._edition = rows, self._edition + 1
            for column in self._columns.values():
                del column[rows:]

    def since(self, seen: Seen) -> tuple[dict[str, Any] | None, Seen]:
        """The points after those that were seen, or all points if the earlier ones have changed; None if there are none.

        `start` is the number of points that the page should keep.
        """
        stride = 1
        while self.rows // stride > MOST_POINTS:
            stride *= 2
        points = self.rows // stride
        start = seen.points if (seen.edition, seen.stride) == (self._edition, stride) else 0
        now = Seen(self._edition, stride, points)
        if now == seen:
            return None, seen
        columns = {
            name: [_mean(column[i * stride : (i + 1) * stride]) for i in range(start, points)]
            for name, column in self._columns.items()
        }
        return {"start": start, "points": points, "columns": columns}, now


def _mean(values: array[float]) -> float | None:
    """The mean of the known numbers, with six digits."""
    known = [value for value in values if math.isfinite(value)]
    return float(f"{math.fsum(known) / len(known):.6g}") if known else None


class StepColumns(Columns):
    """`StepRecord.numbers` of each step, and

    minutes                         since `begin_s`, when all stages were ready
    rollouts                        trained on so far
    samples_per_s, trained_per_s    rollouts, and tokens with gradient, per second since the previous step
    """

    begin_s = 0.0

    def add(self, step: StepRecord, evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """A resumed run repeats steps: earlier rows of this version and later ones are removed."""
        keep, versions = self.rows, self["version"]
        while keep and versions[keep - 1] >= step.version:
            keep -= 1
        self.cut(keep)
        if not keep:
            self.begin_s = begin_s([step], (), evaluations)
        passed_s = step.time_s - (self["time_s"][-1] if keep else self.begin_s)
        numbers = step.numbers() | {
            "minutes": max(0.0, step.time_s - self.begin_s) / 60,
            "rollouts": (self["rollouts"][-1] if keep else 0.0) + step.samples,
        }
        if passed_s > 0:
            numbers |= {"samples_per_s": step.samples / passed_s, "trained_per_s": step.tokens_trained / passed_s}
        self.append(numbers)

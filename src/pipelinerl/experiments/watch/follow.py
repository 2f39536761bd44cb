"""Curves with a bounded number of points, for pages that follow them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_POINTS = 2000


class Seen(NamedTuple):
    """The points of `Curves` that a page has: the first `points` ones, each the mean of `stride` rows, of an edition."""

    edition: int = -1
    stride: int = 1
    points: int = 0


class Curves:
    """Numbers by row, one column for each name; NaN where a row has no such number.

    A page gets at most about `MOST_POINTS` points of each column: means of so many rows that they suffice.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}
        self._edition = 0

    def column(self, name: str) -> array[float]:
        return self._columns.get(name, array("d"))

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

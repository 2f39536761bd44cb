"""Growing files of JSON lines, read from where the last look ended, and curves with a bounded number of points."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA

T = TypeVar("T")

LOOK_BYTES = 1 << 22
"""Bytes that one look reads of a file: some ten milliseconds of decoding."""
MAX_LINE_BYTES = 1 << 26
HEAD_BYTES = 256
"""A file that begins otherwise is another one. Its number does not tell: file systems reuse those of deleted files."""
MOST_POINTS = 2000


class Tail(Generic[T]):
    """The records that are added to a file of JSON lines. The file need not exist yet, or may be replaced by another one.

    restarted   the last look began at the start of another file, or of one that was cut
    more        the last look did not reach the end of the file
    damaged     lines that are not such records; they are skipped
    """

    def __init__(self, path: Path, kind: type[T], *, newest: bool = False) -> None:
        """`newest`: of what was added since the last look, only the last `LOOK_BYTES` are read."""
        self.path = path
        self.restarted = self.more = False
        self.damaged = 0
        self._decoder = msgspec.json.Decoder(kind)
        self._newest = newest
        self._head = b""
        self._read = 0

    def look(self) -> list[T]:
        """The next records, from at most about `LOOK_BYTES`. A last line without a newline is left for a later look."""
        self.restarted = self.more = False
        try:
            data = self._next()
        except OSError:  # not there yet, or gone
            return []
        found = []
        for line in data.splitlines():
            try:
                found.append(self._decoder.decode(line))
            except INVALID_DATA:
                self.damaged += 1
        return found

    def _next(self) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            if size < self._read or not head.startswith(self._head):
                self.restarted = True
                self._read = self.damaged = 0
            self._head = head
            cut = self._newest and size - self._read > LOOK_BYTES
            if cut:
                self._read = size - LOOK_BYTES
            file.seek(self._read)
            data = file.read(min(LOOK_BYTES, size - self._read))
            while not (end := data.rfind(b"\n") + 1) and len(data) < min(size - self._read, MAX_LINE_BYTES):
                data += file.read(LOOK_BYTES)
        self._read += end or (len(data) if len(data) >= MAX_LINE_BYTES else 0)
        self.more = self._read < size and end > 0
        return data[data.find(b"\n") + 1 if cut else 0 : end]


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

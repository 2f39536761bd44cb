"""Reads the records of a run directory, also of a run that was killed or resumed, or that is still writing them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import Record, StepRecord
from pipelinerl.run_directory import RunDirectory

T = TypeVar("T")
RecordT = TypeVar("RecordT", StepRecord, EvaluationRecord)


def placed_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """The records of a JSON lines file, each with the byte at which its line begins; none if there is no such file.

    A last line without a line break is left out: it is still being written, or its writer was killed.

    Raises RunDirectoryError for a file that can't be read and for any other line that is not such a record, with its number.
    """
    decode, begin, number = msgspec.json.Decoder(kind).decode, 0, 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007 - an error names it
                if line.endswith(b"\n"):
                    yield begin, decode(line)
                begin += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except INVALID_DATA as error:
        raise RunDirectoryError(f"damaged records: {path}, line {number}: {error}; repair or delete the line") from error


def read_lines(path: Path, kind: type[T], repeats: Callable[[T, T], bool] = lambda _old, _new: False) -> list[T]:
    """The records of a JSON lines file, without the ones that a later record `repeats(old, new)`. Raises RunDirectoryError.

    A run that resumes from a checkpoint repeats the steps after it: the later lines count.
    """
    return without_repeated(map(itemgetter(1), placed_lines(path, kind)), repeats)


def without_repeated(written: Iterable[T], repeats: Callable[[T, T], bool]) -> list[T]:
    """The records without the ones that a later record `repeats(old, new)`."""
    records: list[T] = []
    for record in written:
        while records and repeats(records[-1], record):
            records.pop()
        records.append(record)
    return records


def read_records(path: Path, kind: type[RecordT]) -> list[RecordT]:
    """The records of a JSONL file, in order of version.

    Of equal versions the later line counts, and earlier lines with a later version than a repeated one are left out. The
    same holds for online evaluations that used weights after the checkpoint. Raises RunDirectoryError as `read_lines` does.
    """
    return read_lines(path, kind, superseded)


def superseded(old: Record, new: Record) -> bool:
    """Whether a later line of the same file replaces this one."""
    if isinstance(old, StepRecord) or isinstance(new, StepRecord):
        return old.version >= new.version
    return old.when == new.when and (old.version >= new.version or old.newest_version > new.version)


# ---- files that grow, read from where the last look ended

LOOK_BYTES = 1 << 22
"""Bytes that one look reads of a file: some ten milliseconds of decoding."""
HEAD_BYTES = 256
"""A file that begins otherwise is another one. Its number does not tell: file systems reuse those of deleted files."""

MAX_LINE_BYTES = 1 << 26
"""A longer line is damaged: its bytes are skipped in parts of this size."""


class Tail(Generic[T]):
    """The records that are added to a file of JSON lines. The file need not exist yet, or may be replaced by another one.

    place       how many bytes were read; the next look begins there
    restarted   the last look began at the start of another file, or of a file that was cut
    more        the last look did not reach the end of the file
    damaged     lines that are not such records; they are skipped
    """

    def __init__(self, path: Path, kind: type[T], *, newest: bool = False) -> None:
        """`newest`: of what was added since the last look, only the last `LOOK_BYTES` are read."""
        self.path = path
        self.place = 0
        self.restarted = self.more = False
        self.damaged = 0
        self._decoder = msgspec.json.Decoder(kind)
        self._newest = newest
        self._head = b""

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
            if size < self.place or not head.startswith(self._head):
                self.restarted = True
                self.place = self.damaged = 0
            self._head = head
            cut = self._newest and size - self.place > LOOK_BYTES
            if cut:
                self.place = size - LOOK_BYTES
            file.seek(self.place)
            data = file.read(min(LOOK_BYTES, size - self.place))
            while not (end := data.rfind(b"\n") + 1) and len(data) < min(size - self.place, MAX_LINE_BYTES):
                data += file.read(LOOK_BYTES)
        read = end or (len(data) if len(data) >= MAX_LINE_BYTES else 0)
        self.place += read
        self.more = self.place < size and read > 0
        return data[data.find(b"\n") + 1 if cut else 0 : end]


class Records:
    """The records of a run from `place` on, in the order of their times. A run that is resumed repeats some versions.

    place   the bytes that were read of the files of steps and of evaluations
    """

    def __init__(self, run_dir: Path, place: tuple[int, int] = (0, 0)) -> None:
        run = RunDirectory(run_dir)
        self._steps, self._evaluations = Tail(run.metrics, StepRecord), Tail(run.evaluations, EvaluationRecord)
        self.place = self._steps.place, self._evaluations.place = place

    def read(self) -> list[Record]:
        """The complete records that were written since the last call. Damaged lines are left out."""
        found: list[Record] = []
        tails: tuple[Tail[StepRecord] | Tail[EvaluationRecord], ...] = (self._steps, self._evaluations)
        for tail in tails:
            found += tail.look()
            while tail.more:
                found += tail.look()
        self.place = self._steps.place, self._evaluations.place
        return sorted(found, key=lambda record: record.time_s)

"""Reads the records of a run directory, also of a run that was killed or resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import Record

T = TypeVar("T")
RecordT = TypeVar("RecordT", StepRecord, EvaluationRecord)


def read_json_lines(path: Path, record_type: type[T]) -> list[T]:
    """All complete lines of a JSON lines file. A last line without a newline is still being written, or partial: skipped.

    Raises OSError, and ValueError naming file and line for a line that is not a `record_type`.
    """
    decoder = msgspec.json.Decoder(record_type)
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                records.append(decoder.decode(line))
            except INVALID_DATA as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def read_lines(path: Path, kind: type[T], repeats: Callable[[T, T], bool] = lambda _old, _new: False) -> list[T]:
    """The records of a JSON lines file of a run, without those that a later record `repeats(old, new)`.

    A run that resumes from a checkpoint repeats the steps after it: the later lines count. A last line without a line break
    is left out: it was being written when the process died.

    Raises FileNotFoundError, and RunDirectoryError for a file that can't be read and for any other line that is not such a
    record.
    """
    try:
        written = read_json_lines(path, kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(f"damaged records: {error}; repair or delete the line") from error
    return without_repeated(written, repeats)


def without_repeated(written: Iterable[T], repeats: Callable[[T, T], bool]) -> list[T]:
    """The records without those that a later record `repeats(old, new)`."""
    records: list[T] = []
    for record in written:
        while records and repeats(records[-1], record):
            records.pop()
        records.append(record)
    return records


def read_records(path: Path, kind: type[RecordT]) -> list[RecordT]:
    """The records of a JSONL file, in order of version; empty if the file is missing or empty.

    Of equal versions the later line counts, and earlier lines with a later version than a repeated one are left out. The
    same holds for online evaluations that used weights after the checkpoint. Raises RunDirectoryError as `read_lines` does.
    """
    try:
        return read_lines(path, kind, superseded)
    except FileNotFoundError:
        return []


def superseded(old: Record, new: Record) -> bool:
    """Whether a later line of the same file replaces this one."""
    if isinstance(old, StepRecord) or isinstance(new, StepRecord):
        return old.version >= new.version
    return old.when == new.when and (old.version >= new.version or old.newest_version > new.version)

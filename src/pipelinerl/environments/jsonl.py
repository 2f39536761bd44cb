"""Rows that people give us, in files of JSON lines or as data sets: every complaint names the file and the line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.environments.datasets_rows import names_a_dataset, read_dataset
from pipelinerl.errors import EnvironmentSetupError

MAX_LINE_BYTES = 16 << 20
"""A longer line is no problem of anybody's, but a file of another kind."""


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the value of each line that isn't blank, read as it is asked for; likewise of `dataset:...`.

    Raises EnvironmentSetupError for a file that can't be read, and for a line that isn't JSON or is too long.
    """
    if names_a_dataset(path):
        yield from read_dataset(str(path))
        return
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > MAX_LINE_BYTES:
                    raise EnvironmentSetupError(f"{path}:{number} has over {MAX_LINE_BYTES >> 20} MiB: not JSON lines?")
                if line.strip():
                    yield number, _value(line, f"{path}:{number}")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> EnvironmentSetupError:
    """What to say of a file that can't be read."""
    place = "" if path.is_absolute() else f" ({path.absolute()}: a path is relative to the working directory)"
    return EnvironmentSetupError(f"can't read {path}: {error.strerror or error}{place}")


def field_of(row: Any, name: str) -> Any:
    """`row[name]`, or what the path `name` leads to, such as `extra.answer` or `0.value`. Raises KeyError."""
    if isinstance(row, dict) and name in row:
        return row[name]
    value = row
    for step in name.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise KeyError(name)
    return value


def fields_of(row: Any) -> str:
    """The names of a row's fields, for a message."""
    return (", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}") or "none"


def _value(line: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvironmentSetupError(f"{place} is not JSON: {error}") from error

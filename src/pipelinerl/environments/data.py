"""Reads examples from files of JSON lines or Hugging Face data sets, and splits off the held-out ones."""

from __future__ import annotations

import codecs
import importlib.util
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.environments.options import Files, listed, names_a_dataset, unreadable
from pipelinerl.errors import INVALID_DATA, EnvironmentSetupError, MissingDependencyError
from pipelinerl.types import Problem

# ---- data sets of the Hugging Face hub, or folders in one of its formats (Parquet, CSV, JSON, Arrow, ...)
# Read by the package `datasets`, which runs no code that comes with a data set.

_NAME = re.compile(r"dataset:(?P<path>.+):(?P<split>\w[\w.+-]*(?:\[[^\]]*\])?)")  # a split may be a part of one: train[:10%]
FORM = "dataset:OWNER/NAME:SPLIT, dataset:OWNER/NAME/CONFIG:SPLIT or dataset:path/to/folder:SPLIT"


class DatasetName(NamedTuple):
    path: str
    config: str | None
    split: str


def parse_name(source: str) -> DatasetName:
    """Raises EnvironmentSetupError if `source` does not have one of the forms in `FORM`."""
    parts = _NAME.fullmatch(source)
    if parts is None:
        raise EnvironmentSetupError(f"{source!r} does not name a data set: write {FORM}")
    path, split = parts["path"], parts["split"]
    if Path(path).expanduser().is_dir():
        return DatasetName(str(Path(path).expanduser()), None, split)
    owner, name, *rest = [*path.split("/"), ""] if "/" in path else ["", ""]
    if not owner or not name or len(rest) > 2:
        raise EnvironmentSetupError(f"{source!r}: {path!r} is neither a folder here nor OWNER/NAME of the hub; write {FORM}")
    return DatasetName(f"{owner}/{name}", rest[0] or None, split)


def read_dataset(source: str) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the fields of each row.

    Raises MissingDependencyError, and EnvironmentSetupError for a data set that can't be loaded or has values that JSON
    can't represent.
    """
    name = parse_name(source)
    if importlib.util.find_spec("datasets") is None:
        raise MissingDependencyError("datasets is not installed: pip install 'pipelinerl[datasets]'")
    import datasets  # noqa: PLC0415 - takes seconds, and is an extra

    try:
        rows = datasets.load_dataset(name.path, name.config, split=name.split)
    except Exception as error:  # the hub, its HTTP library and file formats raise many types
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnvironmentSetupError(f"{source}: the data set can't be loaded: {why}") from error
    for number, row in enumerate(rows, 1):
        try:
            yield number, msgspec.json.decode(msgspec.json.encode(row))
        except (TypeError, ValueError) as error:
            raise EnvironmentSetupError(
                f"{source}:{number} has a field that is not a text, number or list: {error}"
            ) from error


# ---- rows of user files: every error names the file and the line

MAX_LINE_BYTES = 16 << 20
"""A longer line means that the file is not JSON lines."""


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the value of each non-blank line, read lazily; or of each row of `dataset:...`.

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


def field_of(row: Any, name: str) -> Any:
    """`row[name]`, or the value at the path `name`, such as `extra.answer` or `0.value`. Raises KeyError."""
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
    """The names of a row's fields, for an error message."""
    return (", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}") or "none"


def _value(line: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except INVALID_DATA as error:
        raise EnvironmentSetupError(f"{place} is not JSON: {error}") from error


# ---- problems: read, split, and in an endless order

Check = Callable[[dict[str, Any]], str | None]
"""Returns what is wrong with a row of a file; None if it can be used."""


class Split(NamedTuple):
    training: list[Problem]
    held_out: list[Problem]


class ProblemSet:
    """A finite set of problems as an endless stream: each once per epoch.

    The order depends on the epoch and on `name`, which includes the run's seed. Held-out problems are never trained on.
    """

    def __init__(self, parts: Split, name: str) -> None:
        self._parts = parts
        self._name = name
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self._parts.training))
        return self._parts.training[self._order(epoch)[place]]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._parts.held_out[:count]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._parts.training)))
        random.Random(f"{self._name}/{epoch}").shuffle(order)
        return order


def read_problems(files: Files, read: Callable[[Path], list[Problem]]) -> list[Problem]:
    """What `read` returns for each of the files. Raises EnvironmentSetupError for a file without problems."""
    problems = []
    for name in listed(files):
        found = read(Path(name).expanduser())
        if not found:
            raise EnvironmentSetupError(f"{name} has no problems: it is empty")
        problems += found
    return problems


def read_split(data: Files, held_out: float | Files, check: Check, key: Callable[[Problem], str]) -> Split:
    """The rows of the files `data`, JSON objects, as payloads of problems.

    `held_out` is a share of them to hold out, or files with the held-out problems. Raises EnvironmentSetupError for unusable
    files, and if no problem is left to train on.
    """
    read = partial(_read_rows, check=check)
    problems = read_problems(data, read)
    if isinstance(held_out, float):
        return split(problems, held_out, key)
    return without(problems, read_problems(held_out, read), key, data)


def without(problems: list[Problem], held_out: list[Problem], key: Callable[[Problem], str], data: Files) -> Split:
    """Train on the problems of `data` that are not held out. Raises EnvironmentSetupError if there are none."""
    keys = set(map(key, held_out))
    training = [problem for problem in problems if key(problem) not in keys]
    if not training:
        raise EnvironmentSetupError(f"{data}: all of its {len(problems)} problems are held out; give it more")
    return Split(training, held_out)


def split(problems: list[Problem], held_out: float, key: Callable[[Problem], str]) -> Split:
    """Hold out this share of the keys, rounded up, but never all. A hash of the key decides, not the order of the file.

    Problems with the same key are in the same part.
    """
    keys = sorted({key(problem) for problem in problems}, key=lambda text: blake2b(text.encode()).digest())
    chosen = set(keys[: min(math.ceil(held_out * len(keys)), len(keys) - 1)])
    training = [problem for problem in problems if key(problem) not in chosen]
    return Split(training, [problem for problem in problems if key(problem) in chosen])


def _read_rows(path: Path, check: Check) -> list[Problem]:
    problems = []
    for number, example in read_rows(path):
        wrong = check(example) if isinstance(example, dict) else "is not a JSON object"
        if wrong:
            raise EnvironmentSetupError(f"{path}:{number} {wrong}")
        problems.append(Problem(id=f"{path.stem}/{number}", payload=example))
    return problems

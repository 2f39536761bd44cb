"""Reads examples from files (JSON, Parquet) or Hugging Face data sets, and splits off the held-out ones."""

from __future__ import annotations

import codecs
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.environments.options import Files, listed
from pipelinerl.errors import INVALID_DATA, EnvironmentSetupError
from pipelinerl.extras import require
from pipelinerl.types import Problem

# ---- data sets of the Hugging Face hub, or folders in one of its formats (Parquet, CSV, JSON, Arrow, ...)
# Read by the package `datasets`, which runs no code that comes with a data set.

_NAME = re.compile(r"dataset:(?P<path>[^:]+):(?P<split>\w[\w.+-]*(?:\[[^\]]*\])?)")  # a split may be a part: train[:10%]
_FORM = "dataset:OWNER/NAME:SPLIT, dataset:OWNER/NAME/CONFIG:SPLIT or dataset:path/to/folder:SPLIT"


def parse_name(source: str) -> tuple[str, str | None, str]:
    """Path, config and split. Raises EnvironmentSetupError if `source` does not have one of the forms in `_FORM`."""
    if parts := _NAME.fullmatch(source):
        folder, names = Path(parts["path"]).expanduser(), parts["path"].split("/")
        if folder.is_dir():
            return str(folder), None, parts["split"]
        if all(names) and len(names) in (2, 3) and not folder.is_file():
            return "/".join(names[:2]), (*names, None)[2], parts["split"]
    raise EnvironmentSetupError(f"{source!r} does not name a data set: write {_FORM}; a file has no splits")


def read_dataset(source: str) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the fields of each row.

    Raises MissingDependencyError, and EnvironmentSetupError for a data set that can't be loaded or has values that JSON
    can't represent.
    """
    path, config, split = parse_name(source)
    require("datasets", source)
    import datasets  # noqa: PLC0415 - takes seconds, and is an extra

    try:
        rows = datasets.load_dataset(path, config, split=split)
    except Exception as error:  # the hub, its HTTP library and file formats raise many types
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnvironmentSetupError(f"{source}: the data set can't be loaded: {why}") from error
    for number, row in enumerate(rows, 1):
        yield number, _json_value(row, f"{source}:{number}")


# ---- rows of user files: every error names the file and the line

_READ = "files of JSON lines or of one JSON array, and .parquet; other forms with dataset:FOLDER:SPLIT"


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The number and the value of each row: of a file, by its suffix, or of `dataset:...`.

    Rows of JSON lines have the number of their line, others are counted from 1. Raises EnvironmentSetupError for
    unreadable files and rows, MissingDependencyError for Parquet without pyarrow.
    """
    if str(path).startswith("dataset:"):
        yield from read_dataset(str(path))
        return
    try:
        yield from (_parquet_rows if path.suffix.lower() == ".parquet" else _json_rows)(path)
    except OSError as error:
        place = "" if path.is_absolute() else f" ({path.absolute()}: a path is relative to the working directory)"
        raise EnvironmentSetupError(f"can't read {path}: {error.strerror or error}{place}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of one array of objects, or the non-blank lines, read lazily."""
    with open(path, "rb") as file:
        starts = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
        if starts.startswith(b"[") and path.suffix.lower() != ".jsonl":
            with suppress(*INVALID_DATA):
                text = file.read().removeprefix(codecs.BOM_UTF8)
                yield from enumerate(msgspec.json.decode(text, type=list[dict[str, Any]]), 1)
                return
            file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8))
            except INVALID_DATA as error:
                why = f"{error} ({_READ} can be read, in UTF-8)" if number == 1 else str(error)
                raise EnvironmentSetupError(f"{path}:{number} is not JSON: {why}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    require("parquet", str(path))
    from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra

    number = 0
    with open(path, "rb") as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, _json_value(row, f"{path}:{number}")
        except ArrowException as error:
            raise EnvironmentSetupError(f"{path} is not Parquet: {' '.join(str(error).split())}") from error


def _json_value(row: Any, place: str) -> Any:
    try:
        return msgspec.json.decode(msgspec.json.encode(row))
    except (TypeError, ValueError) as error:
        raise EnvironmentSetupError(f"{place} has a field that is not a text, number or list: {error}") from error


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


# ---- problems: read, split, and in an endless order

Check = Callable[[dict[str, Any]], str | None]
"""Returns what is wrong with a row of a file; None if it can be used."""


def canonical(value: Any) -> str:
    """JSON, the same for equal values."""
    return msgspec.json.encode(value, order="deterministic").decode()


def by_payload(problem: Problem) -> str:
    """Identifies a problem by all that it contains."""
    return canonical(problem.payload)


class Split(NamedTuple):
    """`key` identifies a problem: no problem of one part has the key of one of the other."""

    training: list[Problem]
    held_out: list[Problem]
    key: Callable[[Problem], str] = by_payload


class ProblemSet:
    """A finite set of problems as an endless stream: each once per epoch.

    The order depends on the epoch and on `name`, which includes the run's seed. Held-out problems are never trained on, and
    are ordered by a hash of their content: the first ones are a random sample, the same in every run.
    """

    def __init__(self, parts: Split, name: str) -> None:
        self.training_count = len(parts.training)  # the length of an epoch
        self._parts = parts
        self._name = name
        self._held_out = sorted(parts.held_out, key=lambda problem: blake2b(by_payload(problem).encode()).digest())
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        epoch, place = divmod(index, self.training_count)
        return self._parts.training[self._order(epoch)[place]]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    def trained_on(self, problems: Sequence[Problem]) -> list[str]:
        """The ids of those of `problems` that are among the training problems."""
        keys = set(map(self._parts.key, self._parts.training))
        return [problem.id for problem in problems if self._parts.key(problem) in keys]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.training_count))
        random.Random(f"{self._name}/{epoch}").shuffle(order)
        return order


def read_problems(files: Files, payload: Callable[[Any, str], dict[str, Any]]) -> list[Problem]:
    """The rows of the files as problems. `payload` makes a problem's payload from a row and its place, `FILE:NUMBER`.

    Raises EnvironmentSetupError for a file without problems.
    """
    problems = []
    for name in listed(files):
        path = Path(name).expanduser()
        found = [
            Problem(id=f"{path.stem}/{number}", payload=payload(row, f"{path}:{number}")) for number, row in read_rows(path)
        ]
        if not found:
            raise EnvironmentSetupError(f"{name} has no problems: it is empty")
        problems += found
    return problems


def read_split(data: Files, held_out: float | Files, check: Check, key: Callable[[Problem], str]) -> Split:
    """The rows of the files `data`, JSON objects, as payloads of problems.

    `held_out` is a share of them to hold out, or files with the held-out problems. Raises EnvironmentSetupError for unusable
    files, and if no problem is left to train on.
    """

    def payload(row: Any, place: str) -> dict[str, Any]:
        if not isinstance(row, dict):
            hint = ", but a list: write one object a line, or one array into a file with the suffix .json"
            raise EnvironmentSetupError(f"{place} is not a JSON object{hint if isinstance(row, list) else ''}")
        if wrong := check(row):
            raise EnvironmentSetupError(f"{place} {wrong}")
        return row

    problems = read_problems(data, payload)
    return split(problems, held_out if isinstance(held_out, float) else read_problems(held_out, payload), key, data)


def split(problems: list[Problem], held_out: float | list[Problem], key: Callable[[Problem], str], data: Files) -> Split:
    """Train on the problems of `data` that are not held out. Problems with the same key are in the same part.

    A share of the keys to hold out is rounded up, but is never all; a hash of the key decides, not the order of the file.
    Raises EnvironmentSetupError if no problem is left.
    """
    if isinstance(held_out, float):
        keys = sorted(set(map(key, problems)), key=lambda text: blake2b(text.encode()).digest())
        chosen = set(keys[: min(math.ceil(held_out * len(keys)), len(keys) - 1)])
        held_out = [problem for problem in problems if key(problem) in chosen]
    else:
        chosen = set(map(key, held_out))
    training = [problem for problem in problems if key(problem) not in chosen]
    if not training:
        raise EnvironmentSetupError(f"{data}: all of its {len(problems)} problems are held out; give it more")
    return Split(training, held_out, key)

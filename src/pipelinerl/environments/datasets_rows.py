"""Rows of data sets of the Hugging Face hub, or of a folder in one of its formats, through the package `datasets`.

    dataset:openai/gsm8k/main:train        OWNER/NAME, perhaps /CONFIG, and the split
    dataset:path/to/folder:train           Parquet, CSV, JSON, Arrow, ...

`datasets` runs no code that comes with a data set.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError

PREFIX = "dataset:"
_NAME = re.compile(r"dataset:(?P<path>.+):(?P<split>\w[\w.+-]*(?:\[[^\]]*\])?)")  # a split may be a part of one: train[:10%]
FORM = "dataset:OWNER/NAME:SPLIT, dataset:OWNER/NAME/CONFIG:SPLIT or dataset:path/to/folder:SPLIT"


class DatasetName(NamedTuple):
    path: str
    config: str | None
    split: str


def names_a_dataset(source: Path) -> bool:
    return str(source).startswith(PREFIX)


def parse_name(source: str) -> DatasetName:
    """Raises EnvironmentSetupError for what has no such form."""
    parts = _NAME.fullmatch(source)
    if parts is None:
        raise EnvironmentSetupError(f"{source!r} names no data set: write {FORM}")
    path, split = parts["path"], parts["split"]
    if Path(path).expanduser().is_dir():
        return DatasetName(str(Path(path).expanduser()), None, split)
    owner, name, *rest = [*path.split("/"), ""] if "/" in path else ["", ""]
    if not owner or not name or len(rest) > 2:
        raise EnvironmentSetupError(f"{source!r}: {path!r} is neither a folder here nor OWNER/NAME of the hub; write {FORM}")
    return DatasetName(f"{owner}/{name}", rest[0] or None, split)


def read_dataset(source: str) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the fields of each row.

    Raises MissingDependencyError, and EnvironmentSetupError for a data set that can't be had or has what JSON hasn't.
    """
    name = parse_name(source)
    if importlib.util.find_spec("datasets") is None:
        raise MissingDependencyError("datasets is not installed: pip install 'pipelinerl[datasets]'")
    import datasets  # noqa: PLC0415 - takes seconds, and is an extra

    try:
        rows = datasets.load_dataset(name.path, name.config, split=name.split)
    except Exception as error:  # of the hub, of its HTTP library, of file formats: there is no end of them
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnvironmentSetupError(f"{source}: the data set can't be loaded: {why}") from error
    for number, row in enumerate(rows, 1):
        try:
            yield number, msgspec.json.decode(msgspec.json.encode(row))
        except (TypeError, ValueError) as error:
            raise EnvironmentSetupError(f"{source}:{number} has a field that is no text, number or list: {error}") from error

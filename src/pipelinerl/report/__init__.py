"""Reports on runs and experiments. This module writes files and tables for the terminal.

columns.py    the numbers of a run's steps, for figures and pages
series.py     the records of a run, and the measures for comparing runs
curves.py     the figure of one run
terminal.py   the table and the sample at the end of a run
sections.py   tables and charts of experiments
following.py  trackers and the callback, in a process of their own

The page of a report is `experiments/watch/page.py`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically. Raises RunDirectoryError if `path` can't be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RunDirectoryError(f"can't write {path}: {error.strerror}") from error


def write_json(path: Path, value: object, *, indent: int = 1) -> None:
    """Write `value` as JSON with one item per line. Raises RunDirectoryError if `path` can't be written."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n")


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Errors while writing to the output folder `out` become RunDirectoryErrors that say what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"can't write to {out}: {error.strerror}; free space, or choose another --out") from error


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Pictures, pages and tables of results that are already written: an error is one line, and decides nothing else."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - libraries that draw raise errors of many types
        print(f"warning: {what} is missing: {' '.join(str(error).split())}", flush=True)


def new_table(title: str, *columns: str, caption: str | None = None, show_header: bool | None = None) -> Table:
    """A table for the terminal. `rendered` reads no markup in its texts, such as paths."""
    table = Table(
        title=Text(title, "bold"),
        caption=caption,
        show_header=any(columns) if show_header is None else show_header,
        title_justify="left",
        caption_justify="left",
        border_style="dim",
    )
    for column in columns:
        table.add_column(column)
    return table


def rendered(*parts: RenderableType, width: int | None = None) -> str:
    """The parts as text: as wide as the terminal and in its colours, or without colours and `width` characters wide."""
    console = Console(file=None if width is None else io.StringIO(), width=width, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def number(value: float | None, pattern: str) -> str:
    """The formatted value, `-` for None."""
    return "-" if value is None else format(value, pattern)


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}" + ("" if amount == 1 else "s")

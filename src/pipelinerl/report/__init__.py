"""Reports on runs and experiments. This module writes files, tables for the terminal, and sections of pages.

curves.py     the steps of a run as columns, and the figure of one run
series.py     the measures for comparing runs, and the records of a run directory
terminal.py   the table and the sample at the end of a run
trackers.py   trackers and the callback, in processes of their own

The page of a report is `experiments/watch/page.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def number(value: float | None, pattern: str) -> str:
    """The formatted value, `-` for None."""
    return "-" if value is None else format(value, pattern)


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}" + ("" if amount == 1 else "s")


# ---- tables and charts of experiments, for a page and for the terminal


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over the same `x`, by name; None leaves a gap. `log`: y has a logarithmic scale.

    intervals   for each line, its lower and upper limits; empty: there are none
    """

    title: str
    x_label: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]
    log: bool = False
    intervals: Sequence[Sequence[Sequence[float]]] = ()


class PageSection(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a page above its runs: paragraphs, a table and charts. Rows whose first cell is in `strong` stand out."""

    title: str
    texts: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    strong: Sequence[str] = ()
    charts: Sequence[Chart] = ()


def table(title: str, rows: Sequence[Mapping[str, str]], *texts: str, strong: Sequence[str] = ()) -> PageSection:
    """A section with a table of rows that all have the same columns, given as cells by column name."""
    cells = [list(row.values()) for row in rows]
    return PageSection(title=title, texts=texts, header=list(rows[0]) if rows else [], rows=cells, strong=strong)


def in_terminal(section: PageSection) -> str:
    """Its table, with the texts below: the first column to the left, all others to the right.

    A table that would be wider than the terminal (or COLUMNS) is continued below, with its first column again.
    """
    cells = [section.header, *section.rows]
    widths = [max(len(line) for row in cells for line in row[at].split("\n")) + 3 for at in range(len(section.header))]
    tables: list[list[int]] = []  # the columns of each
    left = 0
    for place, width in enumerate(widths[1:], start=1):
        left -= width
        if left < 0 or not tables:
            tables.append([0])
            left = Console().width - 1 - widths[0] - width
        tables[-1].append(place)
    parts: list[RenderableType] = [Text(section.title, "bold")]
    for places in tables:
        shown = Table(border_style="dim")
        for place in places:
            shown.add_column(section.header[place], justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
        for row in section.rows:
            shown.add_row(*(Text(row[place]) for place in places))
        parts.append(shown)
    console = Console(markup=False, emoji=False)
    with console.capture() as capture:
        for part in (*parts, *(Text(text, "dim") for text in section.texts)):
            console.print(part)
    return capture.get()

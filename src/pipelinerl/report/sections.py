"""Tables and charts of experiments, for the page of a report (`experiments/watch/page.py`) and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from pipelinerl.report import new_table, rendered


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
    columns = [[name, *(row[place] for row in section.rows)] for place, name in enumerate(section.header)]
    widths = [max(len(line) for text in cells for line in text.split("\n")) + 3 for cells in columns]  # with a border
    tables: list[list[int]] = []
    left = 0
    for place in range(1, len(columns)):
        left -= widths[place]
        if left < 0 or not tables:
            tables.append([])
            left = Console().width - 1 - widths[0] - widths[place]
        tables[-1].append(place)
    parts: list[RenderableType] = [Text(section.title, "bold")]
    for places in tables:
        shown = new_table("", show_header=True)
        shown.title = None
        for place in (0, *places):
            shown.add_column(section.header[place], justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
        for row in section.rows:
            shown.add_row(*(Text(row[place]) for place in (0, *places)))
        parts.append(shown)
    return rendered(*parts, *(Text(text, "dim") for text in section.texts))

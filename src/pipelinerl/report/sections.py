"""Tables and charts of experiments, for the page of a report (`experiments/watch/page.py`) and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
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
    """Its table, with the texts below: the first column to the left, all others to the right."""
    shown = new_table(section.title, caption="\n".join(section.texts), show_header=True)
    for number, name in enumerate(section.header):
        shown.add_column(name, justify="right" if number else "left")
    for row in section.rows:
        shown.add_row(*map(Text, row))
    return rendered(shown)

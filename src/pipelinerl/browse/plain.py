"""The groups of a run as lines of text, where there is no terminal to browse in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pipelinerl.browse.draw import HEADINGS, MAX_BARS, REPLACED, group_cells
from pipelinerl.browse.query import Query
from pipelinerl.browse.records import Browsed, Damaged, reasons_text
from pipelinerl.browse.tokens import one_line

_WIDTHS = (7, MAX_BARS, 7, 7, 11, 7, 7)


def plain_table(run: Browsed, query: Query | None, warn: Callable[[str], None]) -> Iterator[str]:
    """A heading, then a line for each group with a rollout that `query` describes; those rollouts' ids follow the problem.

    Damaged lines are named to `warn`.
    """
    while run.look():
        pass
    for damaged in run.damage:
        warn(damaged)
    yield _line(HEADINGS, "problem")
    for place in range(len(run)):
        group = run.summary(place)
        if isinstance(group, Damaged):
            warn(f"{run.path}, {group}")
            continue
        trained = partial(run.trained, place)
        hits = [] if query is None else query.matches(group, trained)
        if hits is not None:
            dropped = f"dropped: {reasons_text(group.dropped)}" if group.dropped else ""
            replaced = REPLACED if run.is_replaced(place) else ""
            ids = " ".join(one_line(group.rollouts[i].id) for i in hits)
            yield _line(group_cells(group, trained), one_line(group.title), dropped, replaced, ids)


def _line(cells: Sequence[str], *notes: str) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return "  ".join([*columns, *(note for note in notes if note)]) + "\n"

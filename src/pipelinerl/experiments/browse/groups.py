"""Searches and lists groups: queries, rich tables of groups and of one group's attempts, and the plain table."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.table import Table
from rich.text import Text

from pipelinerl.errors import UserError
from pipelinerl.experiments.browse.records import Attempt, Attempts, Browsed, Damaged, Trained, one_line
from pipelinerl.status.screen import printable

# ---- queries like `reward>0.5 version=12 "some text"`

HELP = (
    'words or "some text", reward>0.5, version=12, lag>=3, length<20, trained, untrained, skipped, dropped, dropped=REASON'
)
TrainedBy = Callable[[str], Trained | None]
_PART = re.compile(r'"([^"]*)"?|(\S+)')
_COMPARISON = re.compile(r"([^\W\d]\w*)(<=|>=|<|>|=)(.*)", re.DOTALL)
_COLUMNS = ("reward", "version", "lag", "length")
_HOLDS: dict[str, Callable[[float, float, float], bool]] = {
    "<": lambda low, _high, value: low < value,
    "<=": lambda low, _high, value: low <= value,
    ">": lambda _low, high, value: high > value,
    ">=": lambda _low, high, value: high >= value,
    "=": lambda low, high, value: low <= value <= high,
}
"""Operator -> whether any number from `low` to `high` satisfies the comparison with `value`."""

_Term = Callable[[Attempts, Attempt | None, TrainedBy], bool]


@dataclass(frozen=True)
class Query:
    """A parsed query, made by `parse`."""

    text: str
    terms: tuple[_Term, ...]

    def matches(self, group: Attempts, trained: TrainedBy) -> list[int] | None:
        """The positions of the group's rollouts for which all terms hold; None if the group does not match.

        A group without rollouts (all attempts failed) can match as a whole: the list is then empty.
        """
        if not group.rollouts:
            return [] if all(term(group, None, trained) for term in self.terms) else None
        found = [i for i, rollout in enumerate(group.rollouts) if all(term(group, rollout, trained) for term in self.terms)]
        return found or None


def parse(text: str) -> Query:
    """Parse a query. Raises UserError for a comparison of something else, or with something that is not a number."""
    parts = [(match[1], match[2]) for match in _PART.finditer(text)]
    return Query(text, tuple(_words(quoted) if bare is None else _term(bare) for quoted, bare in parts))


def _term(part: str) -> _Term:
    name, equals, reason = part.partition("=")
    if name == "dropped":
        return lambda group, _attempt, _trained: bool(group.dropped.get(reason) if equals else group.dropped)
    if part in ("trained", "untrained"):
        return lambda _group, rollout, trained: (
            rollout is not None and (trained(rollout.id) is not None) == (part == "trained")
        )
    if part == "skipped":
        return lambda group, _attempt, _trained: group.skipped is not None
    comparison = _COMPARISON.fullmatch(part)
    if comparison is None:
        return _words(part)
    if comparison[1] not in _COLUMNS:
        near = difflib.get_close_matches(comparison[1], _COLUMNS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"{part!r}: {hint}{', '.join(_COLUMNS)} can be compared, and dropped=REASON; to search for this text, put it in "
            "double quotes"
        )
    try:
        value = float(comparison[3])
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"{part!r} does not compare with a number; search for: {HELP}")
    return _comparison(comparison[1], _HOLDS[comparison[2]], value)


def _comparison(field: str, holds: Callable[[float, float, float], bool], value: float) -> _Term:
    def term(_group: Attempts, rollout: Attempt | None, trained: TrainedBy) -> bool:
        return rollout is not None and any(holds(low, high, value) for low, high in _ranges(field, rollout, trained))

    return term


def _ranges(field: str, rollout: Attempt, trained: TrainedBy) -> list[tuple[float, float]]:
    if field == "reward":
        return [(rollout.reward, rollout.reward)]
    if field == "length":
        return [(rollout.tokens, rollout.tokens)]
    if field == "version":
        return [(version, version) for version in rollout.versions]
    record = trained(rollout.id)
    return [] if record is None else [(record.lag_min, record.lag_max)]


def _words(words: str) -> _Term:
    """Matches text in the problem or in the model's output, ignoring case."""
    wanted = words.casefold()

    def term(group: Attempts, rollout: Attempt | None, _trained: TrainedBy) -> bool:
        return wanted in group.title.casefold() or (rollout is not None and wanted in rollout.text.casefold())

    return term


# ---- groups as tables


HEADINGS = ("group", "rewards", "mean", "tokens", "versions", "lag", "trained")
COLUMN_WIDTH = 30
_MAX_BARS = 16
_PLAIN_WIDTHS = (7, _MAX_BARS, 7, 7, 11, 7, 7)
_BARS = "·▁▂▃▄▅▆▇█"
_SELECTED = "reverse"
_REPLACED = "replaced after a resume"


def groups_table(run: Browsed, places: Iterable[int], selected: int) -> Table:
    """One row per group."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    for name in HEADINGS:
        table.add_column(name, justify="left" if name == "rewards" else "right", no_wrap=True)
    table.add_column("problem", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("notes", no_wrap=True)
    for place in places:
        group, replaced = run.summary(place), run.is_replaced(place)
        style = _SELECTED if place == selected else "dim" if replaced else ""
        if isinstance(group, Damaged):
            table.add_row("?", *[""] * (len(HEADINGS) - 1), Text(str(group), "red"), "", style=style)
            continue
        note = _REPLACED if replaced else group.note
        cells = _cells(group, partial(run.trained, place))
        table.add_row(*cells, Text(one_line(group.title)), Text(note), style=style)
    return table


def plain_table(run: Browsed, query: Query | None, warn: Callable[[str], None]) -> Iterator[str]:
    """A heading, then one line per group that matches `query`; it ends with the ids of the matching rollouts.

    For output that is not a terminal. Damaged lines are reported with `warn`.
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
            replaced = _REPLACED if run.is_replaced(place) else ""
            ids = " ".join(one_line(group.rollouts[i].id) for i in hits)
            yield _line(_cells(group, trained), one_line(group.title), group.note, replaced, ids)


def attempts_table(group: Attempts, trained: TrainedBy, selected: int, width: int) -> Table:
    """As many attempts side by side as fit into the width, including the selected one."""
    count = min(len(group.rollouts), max(1, width // COLUMN_WIDTH))
    first = max(0, min(selected - count // 2, len(group.rollouts) - count))
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    shown = group.rollouts[first : first + count]
    for i, rollout in enumerate(shown, first):
        heading = _heading(rollout, trained(rollout.id))
        table.add_column(Text(heading, _SELECTED if i == selected else "dim"), ratio=1, overflow="fold")
    table.add_row(*(Text(printable(rollout.text)) for rollout in shown))
    return table


def versions_text(versions: Iterable[int]) -> str:
    found = list(versions)
    return "-" if not found else str(found[0]) if min(found) == max(found) else f"{min(found)}-{max(found)}"


def lag_text(trained: Iterable[Trained | None]) -> str:
    return versions_text(lag for record in trained if record is not None for lag in (record.lag_min, record.lag_max))


def _cells(group: Attempts, trained: TrainedBy) -> list[str]:
    """The cells for the columns in HEADINGS."""
    count = len(group.rollouts)
    records = [trained(rollout.id) for rollout in group.rollouts]
    return [
        str(group.index),
        "".join(_bar(rollout.reward) for rollout in group.rollouts[:_MAX_BARS]),
        f"{sum(rollout.reward for rollout in group.rollouts) / count:.3f}" if count else "-",
        f"{sum(rollout.tokens for rollout in group.rollouts) / count:.0f}" if count else "-",
        versions_text(group.versions),
        lag_text(records),
        f"{sum(record is not None for record in records)}/{group.started}",
    ]


def _bar(reward: float) -> str:
    return _BARS[int(max(0.0, min(1.0, reward)) * (len(_BARS) - 1) + 0.5)]


def _line(cells: Sequence[str], *notes: str) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _PLAIN_WIDTHS, strict=True)]
    return "  ".join([*columns, *(note for note in notes if note)]) + "\n"


def _heading(rollout: Attempt, trained: Trained | None) -> str:
    step = "not trained on" if trained is None else f"step {trained.step}, lag {lag_text([trained])}"
    end = rollout.turns[-1].completion.finish_reason if rollout.turns else "-"
    name = rollout.label or f"attempt {rollout.attempt}"
    versions = f"versions {versions_text(rollout.versions)}"
    return f"{name}  reward {rollout.reward:.4g}\n{rollout.tokens} tokens, {end}\n{versions}\n{step}"

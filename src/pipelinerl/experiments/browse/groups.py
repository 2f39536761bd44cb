"""Searches and lists groups: queries, a table of groups, and the attempts of one group."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments.browse.records import Browsed, Damaged, Fate, Trained, one_line, skip_text
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Rollout

# ---- queries like `reward>0.5 version=12 "some text"`

HELP = (
    'words or "some text", reward>0.5, version=12, lag>=3, length<20, trained, untrained, skipped, dropped, dropped=REASON'
)
FateOf = Callable[[str], Fate]
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

_Term = Callable[[Group, Rollout | None, FateOf], bool]


@dataclass(frozen=True)
class Query:
    """A parsed query, made by `parse`. One without terms matches everything."""

    text: str
    terms: tuple[_Term, ...]

    def matches(self, group: Group, fate: FateOf) -> list[Rollout] | None:
        """The group's rollouts for which all terms hold; None if the group does not match.

        A group without rollouts (all attempts failed) can match as a whole: the list is then empty.
        """
        if not group.rollouts:
            return [] if all(term(group, None, fate) for term in self.terms) else None
        return [rollout for rollout in group.rollouts if all(term(group, rollout, fate) for term in self.terms)] or None


def parse(text: str) -> Query:
    """Parse a query. Raises UserError for a comparison of something else, or with something that is not a number."""
    parts = [(match[1], match[2]) for match in _PART.finditer(text)]
    return Query(text, tuple(_words(quoted) if bare is None else _term(bare) for quoted, bare in parts))


def _term(part: str) -> _Term:
    name, equals, reason = part.partition("=")
    if name == "dropped":
        return lambda group, _attempt, _fate: bool(group.dropped.get(reason) if equals else group.dropped)
    if part in ("trained", "untrained"):
        return lambda _group, rollout, fate: (
            rollout is not None and isinstance(fate(rollout.id), Trained) == (part == "trained")
        )
    if part == "skipped":
        return lambda group, _attempt, _fate: group.skipped is not None
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
    def term(_group: Group, rollout: Rollout | None, fate: FateOf) -> bool:
        return rollout is not None and any(holds(low, high, value) for low, high in _ranges(field, rollout, fate))

    return term


def _ranges(field: str, rollout: Rollout, fate: FateOf) -> list[tuple[float, float]]:
    if field == "reward":
        return [(rollout.reward, rollout.reward)]
    if field == "length":
        return [(tokens_of(rollout), tokens_of(rollout))]
    if field == "version":
        return [(version, version) for version in versions_of(rollout)]
    record = fate(rollout.id)
    return [(record.lag_min, record.lag_max)] if isinstance(record, Trained) else []


def _words(words: str) -> _Term:
    """Matches text in the problem or in the model's output, ignoring case."""
    wanted = words.casefold()

    def term(group: Group, rollout: Rollout | None, _fate: FateOf) -> bool:
        return wanted in _title(group).casefold() or (rollout is not None and wanted in _text(rollout).casefold())

    return term


# ---- groups as text

_HEADINGS = ("group", "rewards", "mean", "tokens", "versions", "lag", "trained")
_MAX_BARS = 16
_WIDTHS = (7, _MAX_BARS, 7, 7, 11, 7, 7)
_BARS = "·▁▂▃▄▅▆▇█"


def table_of_groups(run: Browsed, query: Query, warn: Callable[[str], None]) -> Iterator[str]:
    """A heading, then one line per group that matches `query`; it ends with the ids of the matching rollouts.

    Damaged lines are reported with `warn`.
    """
    for damaged in run.damage:
        warn(damaged)
    yield _line(_HEADINGS, "problem")
    for place in range(len(run)):
        group = run.group(place)
        if isinstance(group, Damaged):
            warn(f"{run.path}, {group}")
            continue
        fate = partial(run.fate, place)
        hits = query.matches(group, fate)
        if hits is not None:
            ids = " ".join(one_line(rollout.id) for rollout in hits) if query.terms else ""
            yield _line(_cells(group, fate), one_line(_title(group)), *_notes(run, place, group), ids)


def named(run: Browsed, name: str) -> tuple[int, Group]:
    """The place and the group of a group's number or a rollout's id. Raises UserError, and RunDirectoryError for damage."""
    place = run.find(name)
    if place is None:
        raise UserError(f"{name!r} is not among the {len(run)} groups of {run.path}; `pipelinerl browse` lists them")
    group = run.group(place)
    if isinstance(group, Damaged):
        raise RunDirectoryError(f"{run.path}, {group}")
    return place, group


def attempts_of_group(run: Browsed, name: str, query: Query) -> Iterator[str]:
    """The problem, then the facts and the text of each attempt that matches. Raises as `named`."""
    place, group = named(run, name)
    fate = partial(run.fate, place)
    yield "  ".join([f"group {group.index}", one_line(_title(group)), *_notes(run, place, group)]) + "\n"
    for rollout in query.matches(group, fate) or ():
        end = rollout.turns[-1].completion.finish_reason if rollout.turns else "-"
        facts = f"{tokens_of(rollout)} tokens, {end}, versions {versions_text(versions_of(rollout))}"
        yield f"\n── {rollout_facts(rollout, fate(rollout.id))}, {facts}\n{printable(_text(rollout))}\n"


def rollout_facts(rollout: Rollout, fate: Fate) -> str:
    trained = "not trained on"
    if isinstance(fate, Trained):
        trained = f"trained on in step {fate.step}, lag {lag_text([fate])}, advantage {fate.advantage:.4g}"
    elif fate:
        trained = f"left out by the trainer: {one_line(fate)}"
    return f"{one_line(rollout.id)}  reward {rollout.reward:.4g}, {trained}"


def versions_of(rollout: Rollout) -> list[int]:
    """The versions of its spans, in order."""
    return [span.version for turn in rollout.turns for span in turn.completion.weight_versions]


def tokens_of(rollout: Rollout) -> int:
    """The number of sampled tokens of all turns."""
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def versions_text(versions: Iterable[int]) -> str:
    found = list(versions)
    return "-" if not found else str(found[0]) if min(found) == max(found) else f"{min(found)}-{max(found)}"


def lag_text(fates: Iterable[Fate]) -> str:
    return versions_text(lag for fate in fates if isinstance(fate, Trained) for lag in (fate.lag_min, fate.lag_max))


def _text(rollout: Rollout) -> str:
    """The model's text, one turn after another."""
    return "\n".join(turn.text for turn in rollout.turns)


def _title(group: Group) -> str:
    """The problem: id and payload."""
    return f"{group.problem.id} {msgspec.json.encode(group.problem.payload).decode()}"


def _notes(run: Browsed, place: int, group: Group) -> Iterator[str]:
    if group.skipped is not None:
        yield skip_text(group.skipped)
    elif group.dropped:
        yield "dropped: " + ", ".join(f"{one_line(why)} {count}" for why, count in sorted(group.dropped.items()))
    if run.is_replaced(place):
        yield "replaced after a resume"


def _cells(group: Group, fate: FateOf) -> list[str]:
    """The cells for the columns in _HEADINGS."""
    count = len(group.rollouts)
    fates = [fate(rollout.id) for rollout in group.rollouts]
    return [
        str(group.index),
        "".join(_bar(rollout.reward) for rollout in group.rollouts[:_MAX_BARS]),
        f"{sum(rollout.reward for rollout in group.rollouts) / count:.3f}" if count else "-",
        f"{sum(tokens_of(rollout) for rollout in group.rollouts) / count:.0f}" if count else "-",
        versions_text(version for rollout in group.rollouts for version in versions_of(rollout)),
        lag_text(fates),
        f"{sum(isinstance(one, Trained) for one in fates)}/{group.started}",
    ]


def _bar(reward: float) -> str:
    return _BARS[int(max(0.0, min(1.0, reward)) * (len(_BARS) - 1) + 0.5)]


def _line(cells: Sequence[str], *notes: str) -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return "  ".join([*columns, *(note for note in notes if note)]) + "\n"

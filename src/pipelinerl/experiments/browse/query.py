"""What is searched for: `reward>0.5 version=12 "some text"`. Every term must hold for one and the same rollout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.errors import UserError
from pipelinerl.experiments.browse.records import Attempt, Attempts, Trained

HELP = 'words or "some text", reward>0.5, version=12, lag>=3, length<20, trained, untrained, dropped, dropped=REASON'
TrainedBy = Callable[[str], Trained | None]
_PART = re.compile(r'"([^"]*)"?|(\S+)')
_COMPARISON = re.compile(r"(reward|version|lag|length)(<=|>=|<|>|=)(.*)", re.DOTALL)
_HOLDS: dict[str, Callable[[float, float, float], bool]] = {
    "<": lambda low, _high, value: low < value,
    "<=": lambda low, _high, value: low <= value,
    ">": lambda _low, high, value: high > value,
    ">=": lambda _low, high, value: high >= value,
    "=": lambda low, high, value: low <= value <= high,
}
"""Whether some number from `low` to `high` compares so with `value`."""

_Term = Callable[[Attempts, Attempt | None, TrainedBy], bool]


@dataclass(frozen=True)
class Query:
    """Made by `parse`."""

    text: str
    terms: tuple[_Term, ...]

    def matches(self, group: Attempts, trained: TrainedBy) -> list[int] | None:
        """The rollouts of the group for which all terms hold, by position; None if the group has nothing to show.

        A group that lost all of its attempts matches as a whole, with an empty list.
        """
        if not group.rollouts:
            return [] if all(term(group, None, trained) for term in self.terms) else None
        found = [i for i, one in enumerate(group.rollouts) if all(term(group, one, trained) for term in self.terms)]
        return found or None


def parse(text: str) -> Query:
    """Raises UserError for a comparison with something that is not a number."""
    parts = [(match[1], match[2]) for match in _PART.finditer(text)]
    return Query(text, tuple(_words(quoted) if bare is None else _term(bare) for quoted, bare in parts))


def _term(part: str) -> _Term:
    name, equals, reason = part.partition("=")
    if name == "dropped":
        return lambda group, _attempt, _trained: bool(group.dropped.get(reason) if equals else group.dropped)
    if part in ("trained", "untrained"):
        return lambda _group, one, trained: one is not None and (trained(one.id) is not None) == (part == "trained")
    comparison = _COMPARISON.fullmatch(part)
    if comparison is None:
        return _words(part)
    try:
        value = float(comparison[3])
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"{part!r} compares with no number; search for: {HELP}")
    return _comparison(comparison[1], _HOLDS[comparison[2]], value)


def _comparison(field: str, holds: Callable[[float, float, float], bool], value: float) -> _Term:
    def term(_group: Attempts, one: Attempt | None, trained: TrainedBy) -> bool:
        return one is not None and any(holds(low, high, value) for low, high in _ranges(field, one, trained))

    return term


def _ranges(field: str, one: Attempt, trained: TrainedBy) -> list[tuple[float, float]]:
    if field == "reward":
        return [(one.reward, one.reward)]
    if field == "length":
        return [(one.tokens, one.tokens)]
    if field == "version":
        return [(version, version) for version in one.versions]
    was = trained(one.id)
    return [] if was is None else [(was.lag_min, was.lag_max)]


def _words(words: str) -> _Term:
    """In the problem or in what the model wrote; upper and lower case are the same."""
    wanted = words.casefold()

    def term(group: Attempts, one: Attempt | None, _trained: TrainedBy) -> bool:
        return wanted in group.title.casefold() or (one is not None and wanted in one.text.casefold())

    return term

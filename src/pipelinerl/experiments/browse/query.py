"""Search queries like `reward>0.5 version=12 "some text"`. All terms must hold for the same rollout."""

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
    """Parse a query. Raises UserError for a comparison with something that is not a number."""
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
    comparison = _COMPARISON.fullmatch(part)
    if comparison is None:
        return _words(part)
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

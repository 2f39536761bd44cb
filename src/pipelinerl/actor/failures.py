"""Counts failed attempts, shows the first few, and ends the run when too many fail."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque

from pipelinerl.actor.rollouts import Failure
from pipelinerl.errors import TooManyFailuresError

logger = logging.getLogger(__name__)

SHOWN_PER_REASON = 3
FIRST_ATTEMPTS = 16
"""When every one of the first attempts failed, the run ends before a whole window is wasted."""
TRACEBACK_LINES = 6
REMEMBERED = 4096
"""Failed attempts of which a completion may still be in the engine, which ends it at its next step."""


class FailureLog:
    """`max_fraction` is the largest share of the last `window` attempts that may fail; 1 lets everything fail."""

    def __init__(self, max_fraction: float, window: int) -> None:
        self._max_fraction = max_fraction
        self._recent: deque[Failure | None] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._unfinished: OrderedDict[str, str] = OrderedDict()
        self._successes = 0

    @property
    def counts(self) -> dict[str, int]:
        """Failed attempts so far, by reason."""
        return dict(self._counts)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens sampled for failed attempts so far, by reason."""
        return dict(self._tokens)

    def success(self) -> None:
        self._successes += 1
        self._recent.append(None)

    def failure(self, failure: Failure, rollout: str, tokens: int = 0) -> None:
        """Count one failure of the attempt called `rollout`, which had sampled `tokens`; the first few of each reason are
        logged in full."""
        self._tokens[failure.reason] += tokens
        self._unfinished[rollout] = failure.reason
        if len(self._unfinished) > REMEMBERED:
            self._unfinished.popitem(last=False)
        self._recent.append(failure)
        self._counts[failure.reason] += 1
        nth = self._counts[failure.reason]
        if nth <= SHOWN_PER_REASON:
            last = " (more of this kind are counted, not shown)" if nth == SHOWN_PER_REASON else ""
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            logger.warning("rollout %s is dropped, %s: %s%s%s", rollout, failure.reason, failure.message, last, trace)

    def cancelled(self, rollout: str, tokens: int) -> None:
        """The engine ended a completion of `rollout`; if that attempt has failed, its tokens count with it."""
        if reason := self._unfinished.pop(rollout, None):
            self._tokens[reason] += tokens

    def check(self) -> None:
        """Raises TooManyFailuresError when more than the allowed share of recent attempts failed."""
        if not self._counts:
            return
        failed = [failure for failure in self._recent if failure is not None]
        window_full = len(self._recent) == self._recent.maxlen
        none_worked = self._successes == 0 and self._counts.total() >= FIRST_ATTEMPTS and self._max_fraction < 1
        if not none_worked and not (window_full and len(failed) > self._max_fraction * len(self._recent)):
            return
        reason, count = Counter(failure.reason for failure in failed).most_common(1)[0]
        latest = next(failure for failure in reversed(failed) if failure.reason == reason)
        trace = "".join(f"\n    {line}" for line in latest.traceback.splitlines()[-TRACEBACK_LINES:])
        raise TooManyFailuresError(
            f"{len(failed)} of the last {len(self._recent)} rollouts failed (actor.max_failure_fraction allows "
            f"{self._max_fraction:g}), {count} of them by `{reason}`: {latest.message}{trace}"
        )

"""Failed attempts: what an error means for the attempt that raised it, how many there were, and how many there may be."""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Literal, NamedTuple

from pipelinerl.errors import PromptTooLongError, RolloutError, TooManyFailuresError
from pipelinerl.types import Turn

logger = logging.getLogger(__name__)

FailureReason = Literal["timeout", "raised", "bad_rollout", "prompt_too_long"]

NOT_USER_CODE = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Paths of code that is not the user's: this package, the standard library, installed packages."""
FRAME = re.compile(r'^  File "(.+)", line .*(?:\n    .*)*', re.MULTILINE)

SHOWN_PER_REASON = 3
FIRST_ATTEMPTS = 16
"""If all of the first attempts fail, the run ends without waiting for a full window."""
SHOWN_FRAMES = 2
"""Frames of the user's files that an error shows. The log has whole tracebacks."""
REMEMBERED = 4096
"""Limit on remembered failed attempts. The engine may still hold a completion of theirs until its next step."""


class Failure(NamedTuple):
    """Why an attempt gave no rollout. `message` is one line, `traceback` the whole one, `turns` what a group has of it."""

    reason: FailureReason
    message: str
    traceback: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def line(self) -> str:
        """The reason, the message, and where the user's code was, in one line."""
        frames = user_frames(self.traceback)
        return f"{self.reason}: {self.message}" + (f" ({frames[-1].splitlines()[0].strip()})" if frames else "")


def failure_of(error: BaseException) -> Failure:
    """What an error of the environment means. A too long prompt takes precedence in an exception group."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    parts = [error]
    for part in parts:
        if isinstance(part, BaseExceptionGroup):
            parts += part.exceptions
        if isinstance(part, PromptTooLongError):
            return Failure("prompt_too_long", str(part))
    if isinstance(error, RolloutError):
        return Failure("bad_rollout", str(error))
    if isinstance(error, TimeoutError) and str(error):  # a user function that exceeded its time limit
        return Failure("timeout", str(error), trace)
    return Failure("raised", traceback.format_exception_only(error)[-1].strip(), trace)


def user_frames(trace: str) -> list[str]:
    """The frames of the user's files in a traceback, outermost first."""
    return [frame[0] for frame in FRAME.finditer(trace) if not frame[1].startswith(NOT_USER_CODE)]


class FailureLog:
    """Counts failed attempts, logs the first few, and raises when too many fail.

    `max_fraction` is the largest share of the last `window` attempts that may fail; 1 disables the limit. `shown` failures
    of each reason are logged. `counts` and `tokens` have the failed attempts and their sampled tokens so far, by reason.
    """

    def __init__(self, max_fraction: float, window: int, shown: int = SHOWN_PER_REASON) -> None:
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._max_fraction = max_fraction
        self._shown = shown
        self._recent: deque[Failure | None] = deque(maxlen=window)
        self._unfinished: OrderedDict[str, str] = OrderedDict()
        self._successes = 0

    def success(self) -> None:
        self._successes += 1
        self._recent.append(None)

    def failure(self, failure: Failure, rollout: str, tokens: int = 0) -> None:
        """Count a failure of the attempt named `rollout`, which sampled `tokens` tokens. Log the first few per reason."""
        self.tokens[failure.reason] += tokens
        self._unfinished[rollout] = failure.reason
        if len(self._unfinished) > REMEMBERED:
            self._unfinished.popitem(last=False)
        self._recent.append(failure)
        self.counts[failure.reason] += 1
        nth = self.counts[failure.reason]
        if nth <= self._shown:
            last = " (further ones are counted, not shown)" if nth == self._shown else ""
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            logger.warning("rollout %s is dropped, %s: %s%s%s", rollout, failure.reason, failure.message, last, trace)

    def cancelled(self, rollout: str, tokens: int) -> None:
        """Count the tokens of a cancelled completion of `rollout`, if that attempt failed."""
        if reason := self._unfinished.pop(rollout, None):
            self.tokens[reason] += tokens

    def check(self) -> None:
        """Raises TooManyFailuresError if more than the allowed share of recent attempts failed."""
        if not self.counts:
            return
        failed = [failure for failure in self._recent if failure is not None]
        window_full = len(self._recent) == self._recent.maxlen
        none_worked = self._successes == 0 and self.counts.total() >= FIRST_ATTEMPTS and self._max_fraction < 1
        if not none_worked and not (window_full and len(failed) > self._max_fraction * len(self._recent)):
            return
        reason, count = Counter(failure.reason for failure in failed).most_common(1)[0]
        latest = next(failure for failure in reversed(failed) if failure.reason == reason)
        frames = [f"\n{frame}" for frame in user_frames(latest.traceback)]
        raise TooManyFailuresError(
            f"{len(failed)} of the last {len(self._recent)} rollouts failed (actor.max_failure_fraction allows "
            f"{self._max_fraction:g}), {count} of them by `{reason}`: {latest.message}{''.join(frames[-SHOWN_FRAMES:])}"
        )

"""One attempt at one problem: run the environment's code under deadlines, then believe nothing that it returns.

An attempt ends in a checked `Rollout` or in a `Failure` with one of four reasons. It never raises what the
environment raised: one bad attempt costs that attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import msgspec

from pipelinerl.actor.client import Produced, RolloutClient
from pipelinerl.actor.deadline import CodeAlarm, CodeDeadline, CodeDeadlineError, CodeGivenUpError
from pipelinerl.errors import PromptTooLongError, RolloutError, TooManyFailuresError
from pipelinerl.interfaces import Environment
from pipelinerl.types import Completion, Problem, Rollout, Turn

FailureReason = Literal["timeout", "raised", "bad_rollout", "prompt_too_long"]

_HERE = Path(__file__).parent


class Failure(NamedTuple):
    """Why an attempt gave no rollout. `message` is one line; `traceback` starts at the environment's own code."""

    reason: FailureReason
    message: str
    traceback: str = ""


class TimeLimits(NamedTuple):
    """`rollout_s` bounds a rollout as a whole, `alarm` any stretch of its code that doesn't yield."""

    rollout_s: float
    alarm: CodeAlarm


async def attempt(
    environment: Environment, problem: Problem, client: RolloutClient, limits: TimeLimits
) -> Rollout | Failure:
    """Run one rollout to its end, its failure or its deadline. Cancelling this cancels the rollout and raises."""
    deadline = CodeDeadline(limits.alarm)
    task = asyncio.current_task()
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        deadline.end()

    timer = asyncio.get_running_loop().call_later(limits.rollout_s, expire)
    try:
        outcome = await _play(environment, problem, client, deadline, task)
    except asyncio.CancelledError as error:
        if not expired:
            raise
        outcome = Failure("timeout", "cancelled", _format(error))
    finally:
        timer.cancel()
        client.close()
    while task is not None and task.cancelling():  # by `expire`, or by the environment itself: seen to
        task.uncancel()
    if expired:
        where = outcome.traceback if isinstance(outcome, Failure) else ""
        return Failure("timeout", f"the rollout took longer than {limits.rollout_s:g} s", where)
    limits.alarm.worked |= isinstance(outcome, Rollout)
    return outcome


def problem_for(environment: Environment, index: int, limits: TimeLimits) -> tuple[Problem, Problem] | Failure:
    """The problem number `index`, as the environment made it and as a reader of its JSON will see it."""
    try:
        problem = limits.alarm.call(lambda: environment.problem(index))
        if not isinstance(cast("object", problem), Problem):
            return Failure("raised", f"problem({index}) returned {_kind(problem)}, not a Problem")
        return problem, msgspec.json.decode(msgspec.json.encode(problem), type=Problem)
    except CodeGivenUpError as error:
        return Failure("timeout", str(error))
    except CodeDeadlineError as error:
        return Failure("timeout", f"problem({index}): {error}", _format(error))
    except Exception as error:  # noqa: BLE001 - code that isn't ours: it is reported as this problem's failure
        return Failure("raised", f"problem({index}): {_one_line(error)}", _format(error))


async def _play(
    environment: Environment,
    problem: Problem,
    client: RolloutClient,
    deadline: CodeDeadline,
    task: asyncio.Task[Any] | None,
) -> Rollout | Failure:
    async def play() -> Rollout:  # so that code of a `rollout` that isn't `async def` is under the deadline as well
        return await environment.rollout(problem, client)

    try:
        returned = await deadline.run(play(), task)
        return check_rollout(returned, client.produced())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        return Failure("raised", "the environment awaited something that was cancelled", _format(error))
    except BaseException as error:  # noqa: BLE001 - code that isn't ours: it is reported as this attempt's failure
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    """What went wrong, also if it comes wrapped in a group: the gravest of its parts says what the whole is."""
    parts = list(_leaves(error))
    for part in parts:
        if isinstance(part, CodeDeadlineError):
            return Failure("timeout", str(part), _format(error))
    for part in parts:
        if isinstance(part, PromptTooLongError):
            return Failure("prompt_too_long", str(part))
    if isinstance(error, RolloutError):
        return Failure("bad_rollout", str(error))
    if isinstance(error, TimeoutError) and str(error):  # a call of the user's functions that ran into its limit
        return Failure("timeout", str(error), _format(error))
    return Failure("raised", _one_line(error), _format(error))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def check_rollout(returned: object, produced: Mapping[str, Produced]) -> Rollout:
    """`returned` as a rollout that is safe to record and to train on: exactly what the engine produced, and a finite reward.

    Raises RolloutError, saying what is wrong.
    """
    if not isinstance(returned, Rollout):
        raise RolloutError(f"the environment returned {_kind(returned)}, not a Rollout")
    if not isinstance(returned.turns, (tuple, Sequence)) or not returned.turns:
        raise RolloutError("the rollout has no turns")
    turns: dict[str, Turn] = {}
    for number, turn in enumerate(returned.turns):
        checked = _check_turn(turn, number, produced)
        if checked.completion.request_id in turns:
            raise RolloutError(f"turn {number} repeats request {checked.completion.request_id}")
        turns[checked.completion.request_id] = checked
    if not isinstance(returned.metrics, (dict, Mapping)):
        raise RolloutError(f"metrics are {_kind(returned.metrics)}, not a dict of numbers")
    metrics = {str(name): _finite(value, f"metric {name!r}") for name, value in returned.metrics.items()}
    return Rollout(turns=tuple(turns.values()), reward=_finite(returned.reward, "the reward"), metrics=metrics)


def _check_turn(turn: object, number: int, produced: Mapping[str, Produced]) -> Turn:
    if not isinstance(turn, Turn) or not isinstance(turn.completion, Completion):
        raise RolloutError(f"turn {number} is {_kind(turn)}, not a Turn with a Completion")
    request_id = turn.completion.request_id
    if request_id not in produced:
        raise RolloutError(f"turn {number}: this rollout's client has produced no completion {request_id!r}")
    prompt_ids, completion = produced[request_id]
    fields = () if turn.completion is completion else Completion.__struct_fields__
    for field in fields:
        if getattr(turn.completion, field) != getattr(completion, field):
            raise RolloutError(f"turn {number}: `{field}` of {request_id} is not what the engine produced")
    if tuple(turn.prompt_ids) != prompt_ids:
        raise RolloutError(f"turn {number}: `prompt_ids` are not the ids that {request_id} was generated from")
    if not completion.token_ids:
        raise RolloutError(f"turn {number}: {request_id} has no tokens")
    if not isinstance(turn.text, str):
        raise RolloutError(f"turn {number}: `text` is {_kind(turn.text)}, not a string")
    text = turn.text.encode(errors="replace").decode()  # a lone surrogate can't be written as JSON
    return Turn(prompt_ids=prompt_ids, completion=completion, text=text)


def _finite(value: object, what: str) -> float:
    """Any real number (bool, int, float, NumPy's) as a float."""
    if type(value) is float and math.isfinite(value):  # nearly always; asking for abstract types is slow
        return value
    if not isinstance(value, numbers.Real):
        raise RolloutError(f"{what} is {_kind(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RolloutError(f"{what} is {value}, not a finite number")
    return number


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    return lines[-1].strip()


def _format(error: BaseException) -> str:
    """The traceback from the first line that isn't the actor's own."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


# ------------------------------------------------------------------------------------------------------------------------
# Counts failed attempts, shows the first few, and ends the run when too many fail.


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

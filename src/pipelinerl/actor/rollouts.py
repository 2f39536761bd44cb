"""Runs one attempt at one problem: the environment's code under deadlines, with everything it returns checked.

`RolloutContext` is what all attempts of a generation process share.

An attempt ends in a checked `Rollout` or in a `Failure` with one of four reasons. Errors of the environment are not
propagated, so that a bad attempt costs only itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import numbers
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import msgspec

from pipelinerl.actor.client import Awake, Produced, RolloutClient
from pipelinerl.actor.deadline import CodeAlarm, CodeGivenUpError
from pipelinerl.config.schema import ActorConfig
from pipelinerl.errors import CodeDeadlineError, RolloutError, TooManyFailuresError
from pipelinerl.interfaces import AsyncEngine, Environment, ScoresGroups, Tokenizer
from pipelinerl.types import Completion, Problem, Rollout, SamplingParams, Turn

FailureReason = Literal["timeout", "raised", "bad_rollout", "prompt_too_long"]

T = TypeVar("T")

IDLE_S = 0.002  # a pause after a step of an engine that had nothing to do


class Failure(NamedTuple):
    """Why an attempt gave no rollout. `message` is one line, `traceback` the whole one, `turns` what a group has of it."""

    reason: FailureReason
    message: str
    traceback: str = ""
    turns: tuple[Turn, ...] = ()


class TimeLimits(NamedTuple):
    """`rollout_s` limits the whole rollout, `alarm` the time that its code may run without yielding."""

    rollout_s: float
    alarm: CodeAlarm


async def advance(engine: AsyncEngine, awake: Awake) -> None:
    """Let the running attempts submit their requests, and step the engine; pause if it has nothing to do."""
    await awake.settle()
    if not await engine.advance():
        await asyncio.sleep(IDLE_S)


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """What training rollouts and evaluations of a generation process share. `slots` is the engine's H."""

    environment: Environment
    engine: AsyncEngine
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: TimeLimits
    seed: int
    slots: int
    notes: tuple[str, ...] = ()
    awake: Awake = dataclasses.field(default_factory=Awake)

    @classmethod
    def of(
        cls,
        config: ActorConfig,
        environment: Environment,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        seed: int,
        slots: int,
        stop_token_ids: Sequence[int],
        notes: tuple[str, ...] = (),
    ) -> Self:
        """The context of a run: sampling parameters and limits of `config`."""
        return cls(
            environment=environment,
            engine=engine,
            tokenizer=tokenizer,
            sampling=SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                stop_token_ids=tuple(stop_token_ids),
            ),
            limits=TimeLimits(
                config.rollout_timeout_s, CodeAlarm(config.code_timeout_s, gives_up=config.max_failure_fraction < 1)
            ),
            seed=seed,
            slots=slots,
            notes=notes,
        )

    def rollout_client(self, name: str, seed: int) -> RolloutClient:
        """The client of a rollout that is about to start."""
        return RolloutClient(self.engine, self.tokenizer, self.sampling, name=name, seed=seed, awake=self.awake)


async def attempt(
    environment: Environment, problem: Problem, client: RolloutClient, limits: TimeLimits
) -> Rollout | Failure:
    """Run one rollout until it ends, fails or times out. Cancelling this cancels the rollout and raises CancelledError."""

    async def play() -> Rollout:
        return check_rollout(await environment.rollout(problem, client), client.produced())

    try:
        return await guarded(play, limits, "the rollout")
    finally:
        client.close()


async def guarded(code: Callable[[], Coroutine[Any, Any, T]], limits: TimeLimits, what: str) -> T | Failure:
    """The result of user code, which is stopped at its time limits. Cancelling this raises CancelledError."""
    task: Any = asyncio.current_task()
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    async def run() -> T:  # also interrupts user code that is not `async def`
        return await code()

    timer = asyncio.get_running_loop().call_later(limits.rollout_s, expire)
    outcome: T | Failure
    try:
        outcome = await limits.alarm.run(run())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        if task.cancelling() and not expired:
            raise
        outcome = _failure(error, "raised", "the environment awaited something that was cancelled")
    except BaseException as error:  # noqa: BLE001 - user code may raise anything: it is a failure of this attempt
        outcome = _failure(error)
    finally:
        timer.cancel()
    while task.cancelling():  # cancelled by `expire` or by the environment: handled
        task.uncancel()
    if expired:
        where = outcome.traceback if isinstance(outcome, Failure) else ""
        return Failure("timeout", f"{what} took longer than {limits.rollout_s:g} s", where)
    limits.alarm.worked |= not isinstance(outcome, Failure)
    return outcome


def problem_for(environment: Environment, index: int, limits: TimeLimits) -> tuple[Problem, Problem] | Failure:
    """Problem number `index`: the environment's object, and a copy that went through JSON, as it is recorded."""
    try:
        problem = limits.alarm.call(lambda: environment.problem(index))
        if not isinstance(cast("object", problem), Problem):
            return Failure("raised", f"problem({index}) returned {type_name(problem)}, not a Problem")
        return problem, msgspec.json.decode(msgspec.json.encode(problem), type=Problem)
    except CodeGivenUpError as error:
        return Failure("timeout", str(error))
    except CodeDeadlineError as error:
        return _failure(error, "timeout", f"problem({index}): {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything: it is a failure of this problem
        failure = _failure(error)
        return failure._replace(message=f"problem({index}): {failure.message}")


def _failure(error: BaseException, *known: Any) -> Failure:
    from pipelinerl.actor.failures import explain  # noqa: PLC0415 - only for an error

    return Failure(*explain(error, *known))


def check_rollout(returned: object, produced: Mapping[str, Produced]) -> Rollout:
    """Check and normalise `returned`: turns must be exactly what the engine produced; reward and metrics must be finite.

    Raises RolloutError, saying what is wrong.
    """
    if not isinstance(returned, Rollout):
        raise RolloutError(f"the environment returned {type_name(returned)}, not a Rollout")
    if not isinstance(returned.turns, (tuple, Sequence)) or not returned.turns:
        raise RolloutError("the rollout has no turns")
    turns: dict[str, Turn] = {}
    for number, turn in enumerate(returned.turns):
        checked = _check_turn(turn, number, produced)
        if checked.completion.request_id in turns:
            raise RolloutError(f"turn {number} repeats request {checked.completion.request_id}")
        turns[checked.completion.request_id] = checked
    reward, metrics = finite(returned.reward, "the reward"), metrics_of(returned.metrics)
    return Rollout(turns=tuple(turns.values()), reward=reward, metrics=metrics)


def metrics_of(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, (dict, Mapping)):
        raise RolloutError(f"metrics are {type_name(metrics)}, not a dict of numbers")
    return {str(name): finite(value, f"metric {name!r}") for name, value in metrics.items()}


def _check_turn(turn: object, number: int, produced: Mapping[str, Produced]) -> Turn:
    if not isinstance(turn, Turn) or not isinstance(turn.completion, Completion):
        raise RolloutError(f"turn {number} is {type_name(turn)}, not a Turn with a Completion")
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
        raise RolloutError(f"turn {number}: `text` is {type_name(turn.text)}, not a string")
    text = turn.text.encode(errors="replace").decode()  # a lone surrogate can't be written as JSON
    return Turn(prompt_ids=prompt_ids, completion=completion, text=text)


def finite(value: object, what: str) -> float:
    """Convert a finite real number (bool, int, float, NumPy scalar) to float. Raises RolloutError for anything else."""
    if type(value) is float and math.isfinite(value):  # fast path for the common case: checks of abstract types are slow
        return value
    if not isinstance(value, numbers.Real):
        raise RolloutError(f"{what} is {type_name(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RolloutError(f"{what} is {value}, not a finite number")
    return number


def type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


async def score(
    environment: ScoresGroups, problem: Problem, rollouts: Sequence[Rollout], limits: TimeLimits
) -> list[Rollout] | Failure:
    """The rollouts of a group with the rewards and metrics that the environment gives them when all have ended."""

    async def compare() -> list[Rollout]:
        scored = await environment.score_group(problem, rollouts)
        if not isinstance(scored, Sequence) or len(scored) != len(rollouts):
            raise RolloutError(f"score_group returned {type_name(scored)}, not a list of {len(rollouts)} rollouts")
        return [_rescored(before, after) for before, after in zip(rollouts, scored, strict=True)]

    return await guarded(compare, limits, "score_group")


def _rescored(before: Rollout, after: object) -> Rollout:
    if not isinstance(after, Rollout) or after.turns != before.turns:
        raise RolloutError("score_group may change only rewards and metrics, and not the order of the rollouts")
    return msgspec.structs.replace(before, reward=finite(after.reward, "the reward"), metrics=metrics_of(after.metrics))


# ---- failed attempts: counted, logged, and limited


logger = logging.getLogger(__name__)

SHOWN_PER_REASON = 3
FIRST_ATTEMPTS = 16
"""If all of the first attempts fail, the run ends without waiting for a full window."""
SHOWN_FRAMES = 2
"""Frames of the user's files that an error shows. The log has whole tracebacks."""
REMEMBERED = 4096
"""Limit on remembered failed attempts. The engine may still hold a completion of theirs until its next step."""


class FailureLog:
    """Counts failed attempts, logs the first few, and raises when too many fail.

    `max_fraction` is the largest share of the last `window` attempts that may fail; 1 disables the limit. `shown` failures
    of each reason are logged.
    """

    def __init__(self, max_fraction: float, window: int, shown: int = SHOWN_PER_REASON) -> None:
        self._max_fraction = max_fraction
        self._shown = shown
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
        """Count a failure of the attempt named `rollout`, which sampled `tokens` tokens. Log the first few per reason."""
        self._tokens[failure.reason] += tokens
        self._unfinished[rollout] = failure.reason
        if len(self._unfinished) > REMEMBERED:
            self._unfinished.popitem(last=False)
        self._recent.append(failure)
        self._counts[failure.reason] += 1
        nth = self._counts[failure.reason]
        if nth <= self._shown:
            last = " (further ones are counted, not shown)" if nth == self._shown else ""
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            logger.warning("rollout %s is dropped, %s: %s%s%s", rollout, failure.reason, failure.message, last, trace)

    def cancelled(self, rollout: str, tokens: int) -> None:
        """Count the tokens of a cancelled completion of `rollout`, if that attempt failed."""
        if reason := self._unfinished.pop(rollout, None):
            self._tokens[reason] += tokens

    def check(self) -> None:
        """Raises TooManyFailuresError if more than the allowed share of recent attempts failed."""
        if not self._counts:
            return
        failed = [failure for failure in self._recent if failure is not None]
        window_full = len(self._recent) == self._recent.maxlen
        none_worked = self._successes == 0 and self._counts.total() >= FIRST_ATTEMPTS and self._max_fraction < 1
        if not none_worked and not (window_full and len(failed) > self._max_fraction * len(self._recent)):
            return
        reason, count = Counter(failure.reason for failure in failed).most_common(1)[0]
        latest = next(failure for failure in reversed(failed) if failure.reason == reason)
        from pipelinerl.actor.failures import user_frames  # noqa: PLC0415 - only for an error

        frames = [f"\n{frame}" for frame in user_frames(latest.traceback)]
        raise TooManyFailuresError(
            f"{len(failed)} of the last {len(self._recent)} rollouts failed (actor.max_failure_fraction allows "
            f"{self._max_fraction:g}), {count} of them by `{reason}`: {latest.message}{''.join(frames[-SHOWN_FRAMES:])}"
        )

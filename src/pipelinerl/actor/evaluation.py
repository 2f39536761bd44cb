"""Evaluation: held-out problems, answered once each by the training run's engine and never trained on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed, let_rollouts_run
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.types import (
    FinishReason,
    Problem,
    Rollout,
    SamplingParams,
    VersionSpan,
    spans_from_versions,
    versions_from_spans,
)

IDLE_S = 0.002


class RecordSink(Protocol):
    """Writes readable records, one per line (`files.JsonLines`)."""

    def write(self, record: Any) -> None: ...


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and its answer.

    With several turns, `prompt` is that of the first turn and `completion` the model's texts in order; `token_ids`,
    `weight_versions` and `length` cover all sampled tokens. A failed attempt has reward 0, and `failure` says why.
    """

    problem_id: str
    reward: float
    prompt: str = ""
    completion: str = ""
    token_ids: tuple[int, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    length: int = 0
    finish_reason: FinishReason | None = None
    failure: str | None = None
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class Evaluation:
    """`reward` is the mean over all problems, failed attempts as 0; None without problems. `failed` counts by reason."""

    problems: tuple[EvaluatedProblem, ...]
    reward: float | None
    failed: dict[str, int]

    @classmethod
    def of(cls, problems: Iterable[EvaluatedProblem]) -> Evaluation:
        answered = tuple(problems)
        reward = sum(record.reward for record in answered) / len(answered) if answered else None
        failed = Counter(record.failure.partition(":")[0] for record in answered if record.failure is not None)
        return cls(answered, reward, dict(failed))

    @property
    def tokens_by_version(self) -> dict[int, int]:
        """Number of sampled tokens by weight version."""
        tokens: Counter[int] = Counter()
        for problem in self.problems:
            for span in problem.weight_versions:
                tokens[span.version] += span.end - span.start
        return dict(sorted(tokens.items()))


class EvaluationPass:
    """EvaluationPass each problem once. The caller steps the engine.

    Seeds depend only on a problem's position in `problems`, so that evaluations of different weights, or in different runs,
    differ only by the weights. `name` is the prefix of the request ids and must be unique in the engine.
    """

    def __init__(
        self,
        environment: Environment,
        problems: Sequence[Problem],
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        limits: TimeLimits,
        name: str,
    ) -> None:
        self._environment = environment
        self._problems = problems
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limits = limits
        self._name = name
        self._waiting = deque(range(len(problems)))
        self._running: dict[asyncio.Task[Rollout | Failure], int] = {}
        self._done: dict[int, EvaluatedProblem] = {}

    @property
    def done(self) -> int:
        """Problems that were answered or failed."""
        return len(self._done)

    @property
    def total(self) -> int:
        return len(self._problems)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, slots: int) -> bool:
        """Start attempts until `slots` are running or none are left. They begin in the next event-loop pass.

        Returns whether any was started.
        """
        before = self.running
        while self._waiting and self.running < slots:
            number = self._waiting.popleft()
            seed = derive_seed("evaluation", number)
            view = RolloutClient(self._client, self._tokenizer, self._sampling, name=f"{self._name}.{number}", seed=seed)
            attempted = attempt(self._environment, self._problems[number], view, self._limits)
            self._running[asyncio.create_task(attempted)] = number
        return self.running > before

    def collect(self) -> None:
        """Record the attempts that have ended. A failed attempt fails one problem only."""
        for task in [task for task in self._running if task.done()]:
            number = self._running.pop(task)
            self._done[number] = evaluated(self._problems[number], task.result(), self._tokenizer)

    def cancel(self) -> None:
        """Cancel running attempts."""
        for task in self._running:
            task.cancel()

    def result(self) -> Evaluation | None:
        """The evaluation, in the order of `problems`, or None while attempts are missing."""
        return Evaluation.of(self._done[number] for number in range(self.total)) if self.done == self.total else None


async def evaluate(
    evaluation_pass: EvaluationPass,
    client: EngineClient,
    *,
    slots: int,
    records: RecordSink,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Run `evaluation_pass` to its end, at most `slots` attempts at a time, stepping the engine of `client`.

    Nothing else may use the engine meanwhile. `on_progress` is called after every engine step with the number of problems
    done. Records are written at the end, in the order of the problems.
    """
    try:
        while (evaluation := evaluation_pass.result()) is None:
            evaluation_pass.start(slots)
            await let_rollouts_run(2)
            if not await client.step():
                await asyncio.sleep(IDLE_S)
            evaluation_pass.collect()
            on_progress(evaluation_pass.done)
    finally:
        evaluation_pass.cancel()
    for record in evaluation.problems:
        write_record(records, record)
    return evaluation


def write_record(records: RecordSink, record: object) -> None:
    """Write one record. Raises RunDirectoryError if that fails (full disk)."""
    try:
        records.write(record)
    except OSError as error:
        raise RunDirectoryError(
            f"can't write a record of a rollout: {error.strerror or error}; make room and resume"
        ) from error


def held_out_problems(environment: Environment, count: int) -> Sequence[Problem]:
    """The environment's first `count` held-out problems. Raises EnvironmentSetupError if it fails to return them."""
    try:
        problems = tuple(environment.held_out(count))
    except Exception as error:
        raise EnvironmentSetupError(
            f"held_out({count}) of the environment raised {type(error).__name__}: {error}"
        ) from error
    wrong = [problem for problem in problems if not isinstance(problem, Problem)]
    if wrong or len(problems) > count:
        what = f"a {type(wrong[0]).__name__} among them" if wrong else f"{len(problems)} of them"
        raise EnvironmentSetupError(f"held_out({count}) of the environment must return at most {count} Problems, not {what}")
    return problems


def evaluated(problem: Problem, outcome: Rollout | Failure, tokenizer: Tokenizer) -> EvaluatedProblem:
    """The record of one problem."""
    if isinstance(outcome, Failure):
        return EvaluatedProblem(problem_id=str(problem.id), reward=0.0, failure=f"{outcome.reason}: {outcome.message}")
    completions = [turn.completion for turn in outcome.turns]
    token_ids = tuple(token_id for completion in completions for token_id in completion.token_ids)
    versions = [
        version
        for completion in completions
        for version in versions_from_spans(completion.weight_versions, len(completion.token_ids))
    ]
    return EvaluatedProblem(
        problem_id=str(problem.id),
        reward=outcome.reward,
        prompt=tokenizer.decode(outcome.turns[0].prompt_ids),
        completion="\n".join(tokenizer.decode(completion.token_ids) for completion in completions),
        token_ids=token_ids,
        weight_versions=spans_from_versions(versions),
        length=len(token_ids),
        finish_reason=completions[-1].finish_reason,
        metrics=outcome.metrics,
    )


# ---- evaluation during training, in the engine that generates rollouts
# Its attempts are not rollouts: admission and the schedule do not count them, and rounds and weight updates do not wait
# for them.


logger = logging.getLogger(__name__)


class OnlineEvaluation:
    """Evaluations one at a time, in a share of the engine's slots.

    One is due when the engine's version reaches or passes a multiple of `every`, before version `until`, which is evaluated
    after training. Weights keep changing while it runs; each token records the version that sampled it. An evaluation that
    is due while another one runs is skipped and counted, as is one that is still running when training ends.
    """

    def __init__(
        self,
        begin: Callable[[int], EvaluationPass],
        *,
        every: int,
        until: int,
        slots: int,
        reached: int,
        on_done: Callable[[int, Evaluation], None],
    ) -> None:
        """`begin(version)` creates the pass of an evaluation; `on_done(version, evaluation)` receives its result.

        Evaluations due up to version `reached` have already taken place.
        """
        self.skipped = 0
        """Evaluations skipped since the last reset. The caller resets it to 0 after recording it."""
        self._begin = begin
        self._every = every
        self._until = until
        self._slots = slots
        self._due = reached // every
        self._on_done = on_done
        self._running: tuple[int, EvaluationPass] | None = None
        self._ended = 0

    @property
    def running(self) -> int:
        """Attempts in progress."""
        return self._running[1].running if self._running else 0

    @property
    def answered(self) -> int:
        """Problems done over all evaluations."""
        return self._ended + (self._running[1].done if self._running else 0)

    @property
    def status(self) -> str:
        """Progress in words; empty when no evaluation is running."""
        if self._running is None:
            return ""
        version, running = self._running
        return f"evaluates since version {version}: {running.done} of {running.total} held-out problems"

    def advance(self, version: int) -> bool:
        """Between two engine steps: record finished attempts, begin an evaluation if one is due, start attempts.

        Returns whether any attempt was started. Raises what `on_done` raises.
        """
        self._collect()
        if version < self._until and version // self._every > self._due:
            self._due = version // self._every
            if self._running is None:
                self._running = (version, self._begin(version))
            else:
                self._skip(f"the evaluation due at version {version} is skipped: {self.status}")
        return self._running is not None and self._running[1].start(self._slots)

    def end(self) -> None:
        """End of training: cancel and skip the running evaluation, unless it has just ended."""
        self._collect()
        if self._running is not None:
            self._skip(f"the evaluation is cancelled because training is over: {self.status}")
            self._running[1].cancel()
            self._running = None

    def _collect(self) -> None:
        if self._running is None:
            return
        version, running = self._running
        running.collect()
        evaluation = running.result()
        if evaluation is not None:
            self._running = None
            self._ended += running.total
            self._on_done(version, evaluation)

    def _skip(self, why: str) -> None:
        self.skipped += 1
        logger.warning("%s", why)

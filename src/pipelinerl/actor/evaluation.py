"""Held-out problems, answered once each through the engine that trains: same code path, none of it trained on."""

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
    """Where readable records go, one a line (`files.JsonLines`)."""

    def write(self, record: Any) -> None: ...


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and its answer.

    Of several turns, `prompt` is the first one's and `completion` all the model's texts in order; `token_ids`,
    `weight_versions` and `length` are over all sampled tokens. An attempt that failed has reward 0 and says why.
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
    """`reward` is the mean over all problems, failed attempts as 0; None without problems. `failed` is by reason."""

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
        """How many of all sampled tokens each version of the weights has sampled."""
        tokens: Counter[int] = Counter()
        for problem in self.problems:
            for span in problem.weight_versions:
                tokens[span.version] += span.end - span.start
        return dict(sorted(tokens.items()))


class Answers:
    """Problems being answered once each by an engine that somebody else steps.

    Seeds depend on a problem's place in `problems` alone, so that evaluations of different weights, and of different runs,
    differ by their weights only. `name` tells the requests from all others in the engine.
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
        """Problems that are answered, or failed."""
        return len(self._done)

    @property
    def total(self) -> int:
        return len(self._problems)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, slots: int) -> bool:
        """Start answers until `slots` are running or none is left. They begin at the next turn. Was any started?"""
        before = self.running
        while self._waiting and self.running < slots:
            number = self._waiting.popleft()
            seed = derive_seed("evaluation", number)
            view = RolloutClient(self._client, self._tokenizer, self._sampling, name=f"{self._name}.{number}", seed=seed)
            answer = attempt(self._environment, self._problems[number], view, self._limits)
            self._running[asyncio.create_task(answer)] = number
        return self.running > before

    def collect(self) -> None:
        """Take in the answers that have ended. An attempt that fails is the record of one problem."""
        for task in [task for task in self._running if task.done()]:
            number = self._running.pop(task)
            self._done[number] = evaluated(self._problems[number], task.result(), self._tokenizer)

    def cancel(self) -> None:
        """Give up what is running."""
        for task in self._running:
            task.cancel()

    def result(self) -> Evaluation | None:
        """Once all problems are dealt with; in the order of `problems`."""
        return Evaluation.of(self._done[number] for number in range(self.total)) if self.done == self.total else None


async def evaluate(
    answers: Answers,
    client: EngineClient,
    *,
    slots: int,
    records: RecordSink,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Step the engine of `client`, at most `slots` answers at a time, until all are there.

    Nothing else may be using the engine. `on_progress` is called after every engine step with the number of problems done.
    Records are written at the end, in the order of the problems.
    """
    try:
        while (evaluation := answers.result()) is None:
            answers.start(slots)
            await let_rollouts_run(2)
            if not await client.step():
                await asyncio.sleep(IDLE_S)
            answers.collect()
            on_progress(answers.done)
    finally:
        answers.cancel()
    for record in evaluation.problems:
        write_record(records, record)
    return evaluation


def write_record(records: RecordSink, record: object) -> None:
    """Raises RunDirectoryError when it can't be written (a full disk)."""
    try:
        records.write(record)
    except OSError as error:
        raise RunDirectoryError(
            f"can't write a record of a rollout: {error.strerror or error}; make room and resume"
        ) from error


def held_out_problems(environment: Environment, count: int) -> Sequence[Problem]:
    """The environment's first `count` held-out problems. Raises EnvironmentSetupError if it can't give them."""
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
    """The record of one answer."""
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


# ------------------------------------------------------------------------------------------------------------------------
# Evaluations while training goes on: held-out problems between rollouts, in the same engine.
#
# They are no rollouts: neither admission nor the schedule knows of them, so that they are in no count, no round waits for
# them and no weights do.


logger = logging.getLogger(__name__)


class OnlineEvaluation:
    """Evaluations one at a time, in a share of the engine's slots.

    One is due when the engine's weights reach or pass a multiple of `every`, before `until`, whose weights are evaluated
    after training. It does not hold on to these weights: they change while it is answered, and each token says which
    sampled it. One that is due while another is running is left out and counted, as is one that training does not wait for.
    """

    def __init__(
        self,
        begin: Callable[[int], Answers],
        *,
        every: int,
        until: int,
        slots: int,
        reached: int,
        on_done: Callable[[int, Evaluation], None],
    ) -> None:
        """`begin` makes the answers of the evaluation that begins at a version; `on_done` gets that version and the result.

        What is due up to the version `reached` has taken place.
        """
        self.skipped = 0
        """Evaluations left out since the last one that ended; to be set to 0 by whoever has written that down."""
        self._begin = begin
        self._every = every
        self._until = until
        self._slots = slots
        self._due = reached // every
        self._on_done = on_done
        self._running: tuple[int, Answers] | None = None
        self._ended = 0

    @property
    def running(self) -> int:
        """Answers that are being given."""
        return self._running[1].running if self._running else 0

    @property
    def answered(self) -> int:
        """Over all evaluations: what grows as long as they go on."""
        return self._ended + (self._running[1].done if self._running else 0)

    @property
    def doing(self) -> str:
        """In words; nothing when no evaluation is running."""
        if self._running is None:
            return ""
        version, answers = self._running
        return f"evaluates since version {version}: {answers.done} of {answers.total} held-out problems"

    def turn(self, version: int) -> bool:
        """Between two engine steps: take in answers, begin what is due with the weights of `version`, start answers.

        Returns whether any was started. Raises what `on_done` raises.
        """
        self._collect()
        if version < self._until and version // self._every > self._due:
            self._due = version // self._every
            if self._running is None:
                self._running = (version, self._begin(version))
            else:
                self._skip(f"the evaluation due at version {version} is left out: {self.doing}")
        return self._running is not None and self._running[1].start(self._slots)

    def end(self) -> None:
        """Training is over: give up what is running, if it has not just ended."""
        self._collect()
        if self._running is not None:
            self._skip(f"the evaluation is given up as training is over: {self.doing}")
            self._running[1].cancel()
            self._running = None

    def _collect(self) -> None:
        if self._running is None:
            return
        version, answers = self._running
        answers.collect()
        evaluation = answers.result()
        if evaluation is not None:
            self._running = None
            self._ended += answers.total
            self._on_done(version, evaluation)

    def _skip(self, why: str) -> None:
        self.skipped += 1
        logger.warning("%s", why)

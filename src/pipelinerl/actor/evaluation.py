"""Evaluation: held-out problems, answered once each by the training run's engine and never trained on.

Attempts of an evaluation are not rollouts: admission and the schedule do not count them, and rounds and weight updates do
not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Literal, NamedTuple

import msgspec

from pipelinerl.actor.client import derive_seed
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import RolloutContext, advance, attempt
from pipelinerl.config.schema import EvaluationConfig
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord, When
from pipelinerl.types import Problem, Rollout, spans_from_versions, versions_from_spans

logger = logging.getLogger(__name__)


class Question(NamedTuple):
    """A held-out problem of `environment`. `of` is the name of the further set that it belongs to, if any."""

    environment: Environment
    problem: Problem
    of: str = ""


class Evaluations:
    """The evaluations of a run, one at a time: before and after training, and `online` between the rollouts in training.

    Before and after training, nothing else uses the engine. During training, an evaluation takes a share of the engine's
    slots. One is due when the engine's version reaches or passes a multiple of `config.every`, before version `until`, which
    is evaluated after training. Weights keep changing while it runs; each token records the version that sampled it. An
    evaluation that is due while another one runs is skipped and counted, as is an evaluation that training's end interrupts.

    Seeds depend only on a problem's position, so that evaluations of different weights, or in different runs, differ only by
    the weights. A failed attempt fails one problem only.

    `rewards` maps the name of each evaluation to its reward; of the online ones, it has only the latest.
    """

    def __init__(
        self,
        context: RolloutContext,
        config: EvaluationConfig,
        *,
        sets: Mapping[str, Environment] | None = None,
        on_done: Callable[[EvaluationRecord, Sequence[EvaluatedProblem]], object] = lambda *_: None,
        elapsed_s: Callable[[], float] = lambda: 0.0,
        until: int = 0,
        reached: int = 0,
    ) -> None:
        """`on_done` records an evaluation that has ended, at the time `elapsed_s`, with the answers in the order of the
        problems; those of further `sets`, whose environments are given by name, come last. Evaluations that are due up to
        version `reached` have already taken place.

        Raises EnvironmentSetupError if an environment fails to return its held-out problems.
        """
        self.rewards: dict[str, float] = {}
        asked = {"": context.environment, **(sets or {})} if config.problems else {}
        self._questions = [
            Question(environment, problem, name)
            for name, environment in asked.items()
            for problem in held_out_problems(environment, config.problems)
        ]
        sampling = msgspec.structs.replace(context.sampling, temperature=config.temperature, top_p=1.0, top_k=0)
        self._context = copy(context)
        self._context.sampling = sampling
        self._config = config
        self._online_slots = max(1, int(context.slots * config.share))
        self._on_done, self._elapsed_s = on_done, elapsed_s
        self._until = until
        self._due = reached // config.every if config.every else 0
        self._current: tuple[When, int] | None = None  # and the version at which it began
        self._waiting: deque[int] = deque()
        self._running: dict[asyncio.Task[Rollout | Failure], int] = {}
        self._answers: dict[int, EvaluatedProblem] = {}
        self._latest_online = ""
        self._ended = 0
        self._skipped = 0

    @property
    def running(self) -> int:
        """Attempts in progress."""
        return len(self._running)

    @property
    def answered(self) -> int:
        """Problems that were answered or failed, in all evaluations."""
        return self._ended + len(self._answers)

    @property
    def status(self) -> str:
        """Progress in words; empty when no evaluation is running."""
        if self._current is None:
            return ""
        when, version = self._current
        which = f" since version {version}" if when == "online" else f", {when} training"
        return f"evaluates{which}: {len(self._answers)} of {len(self._questions)} held-out problems"

    async def run(self, when: Literal["before", "after"], on_step: Callable[[], None]) -> bool:
        """Run an evaluation to its end, stepping the engine; `on_step` is called after each step.

        Returns False if the run has no evaluations.
        """
        if not self._config.problems:
            return False
        context = self._context
        self._current = when, context.engine.version
        self._waiting.extend(range(len(self._questions)))
        try:
            while not self._collect():
                self._start(context.slots)
                await advance(context.engine, context.awake)
                on_step()
        finally:
            self._cancel()
        return True

    def advance(self, version: int) -> bool:
        """Between two engine steps: record finished attempts, begin an evaluation if one is due, start attempts.

        Returns whether any attempt was started. Raises what `on_done` raises.
        """
        if not (self._questions and self._config.every):
            return False
        self._collect()
        if version < self._until and version // self._config.every > self._due:
            self._due = version // self._config.every
            if self._current is None:
                self._current = "online", version
                self._waiting.extend(range(len(self._questions)))
            else:
                self._skipped += 1
                logger.warning("the evaluation due at version %d is skipped: %s", version, self.status)
        return self._start(self._online_slots)

    def end(self) -> None:
        """End of training: cancel and skip the running evaluation, unless it has just ended."""
        if not self._collect():
            self._skipped += 1
            logger.warning("the evaluation is cancelled because training is over: %s", self.status)
            self._cancel()

    def _start(self, slots: int) -> bool:
        """Start attempts until `slots` are running or none are left. They begin in the next event-loop pass.

        Returns whether any was started.
        """
        if self._current is None:
            return False
        when, version = self._current
        name = f"v{version}" if when == "online" else when
        context, before = self._context, self.running
        while self._waiting and self.running < slots:
            number = self._waiting.popleft()
            client = context.rollout_client(f"evaluation-{name}.{number}", derive_seed("evaluation", number))
            question = self._questions[number]
            attempted = attempt(question.environment, question.problem, client, context.rollout_timeout_s)
            self._running[asyncio.create_task(attempted)] = number
        return self.running > before

    def _collect(self) -> bool:
        """Record the attempts that have ended, and the evaluation if that was all of it. Returns whether none is running."""
        for task in [task for task in self._running if task.done()]:
            number = self._running.pop(task)
            question = self._questions[number]
            answer = evaluated(question.problem, task.result(), self._context.tokenizer)
            self._answers[number] = msgspec.structs.replace(answer, evaluation_set=question.of)
        if self._current is None:
            return True
        if len(self._answers) < len(self._questions):
            return False
        when, version = self._current
        answers = [self._answers[number] for number in range(len(self._questions))]
        record = EvaluationRecord.of(answers, when=when, version=version, time_s=self._elapsed_s(), skipped=self._skipped)
        self._current, self._answers = None, {}
        self._skipped = 0
        self._ended += len(answers)
        if when == "online":
            self.rewards.pop(self._latest_online, None)
            self._latest_online = record.name
        if record.reward_mean is not None:
            self.rewards[record.name] = record.reward_mean
        self._on_done(record, answers)
        return True

    def _cancel(self) -> None:
        """Cancel the attempts of an evaluation that has not ended."""
        for task in self._running:
            task.cancel()
        self._current, self._answers = None, {}
        self._running.clear()
        self._waiting.clear()


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
    texts: list[tuple[int, ...]] = []
    begun, before = 0, tuple[int, ...]((-1,))
    for turn in outcome.turns:
        if turn.prompt_ids[: len(before)] == before:  # else another chat begins, or the conversation was rewritten
            texts.pop()
        else:
            begun = len(turn.prompt_ids)
        texts.append((*turn.prompt_ids, *turn.completion.token_ids)[begun:])
        before = (*turn.prompt_ids, *turn.completion.answer_ids)
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
        completion="\n".join(tokenizer.decode(ids) for ids in texts),
        token_ids=token_ids,
        weight_versions=spans_from_versions(versions),
        length=len(token_ids),
        finish_reason=completions[-1].finish_reason,
        metrics=outcome.metrics,
    )

"""An evaluation from beginning to end: each model in turn, the same problems and random numbers for all.

tokenizer ─▶ environment ─▶ problems ─▶ engine ─▶ attempts ─▶ numbers ─▶ next model
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipelinerl.actor.deadline import CodeAlarm
from pipelinerl.actor.evaluation import held_out_problems
from pipelinerl.actor.rollouts import Failure, TimeLimits, problem_for
from pipelinerl.config.schema import EngineConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError, TooManyFailuresError
from pipelinerl.experiments.evaluate.answering import Questions, answer
from pipelinerl.experiments.evaluate.engines import Answering, engine_for
from pipelinerl.experiments.evaluate.folder import EvaluationFolder
from pipelinerl.experiments.evaluate.passes import Floats
from pipelinerl.experiments.evaluate.records import AttemptRecord, EvaluationSettings, EvaluationSummary, ModelResult, Status
from pipelinerl.experiments.evaluate.tally import Tally
from pipelinerl.experiments.evaluate.targets import Target
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.types import Problem, SamplingParams

RESAMPLES = 2000
LEVEL = 0.95
SAY_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What to evaluate, on what, and how."""

    targets: Sequence[Target]
    settings: EvaluationSettings
    engine: EngineConfig
    api_key: str | None
    rollout_timeout_s: float
    code_timeout_s: float
    out: Path
    overwrite: bool


def evaluate(plan: EvaluationPlan, stop: Callable[[], bool], say: Callable[[str], None]) -> EvaluationSummary:
    """Evaluate every model of the plan and write it down. `say` gets lines of text on how far it is.

    When `stop` says so, what was done until then is the result ("interrupted"). Raises EnvironmentSetupError, before any
    model is loaded, if the environment has no such problems; TooManyFailuresError if every attempt at them failed.
    """
    if plan.engine.threads is not None:
        torch.set_num_threads(plan.engine.threads)
    alarm = CodeAlarm(plan.code_timeout_s, stays=True)
    try:
        return _Evaluation(plan, TimeLimits(plan.rollout_timeout_s, alarm), stop, say).run()
    finally:
        alarm.release()


class _Evaluation:
    def __init__(
        self, plan: EvaluationPlan, limits: TimeLimits, stop: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._limits = limits
        self._stop = stop
        self._say = say
        self._problems: list[Problem] = []
        self._first: Mapping[int, Floats] | None = None
        self._results: list[ModelResult] = []

    def run(self) -> EvaluationSummary:
        asked = self._ask(self._plan.targets[0])
        folder = EvaluationFolder(self._plan.out, overwrite=self._plan.overwrite)
        folder.write_summary(self._summary("unfinished"))
        done = True
        for number, target in enumerate(self._plan.targets):
            done = not self._stop() and self._one(target, *(self._ask(target) if number else asked), folder)
            if not done:
                break
        summary = self._summary("finished" if done else "interrupted")
        folder.write_summary(summary)
        return summary

    def _summary(self, status: Status) -> EvaluationSummary:
        return EvaluationSummary(status=status, settings=self._plan.settings, models=tuple(self._results))

    def _ask(self, target: Target) -> tuple[Environment, Tokenizer]:
        """The environment for this model's tokenizer. Its problems must be those of the first."""
        settings = self._plan.settings
        kind = settings.environment
        tokenizer = load_tokenizer(target.model)
        environment = make_environment(kind, settings.environment_args, tokenizer, settings.environment_seed)
        problems = problems_of(environment, settings, self._limits)
        if not problems:
            raise EnvironmentSetupError(
                f"environment {kind} has no held-out problems: define `held_out`, or give --training"
            )
        if self._problems and [problem.id for problem in problems] != [problem.id for problem in self._problems]:
            raise EnvironmentSetupError(
                f"environment {kind} has other problems for {target.name} than for "
                f"{self._plan.targets[0].name}; evaluate them apart"
            )
        if not self._problems and len(problems) < settings.problems:
            self._say(f"{kind} has {len(problems)} problems, not {settings.problems}")
        self._problems = problems
        return environment, tokenizer

    def _one(self, target: Target, environment: Environment, tokenizer: Tokenizer, folder: EvaluationFolder) -> bool:
        """Evaluate one model; False if it was stopped. However it ends, what was done is written and counted."""
        plan, settings = self._plan, self._plan.settings
        tally = Tally(self._problems, settings)
        with (
            engine_for(target, plan.engine, tokenizer, settings.max_tokens, plan.api_key) as answering,
            folder.attempts(target.folder) as attempts,
        ):
            progress = _Progress(target.name, tally, len(self._problems) * settings.attempts, self._say)

            def note(record: AttemptRecord) -> None:
                attempts.write(record)
                tally.add(record)
                progress.tell()

            try:
                questions = self._questions(environment, answering)
                done = asyncio.run(
                    answer(questions, answering.engine, tokenizer, answering.slots, stop=self._stop, on_attempt=note)
                )
            finally:
                progress.tell(now=True)
                self._results.append(tally.result(target, answering.version, self._first))
                folder.write_pass_rates(target.folder, tally.pass_rates())
                folder.write_summary(self._summary("unfinished"))
        if self._first is None:
            self._first = tally.values()
        if tally.all_failed and done:
            raise TooManyFailuresError(
                f"{target.name}: all {tally.attempts} attempts failed, the last with {tally.last_failure} (see "
                f"{folder.root / target.folder}/attempts.jsonl)"
            )
        return done

    def _questions(self, environment: Environment, answering: Answering) -> Questions:
        settings = self._plan.settings
        return Questions(
            environment=environment,
            problems=self._problems,
            attempts=settings.attempts,
            sampling=SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                stop_token_ids=answering.stop_token_ids,
            ),
            limits=self._limits,
            pass_at=settings.pass_at,
            seed=settings.seed,
        )


def problems_of(environment: Environment, settings: EvaluationSettings, limits: TimeLimits) -> list[Problem]:
    """At most `settings.problems` of the held-out problems, or of the training problems, each once.

    Raises EnvironmentSetupError if the environment can't give them.
    """
    if not settings.training_problems:
        return list(held_out_problems(environment, settings.problems))
    found: dict[str, Problem] = {}
    for index in range(settings.problems):
        made = problem_for(environment, index, limits)
        if isinstance(made, Failure):
            raise EnvironmentSetupError(f"the environment can't give its training problems: {made.message}")
        found.setdefault(made[0].id, made[0])  # beyond the end of a data set they come again
    return list(found.values())


class _Progress:
    """A line every now and then."""

    def __init__(self, name: str, tally: Tally, total: int, say: Callable[[str], None]) -> None:
        self._name = name
        self._tally = tally
        self._total = total
        self._say = say
        self._said_s = time.monotonic()

    def tell(self, *, now: bool = False) -> None:
        if not now and time.monotonic() < self._said_s + SAY_EVERY_S:
            return
        self._said_s = time.monotonic()
        reward = self._tally.reward
        mean = "" if reward is None else f", mean reward {reward:.3f}"
        self._say(f"{self._name}: {self._tally.attempts} of {self._total} attempts{mean}")

"""Runs an evaluation: one model after another, with the same problems and random numbers for all.

tokenizer ─▶ environment ─▶ problems ─▶ engine ─▶ attempts ─▶ estimates ─▶ next model

OUT/summary.json              settings, and a row per model
OUT/report.html               the table
OUT/NAME/attempts.jsonl       one line per attempt, written when it ends, so in order of completion
OUT/NAME/pass_rates.jsonl     one line per problem, in order
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from pipelinerl.actor.client import Awake, RolloutClient, derive_seed
from pipelinerl.actor.deadline import CodeAlarm
from pipelinerl.actor.evaluation import evaluated, held_out_problems
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import TimeLimits, advance, attempt, problem_for
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.user.code import run_to_end
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError, TooManyFailuresError
from pipelinerl.experiments.evaluate.models import EvaluationEngine, Target, engine_for
from pipelinerl.experiments.evaluate.results import (
    AttemptRecord,
    EvaluationSettings,
    EvaluationSummary,
    ModelResult,
    Status,
    Tally,
    evaluation_sections,
)
from pipelinerl.experiments.statistics import Floats
from pipelinerl.experiments.watch.page import page
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report import only_shown, write_file, write_json, writing_to
from pipelinerl.types import Problem, Rollout, SamplingParams

REPORT_EVERY_S = 10.0
END_S = 2.0
"""Time that cancelled attempts get to end."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What to evaluate, on what, and how."""

    targets: Sequence[Target]
    settings: EvaluationSettings
    config: RunConfig
    out: Path


def evaluate(plan: EvaluationPlan, stop: Callable[[], bool], say: Callable[[str], None]) -> EvaluationSummary:
    """Evaluate every model of the plan and write the results. `say` is called with lines of text on the progress.

    Once `stop` returns True, the evaluation ends with the results so far and status "interrupted". Raises
    EnvironmentSetupError, before any model is loaded, if the environment has no such problems; TooManyFailuresError if
    all attempts of a model failed.
    """
    if plan.config.engine.threads is not None:
        torch.set_num_threads(plan.config.engine.threads)
    limits = TimeLimits(plan.config.actor.rollout_timeout_s, CodeAlarm(plan.config.actor.code_timeout_s))
    return _Evaluation(plan, limits, stop, say).run()


@dataclass
class _Evaluation:
    plan: EvaluationPlan
    limits: TimeLimits
    stop: Callable[[], bool]
    say: Callable[[str], None]
    problems: list[Problem] = field(default_factory=list)
    results: list[ModelResult] = field(default_factory=list)
    first_values: Mapping[int, Floats] | None = None

    def run(self) -> EvaluationSummary:
        out, first = self.plan.out, self._load_environment(self.plan.targets[0])
        with writing_to(out):
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise RunDirectoryError(f"{out} exists and is not empty; choose another --out")
            out.mkdir(parents=True, exist_ok=True)
        self._write_summary("unfinished")
        done = True
        for number, target in enumerate(self.plan.targets):
            done = not self.stop() and run_to_end(
                self._evaluate(target, *(self._load_environment(target) if number else first))
            )
            if not done:
                break
        summary = self._write_summary("finished" if done else "interrupted")
        with only_shown("report.html"):
            write_file(out / "report.html", page("Evaluation", evaluation_sections(summary)).encode())
        return summary

    def _write_summary(self, status: Status) -> EvaluationSummary:
        summary = EvaluationSummary(status=status, settings=self.plan.settings, models=tuple(self.results))
        write_json(self.plan.out / "summary.json", summary)
        return summary

    def _load_environment(self, target: Target) -> tuple[Environment, Tokenizer]:
        """The environment for this model's tokenizer. Its problems must be the same as for the first model."""
        settings = self.plan.settings
        kind = settings.environment
        tokenizer = load_tokenizer(target.model)
        environment = make_environment(kind, settings.environment_args, tokenizer, settings.environment_seed)
        problems = problems_of(environment, settings, self.limits)
        if not problems:
            raise EnvironmentSetupError(
                f"environment {kind} has no held-out problems: define `held_out`, or give --training"
            )
        if self.problems and [problem.id for problem in problems] != [problem.id for problem in self.problems]:
            raise EnvironmentSetupError(
                f"environment {kind} gives different problems for {target.name} and "
                f"{self.plan.targets[0].name}; evaluate them separately"
            )
        if not self.problems and len(problems) < settings.problems:
            self.say(f"{kind} has {len(problems)} problems, not {settings.problems}")
        self.problems = problems
        return environment, tokenizer

    async def _evaluate(self, target: Target, environment: Environment, tokenizer: Tokenizer) -> bool:
        """Evaluate one model; False if it was stopped. Results so far are written even if it is stopped or fails."""
        plan, settings, folder = self.plan, self.plan.settings, self.plan.out / target.folder
        tally = Tally(self.problems, settings)
        reported_s = time.monotonic()

        def report() -> None:
            mean = "" if tally.reward is None else f", mean reward {tally.reward:.3f}"
            self.say(f"{target.name}: {tally.attempts} of {len(self.problems) * settings.attempts} attempts{mean}")

        async with AsyncExitStack() as stack:
            engine = engine_for(target, plan.config.engine, tokenizer, settings.max_tokens)
            ready = await stack.enter_async_context(engine)
            with writing_to(plan.out):
                folder.mkdir(exist_ok=True)
                lines = stack.enter_context(JsonLines(folder / "attempts.jsonl"))

            def on_attempt(record: AttemptRecord) -> None:
                nonlocal reported_s
                with writing_to(plan.out):
                    lines.write(record)
                tally.add(record)
                if time.monotonic() >= reported_s + REPORT_EVERY_S:
                    reported_s = time.monotonic()
                    report()

            try:
                done = await answer(
                    self.problems,
                    environment,
                    tokenizer,
                    ready,
                    settings,
                    limits=self.limits,
                    stop=self.stop,
                    on_attempt=on_attempt,
                )
            finally:
                report()
                self.results.append(tally.result(target, ready.version, self.first_values))
                rates = b"".join(msgspec.json.encode(rate) + b"\n" for rate in tally.pass_rates())
                write_file(folder / "pass_rates.jsonl", rates)
                self._write_summary("unfinished")
        if self.first_values is None:
            self.first_values = tally.values()
        if tally.all_failed and done:
            raise TooManyFailuresError(
                f"{target.name}: all {tally.attempts} attempts failed, the last with {tally.last_failure} (see "
                f"{folder}/attempts.jsonl)"
            )
        return done


def problems_of(environment: Environment, settings: EvaluationSettings, limits: TimeLimits) -> list[Problem]:
    """The first `settings.problems` held-out or training problems, each once; fewer if there are fewer.

    Raises EnvironmentSetupError if the environment can't provide them.
    """
    if not settings.training_problems:
        return list(held_out_problems(environment, settings.problems))
    found: dict[str, Problem] = {}
    for index in range(settings.problems):
        made = problem_for(environment, index, limits)
        if isinstance(made, Failure):
            raise EnvironmentSetupError(f"the environment can't give its training problems: {made.message}")
        found.setdefault(made[0].id, made[0])  # problems repeat after the end of a data set
    return list(found.values())


# ---- the attempts of one model


async def answer(
    problems: Sequence[Problem],
    environment: Environment,
    tokenizer: Tokenizer,
    ready: EvaluationEngine,
    settings: EvaluationSettings,
    *,
    limits: TimeLimits,
    stop: Callable[[], bool],
    on_attempt: Callable[[AttemptRecord], None],
) -> bool:
    """Run all attempts on one engine, with as many at a time as it has slots. Returns False if `stop` ended them early.

    The attempts at a problem are started one after another, so that their prompt is computed once. Seeds depend only on
    `settings.seed`, the problem's position and the attempt, so different weights get the same random numbers.
    `on_attempt` is called for each attempt in order of completion, failed ones included. Raises what the engine raises.
    """
    sampling = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_token_ids=ready.stop_token_ids,
    )
    awake = Awake()
    waiting = ((number, k) for number in range(len(problems)) for k in range(settings.attempts))
    running: dict[asyncio.Task[Rollout | Failure], tuple[int, int]] = {}
    upcoming = next(waiting, None)
    try:
        while (upcoming is not None or running) and not stop():
            while upcoming is not None and len(running) < ready.slots:
                number, k = upcoming
                seed = derive_seed("eval", settings.seed, number, k)
                name = f"eval.{number}.{k}"
                client = RolloutClient(ready.engine, tokenizer, sampling, name=name, seed=seed, awake=awake)
                rollout = attempt(environment, problems[number], client, limits)
                running[asyncio.create_task(rollout)] = upcoming
                upcoming = next(waiting, None)
            await advance(ready.engine, awake)
            for task in [task for task in running if task.done()]:
                number, k = running.pop(task)
                record = evaluated(problems[number], task.result(), tokenizer)
                passed = record.failure is None and record.reward >= settings.pass_at
                on_attempt(AttemptRecord(number=number, attempt=k, passed=passed, **msgspec.structs.asdict(record)))
        return upcoming is None and not running
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_S)

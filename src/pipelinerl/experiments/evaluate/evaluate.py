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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch

from pipelinerl.actor.client import Awake, RolloutClient, derive_seed
from pipelinerl.actor.evaluation import evaluated, held_out_problems
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import advance, attempt, problem_for
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
    out, settings = plan.out, plan.settings
    asked = _load(plan.targets[0], settings)
    if not asked.problems:
        raise EnvironmentSetupError(
            f"environment {settings.environment} has no held-out problems: define `held_out`, or give --training"
        )
    if len(asked.problems) < settings.problems:
        say(f"{settings.environment} has {len(asked.problems)} problems, not {settings.problems}")
    with writing_to(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunDirectoryError(f"{out} exists and is not empty; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    models: list[ModelResult] = []
    first: Tally | None = None
    status: Status = "finished"
    _write_summary(plan, "unfinished", models)
    for number, target in enumerate(plan.targets):
        own = _load(target, settings) if number else asked
        if [problem.id for problem in own.problems] != [problem.id for problem in asked.problems]:
            raise EnvironmentSetupError(
                f"environment {settings.environment} gives different problems for {target.name} and "
                f"{plan.targets[0].name}; evaluate them separately"
            )
        tally = Tally(own.problems, settings)
        if not run_to_end(_measure(plan, target, own, tally, models, first=first, stop=stop, say=say)):
            status = "interrupted"
            break
        first = first or tally
        if all(one.failure is not None for one in tally.attempts):
            raise TooManyFailuresError(
                f"{target.name}: all {len(tally.attempts)} attempts failed, the last with {tally.attempts[-1].failure} (see "
                f"{out / target.folder}/attempts.jsonl)"
            )
    summary = _write_summary(plan, status, models)
    with only_shown("report.html"):
        write_file(out / "report.html", page("Evaluation", evaluation_sections(summary)).encode())
    return summary


class Asked(NamedTuple):
    """The environment for a model's tokenizer, and its problems."""

    environment: Environment
    tokenizer: Tokenizer
    problems: list[Problem]


def _load(target: Target, settings: EvaluationSettings) -> Asked:
    tokenizer = load_tokenizer(target.model)
    kind, args = settings.environment, settings.environment_args
    environment = make_environment(kind, args, tokenizer, settings.environment_seed)
    return Asked(environment, tokenizer, problems_of(environment, settings))


def _write_summary(plan: EvaluationPlan, status: Status, models: Sequence[ModelResult]) -> EvaluationSummary:
    summary = EvaluationSummary(status=status, settings=plan.settings, models=tuple(models))
    write_json(plan.out / "summary.json", summary)
    return summary


async def _measure(
    plan: EvaluationPlan,
    target: Target,
    asked: Asked,
    tally: Tally,
    models: list[ModelResult],
    *,
    first: Tally | None,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> bool:
    """Evaluate one model; False if it was stopped. Adds its result to `models` also if it is stopped or fails.

    `first`: the attempts of the first model; None for that model itself.
    """
    settings, folder, reported_s = plan.settings, plan.out / target.folder, time.monotonic()
    timeout_s = plan.config.actor.rollout_timeout_s

    def report() -> None:
        rewards = [one.reward for one in tally.attempts]
        mean = f", mean reward {fmean(rewards):.3f}" if rewards else ""
        say(f"{target.name}: {len(rewards)} of {len(asked.problems) * settings.attempts} attempts{mean}")

    def on_attempt(record: AttemptRecord) -> None:
        nonlocal reported_s
        with writing_to(plan.out):
            lines.write(record)
        tally.add(record)
        if time.monotonic() >= reported_s + REPORT_EVERY_S:
            reported_s = time.monotonic()
            report()

    if stop():
        return False
    async with engine_for(target, plan.config.engine, asked.tokenizer, settings.max_tokens) as ready:
        with writing_to(plan.out):
            folder.mkdir(exist_ok=True)
            lines = JsonLines(folder / "attempts.jsonl")
        try:
            with lines:
                return await answer(asked, ready, settings, timeout_s=timeout_s, stop=stop, on_attempt=on_attempt)
        finally:
            report()
            models.append(tally.result(target, ready.version, first))
            rates = b"".join(msgspec.json.encode(rate) + b"\n" for rate in tally.pass_rates())
            write_file(folder / "pass_rates.jsonl", rates)
            _write_summary(plan, "unfinished", models)


def problems_of(environment: Environment, settings: EvaluationSettings) -> list[Problem]:
    """The first `settings.problems` held-out or training problems, each once; fewer if there are fewer.

    Raises EnvironmentSetupError if the environment can't provide them.
    """
    if not settings.training_problems:
        return list(held_out_problems(environment, settings.problems))
    found: dict[str, Problem] = {}
    for index in range(settings.problems):
        made = problem_for(environment, index)
        if isinstance(made, Failure):
            raise EnvironmentSetupError(f"the environment can't give its training problems: {made.message}")
        found.setdefault(made[0].id, made[0])  # problems repeat after the end of a data set
    return list(found.values())


# ---- the attempts of one model


async def answer(
    asked: Asked,
    ready: EvaluationEngine,
    settings: EvaluationSettings,
    *,
    timeout_s: float,
    stop: Callable[[], bool],
    on_attempt: Callable[[AttemptRecord], None],
) -> bool:
    """Run all attempts on one engine, with as many at a time as it has slots. Returns False if `stop` ended them early.

    The attempts at a problem are started one after another, so that their prompt is computed once. Seeds depend only on
    `settings.seed`, the problem's position and the attempt, so different weights get the same random numbers.
    `on_attempt` is called for each attempt in order of completion, failed ones included. Raises what the engine raises.
    """
    environment, tokenizer, problems = asked
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
                rollout = attempt(environment, problems[number], client, timeout_s)
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

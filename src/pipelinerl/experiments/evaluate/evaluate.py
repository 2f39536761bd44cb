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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from pipelinerl.actor.client import derive_seed
from pipelinerl.actor.evaluation import evaluated, held_out_problems
from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import RolloutContext, advance, attempt, problem_for
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.environments.user.code import run_to_end
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError, TooManyFailuresError
from pipelinerl.experiments.evaluate.models import Target, ready_context
from pipelinerl.experiments.statistics import LEVEL, Floats, Interval, mean_intervals, pass_at_k, powers_of_two
from pipelinerl.experiments.watch.page import page
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.metrics.statistics import mean_metrics
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report import PageSection, number, only_shown, table, write_file, write_json, writing_to
from pipelinerl.types import Problem, Rollout

REPORT_EVERY_S = 10.0
RESAMPLES = 2000
END_S = 2.0
"""Time that cancelled attempts get to end."""

Status = Literal["unfinished", "interrupted", "finished"]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What to evaluate, on what, and how: `attempts` at each of the first `problems` held-out problems.

    config      the run configuration that has environment, sampling, limits and engine. An environment may request fewer
                than `actor.max_tokens`
    training    training problems instead of held-out ones
    pass_at     the lowest reward that counts as a pass
    seed        of sampling and resampling
    """

    targets: Sequence[Target]
    config: RunConfig
    out: Path
    problems: int
    training: bool
    attempts: int
    pass_at: float
    seed: int


# ---- the results


class AttemptRecord(EvaluatedProblem, frozen=True, kw_only=True):
    """A line of `attempts.jsonl`: attempt number `attempt` (0, 1, ...) at problem number `number` of the evaluation."""

    number: int
    attempt: int
    passed: bool


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over problems: the reward (mean@K), and pass@k by k."""

    reward: Interval
    passes: dict[int, Interval]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one model.

    `problems` counts the problems with all K attempts; `estimates` are over these only (None if there are none).
    `attempts` counts all attempts, `failed` the attempts without a rollout, by reason. Failed attempts count as reward 0 and
    not passed. `length_mean` (sampled tokens) and `cut` (the share that ended at the token limit) are over the attempts
    that did not fail. `metrics` are means of the environment's metrics, each over the attempts that have it. `minus_first`
    is this model minus the first one, paired by problem.
    """

    name: str
    path: str
    version: int | None
    folder: str
    problems: int
    attempts: int
    estimates: Estimates | None
    length_mean: float | None
    cut: float | None
    failed: dict[str, int]
    metrics: dict[str, float]
    minus_first: Estimates | None


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Status `unfinished`: the evaluation is still running, or its process was killed."""

    status: Status
    settings: dict[str, Any]
    models: tuple[ModelResult, ...] = ()


class Tally:
    """The attempts of one model, without their texts and tokens, by the number of the problem."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan
        self.attempts: list[AttemptRecord] = []
        self.by_problem: defaultdict[int, list[AttemptRecord]] = defaultdict(list)

    def add(self, record: AttemptRecord) -> None:
        short = msgspec.structs.replace(record, prompt="", completion="", token_ids=(), weight_versions=())
        self.attempts.append(short)
        self.by_problem[record.number].append(short)

    def values(self) -> dict[int, Floats]:
        """Problem number -> mean reward, pass@1, pass@2, pass@4, ..., for problems with all of their attempts."""
        wanted = self._plan.attempts
        found: dict[int, Floats] = {}
        for place, records in sorted(self.by_problem.items()):
            if len(records) == wanted:
                passes = sum(one.passed for one in records)
                at_k = [pass_at_k(wanted, passes, k) for k in powers_of_two(wanted)]
                found[place] = np.array([sum(one.reward for one in records) / wanted, *at_k])
        return found

    def result(self, target: Target, version: int | None, first: Tally | None) -> ModelResult:
        """The model's results. `first`: the attempts of the first model, to compare with; None for that model itself."""
        values, others = self.values(), first.values() if first else {}
        answered = [one for one in self.attempts if one.failure is None]
        failed = Counter(one.failure.partition(":")[0] for one in self.attempts if one.failure is not None)
        return ModelResult(
            name=target.name,
            path=target.model.path,
            version=version,
            folder=target.folder,
            problems=len(values),
            attempts=len(self.attempts),
            estimates=self._estimates(values),
            length_mean=fmean(one.length for one in answered) if answered else None,
            cut=fmean(one.finish_reason == "length" for one in answered) if answered else None,
            failed=dict(sorted(failed.items())),
            metrics=mean_metrics(one.metrics for one in answered).means,
            minus_first=self._estimates({place: values[place] - others[place] for place in values if place in others}),
        )

    def _estimates(self, values: Mapping[int, Floats]) -> Estimates | None:
        if not values:
            return None
        values_UQ = np.array(list(values.values()))
        reward, *passes = mean_intervals(values_UQ, resamples=RESAMPLES, seed=self._plan.seed)
        return Estimates(reward=reward, passes=dict(zip(powers_of_two(self._plan.attempts), passes, strict=True)))


def evaluation_sections(plan: EvaluationPlan, summary: EvaluationSummary) -> list[PageSection]:
    """A table with a row per model, and the means of the environment's metrics, if there are any."""
    models = summary.models
    title = f"{plan.config.environment.kind}: {plan.attempts} attempts at each problem, temperature "
    title += f"{plan.config.evaluation.temperature:g}" + (", training problems" if plan.training else "")
    compared = "; differences are paired" if len(models) > 1 else ""
    notes = [f"in brackets: {LEVEL:.0%} intervals over problems{compared}"]
    if summary.status == "interrupted":
        notes.append("INTERRUPTED: short answers end first, so the counted problems are not typical")
    sections = [table(title, [_cells(model, plan.attempts, compared=bool(compared)) for model in models], *notes)]
    if metrics := sorted({metric for model in models for metric in model.metrics}):
        means = [
            {"metric": metric} | {model.name: number(model.metrics.get(metric), ".4g") for model in models}
            for metric in metrics
        ]
        sections.append(table("Metrics", means, "means over the attempts that have the metric"))
    return sections


def _cells(model: ModelResult, attempts: int, *, compared: bool) -> dict[str, str]:
    """The row of a model, with intervals below the estimates."""
    found, paired = model.estimates, model.minus_first
    cells = {"model": model.name, "problems": str(model.problems)}
    cells[f"mean@{attempts}"] = found.reward.text(".3f") if found else "-"
    cells |= {f"pass@{k}": found.passes[k].text(".3f") if found else "-" for k in powers_of_two(attempts)}
    if compared:
        cells[f"mean@{attempts} - first"] = paired.reward.text("+.3f") if paired else ""
        cells["pass@1 - first"] = paired.passes[1].text("+.3f") if paired else ""
    failed = "\n".join(f"{amount} {reason}" for reason, amount in model.failed.items())
    return cells | {
        "tokens": number(model.length_mean, ".1f"),
        "cut": number(model.cut, ".1%"),
        "failed": failed or "0",
    }


# ---- the evaluation


def evaluate(plan: EvaluationPlan, stop: Callable[[], bool], say: Callable[[str], None]) -> EvaluationSummary:
    """Evaluate every model of the plan and write the results. `say` is called with lines of text on the progress.

    Once `stop` returns True, the evaluation ends with the results so far and status "interrupted". Raises
    EnvironmentSetupError, before any model is loaded, if the environment has no such problems; TooManyFailuresError if
    all attempts of a model failed.
    """
    if plan.config.engine.threads is not None:
        torch.set_num_threads(plan.config.engine.threads)
    kind, out = plan.config.environment.kind, plan.out
    asked = _load(plan.targets[0], plan)
    if not asked.problems:
        raise EnvironmentSetupError(f"environment {kind} has no held-out problems: define `held_out`, or give --training")
    if len(asked.problems) < plan.problems:
        say(f"{kind} has {len(asked.problems)} problems, not {plan.problems}")
    with writing_to(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunDirectoryError(f"{out} exists and is not empty; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    models: list[ModelResult] = []
    first: Tally | None = None
    status: Status = "finished"
    _write_summary(plan, "unfinished", models)
    for place, target in enumerate(plan.targets):
        own = _load(target, plan) if place else asked
        if [problem.id for problem in own.problems] != [problem.id for problem in asked.problems]:
            raise EnvironmentSetupError(
                f"environment {kind} gives different problems for {target.name} and {plan.targets[0].name}; evaluate them "
                "separately"
            )
        tally = Tally(plan)
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
        write_file(out / "report.html", page("Evaluation", evaluation_sections(plan, summary)).encode())
    return summary


class Asked(NamedTuple):
    """The environment for a model's tokenizer, and its problems."""

    environment: Environment
    tokenizer: Tokenizer
    problems: list[Problem]


def _load(target: Target, plan: EvaluationPlan) -> Asked:
    """Raises EnvironmentSetupError if the environment can't provide the first problems, each once; there may be fewer."""
    tokenizer, config = load_tokenizer(target.model), plan.config
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    if not plan.training:
        return Asked(environment, tokenizer, list(held_out_problems(environment, plan.problems)))
    found: dict[str, Problem] = {}
    for index in range(plan.problems):
        made = problem_for(environment, index)
        if isinstance(made, Failure):
            raise EnvironmentSetupError(f"the environment can't give its training problems: {made.message}")
        found.setdefault(made[0].id, made[0])  # problems repeat after the end of a data set
    return Asked(environment, tokenizer, list(found.values()))


def _write_summary(plan: EvaluationPlan, status: Status, models: Sequence[ModelResult]) -> EvaluationSummary:
    settings = {name: getattr(plan, name) for name in ("problems", "training", "attempts", "pass_at", "seed")}
    used = plan.config.model_dump(mode="json", include={"environment", "evaluation", "actor", "engine", "seed"})
    settings |= {"resamples": RESAMPLES, "level": LEVEL, "config": used}
    summary = EvaluationSummary(status=status, settings=settings, models=tuple(models))
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
    folder, reported_s = plan.out / target.folder, time.monotonic()

    def report() -> None:
        rewards = [one.reward for one in tally.attempts]
        mean = f", mean reward {fmean(rewards):.3f}" if rewards else ""
        say(f"{target.name}: {len(rewards)} of {len(asked.problems) * plan.attempts} attempts{mean}")

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
    actor = plan.config.actor.model_copy(update={"temperature": plan.config.evaluation.temperature})
    config = plan.config.model_copy(update={"actor": actor, "seed": plan.seed})
    async with ready_context(target, config, asked.environment, asked.tokenizer) as context:
        version = target.version if config.engine.kind == "local" else context.engine.version
        with writing_to(plan.out):
            folder.mkdir(exist_ok=True)
            lines = JsonLines(folder / "attempts.jsonl")
        try:
            with lines:
                return await answer(context, asked.problems, plan, stop=stop, on_attempt=on_attempt)
        finally:
            report()
            models.append(tally.result(target, version, first))
            rates = b""
            for place, records in sorted(tally.by_problem.items()):  # a failed attempt did not pass
                passes = sum(one.passed for one in records)
                rate = {"id": asked.problems[place].id, "attempts": len(records), "passes": passes}
                rates += msgspec.json.encode(rate) + b"\n"
            write_file(folder / "pass_rates.jsonl", rates)
            _write_summary(plan, "unfinished", models)


async def answer(
    context: RolloutContext,
    problems: Sequence[Problem],
    plan: EvaluationPlan,
    *,
    stop: Callable[[], bool],
    on_attempt: Callable[[AttemptRecord], None],
) -> bool:
    """Run all attempts on one engine, with as many at a time as it has slots. Returns False if `stop` ended them early.

    The attempts at a problem are started one after another, so that their prompt is computed once. Seeds depend only on
    the plan's seed, the problem's position and the attempt, so different weights get the same random numbers.
    `on_attempt` is called for each attempt in order of completion, failed ones included. Raises what the engine raises.
    """
    waiting = ((place, k) for place in range(len(problems)) for k in range(plan.attempts))
    running: dict[asyncio.Task[Rollout | Failure], tuple[int, int]] = {}
    upcoming = next(waiting, None)
    try:
        while (upcoming is not None or running) and not stop():
            while upcoming is not None and len(running) < context.slots:
                place, k = upcoming
                client = context.rollout_client(f"eval.{place}.{k}", derive_seed("eval", context.seed, place, k))
                rollout = attempt(context.environment, problems[place], client, context.rollout_timeout_s)
                running[asyncio.create_task(rollout)] = upcoming
                upcoming = next(waiting, None)
            await advance(context.engine, context.awake)
            for task in [task for task in running if task.done()]:
                place, k = running.pop(task)
                record = evaluated(problems[place], task.result(), context.tokenizer)
                passed = record.failure is None and record.reward >= plan.pass_at
                on_attempt(AttemptRecord(number=place, attempt=k, passed=passed, **msgspec.structs.asdict(record)))
        return upcoming is None and not running
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_S)

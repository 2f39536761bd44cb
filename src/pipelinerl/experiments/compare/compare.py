"""`pipelinerl lab compare`: the best settings of each schedule, a run of every schedule on every seed, and the results.

trials of each schedule ─▶ seed 0: a, b, c ─▶ seed 1: b, c, a ─▶ ... ─▶ compare.json, report.html
(the fastest settings)     (one run at a time, then its weights answer held-out problems; finished runs are not repeated)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.held_out import HELD_OUT_FILE, Answered, read_answers
from pipelinerl.experiments.compare.page import Results, comparison_page
from pipelinerl.experiments.compare.results import RunResult, row, run_result, target_reward
from pipelinerl.experiments.compare.settings import (
    CONVENTIONAL,
    PIPELINE,
    ComparisonRequest,
    Contender,
    Settings,
    Trials,
    TuningResult,
    TuningTrial,
    axes,
    decide,
    finalists,
    plain,
    run_config,
    search,
    settings_of,
)
from pipelinerl.experiments.runs import Execution, Folder, claimed, remove_parts
from pipelinerl.experiments.watch.page import shown_run
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.report import number, only_shown, write_file, write_json
from pipelinerl.report.series import RunRecords, read_run, tokens_rate_after
from pipelinerl.run_directory import RunDirectory


class PlannedRun(NamedTuple):
    """One run of the comparison (not a trial). `name` is its folder within the comparison's folder."""

    name: str
    contender: Contender
    seed: int


def compare(
    request: ComparisonRequest,
    out: Path,
    *,
    train: Callable[[RunConfig], object],
    evaluate: Callable[[Path, ComparisonRequest], Sequence[Answered]],
    target: float | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Make the runs of `request` that `out` lacks, write the results there, and return the contents of `compare.json`.

    `train` executes one run. `evaluate` then has its weights answer the held-out problems. `say` receives one line for
    each. Raises ConfigError if a schedule is incompatible with the run file, RunDirectoryError if `out` belongs to another
    comparison or can't be used, RunInterruptedError, and any error that ends a run, except divergence, which is a result.
    """
    for contender in request.schedules:
        _check(request, contender)
    with claimed(out, plain(request), "comparison"):
        session = _Session(request, Folder(out, train), evaluate, say)
        tried = {contender.label: session.tune(contender) for contender in request.schedules}
        planned = plan_runs(request)
        executions = {
            run: session.run(run, tried[run.contender.label].used, f"[{place}/{len(planned)}]")
            for place, run in enumerate(planned, start=1)
        }
    return write_results(request, out, tried, executions, target)


def plan_runs(request: ComparisonRequest) -> list[PlannedRun]:
    """All runs in order. The order of schedules rotates from seed to seed, so that none is always first."""
    runs: list[PlannedRun] = []
    for place, seed in enumerate(request.seed_numbers):
        first = place % len(request.schedules)
        order = (*request.schedules[first:], *request.schedules[:first])
        runs += [PlannedRun(f"runs/seed-{seed}/{_folder_name(one)}", one, seed) for one in order]
    return runs


def trial_length(trial_steps: int, contender: Contender) -> tuple[int, int]:
    """(steps of a trial, initial steps that do not count because the pipeline fills: a third). Both are whole rounds."""
    rounds = contender.steps_per_round
    fill = -(-trial_steps // (3 * rounds)) * rounds
    return max(-(-trial_steps // rounds) * rounds, fill + rounds), fill


def start_settings(request: ComparisonRequest, contender: Contender) -> Settings:
    """The run file's settings, with defaults resolved for this schedule."""
    schedule = request.config.schedule.model_copy(update={"kind": contender.kind})
    return settings_of(request.config.model_copy(update={"schedule": schedule}), request.machine.cores)


def _check(request: ComparisonRequest, contender: Contender) -> None:
    """Raise ConfigError if a schedule is incompatible with the run file, before anything is run."""
    settings = start_settings(request, contender)
    try:
        run_config(request.config, contender, settings, seed=0, steps=request.steps, run_dir=Path("checked"))
    except ConfigError as error:
        raise ConfigError(f"{contender.label}: {error}") from error


def _folder_name(contender: Contender) -> str:
    return contender.label.replace(":", "-")


@dataclass(frozen=True)
class _Session:
    """The state of one call of `compare`."""

    request: ComparisonRequest
    folder: Folder
    evaluate: Callable[[Path, ComparisonRequest], Sequence[Answered]]
    say: Callable[[str], object]

    def tune(self, contender: Contender) -> TuningResult:
        """The fastest settings of one schedule, found by trials; without tuning, the run file's settings."""
        request = self.request
        start = start_settings(request, contender)
        if not request.tune:
            return TuningResult(start, [])
        bound = None if contender.kind == PIPELINE else request.config.trainer.batch_size * contender.steps_per_round
        cores, factors = request.machine.cores, request.slot_factors
        in_turn = contender.kind == CONVENTIONAL
        search_axes = axes(request.config, cores=cores, most_in_progress=bound, slot_factors=factors, in_turn=in_turn)
        length, fill = trial_length(request.trial_steps, contender)
        best, tried = search(start, search_axes, lambda settings: self._rate(contender, settings, length, fill))
        candidates = finalists(best, tried) if request.finals else []
        if len(candidates) > 1:
            finals = [
                TuningTrial(one, self._rate(contender, one, request.steps, request.steps // 5, "full-"), full=True)
                for one in candidates
            ]
            best, tried = decide(finals), [*tried, *finals]
        return TuningResult(best, tried)

    def run(self, planned: PlannedRun, settings: Settings, progress: str) -> Execution:
        """Execute one run and its evaluation, unless they are done."""
        request, contender, path = self.request, planned.contender, self.folder.root / planned.name
        weights_every = request.evaluate_every if request.held_out else 0
        execution = self._executed(
            planned.name, contender, settings, planned.seed, request.steps, weights_every=weights_every
        )
        steps = read_records(RunDirectory(path).metrics, StepRecord)
        outcome = (
            f"{sum(step.samples for step in steps)} rollouts, {steps[-1].time_s:.0f} s with start-up" if steps else "no step"
        )
        self.say(f"{progress} {contender.label}, seed {planned.seed}: {execution.status}, {outcome}")
        if request.held_out and execution.finished and not read_answers(path):
            write_json(path / HELD_OUT_FILE, self.evaluate(path, request), indent=2)
            last = read_answers(path)[-1]
            interval = f"{last.reward:.3f} ({last.low:.3f} to {last.high:.3f})"
            self.say(f"{progress} held-out reward of version {last.version}: {interval}")
        remove_parts(path, WEIGHTS_FOLDER)
        return execution

    def _rate(self, contender: Contender, settings: Settings, length: int, fill: int, kind: str = "") -> float | None:
        """Sampled tokens/s of a run of `length` steps after the first `fill`. Executes the run unless it is done."""
        name = f"trials/{_folder_name(contender)}/{kind}{settings.folder}"
        self._executed(name, contender, settings, self.request.config.seed, length)
        path = self.folder.root / name
        remove_parts(path, "rollouts", "checkpoints", "streams")  # the rate needs only the steps
        steps = read_records(RunDirectory(path).metrics, StepRecord)
        rate = tokens_rate_after(steps, fill) if steps else None
        self.say(f"tried {contender.label}: {settings.label}, {length} steps: {number(rate, '.0f')} tokens/s")
        return rate

    def _executed(
        self, name: str, contender: Contender, settings: Settings, seed: int, steps: int, *, weights_every: int = 0
    ) -> Execution:
        path, base = self.folder.root / name, self.request.config
        config = run_config(base, contender, settings, seed=seed, steps=steps, run_dir=path, weights_every=weights_every)
        return self.folder.execute(name, config)


# ---- the results: `compare.json`, and the report


def write_results(
    request: ComparisonRequest, out: Path, trials: Trials, executions: Mapping[PlannedRun, Execution], target: float | None
) -> dict[str, Any]:
    """Read the runs, write all results, and return the contents of `compare.json`.

    `target` None: it is chosen from the runs. Raises RunDirectoryError if a run's records can't be read.
    """
    planned = sorted(executions, key=lambda run: (request.schedules.index(run.contender), run.seed))
    records = {run: read_run(out / run.name) for run in planned}
    answers = {run: read_answers(out / run.name) if request.held_out else None for run in planned}

    def results(goal: float | None) -> list[RunResult]:
        used = {label: tried.used for label, tried in trials.items()}
        return [
            run_result(
                records[run],
                run.contender,
                used[run.contender.label],
                executions[run],
                target=goal,
                answered=answers[run],
            )
            for run in planned
        ]

    target = target_reward(results(None)) if target is None else target
    runs = results(target)
    found = Results(target, [row(runs, one.label) for one in request.schedules], runs, trials)
    contents = document(request, found)
    write_json(out / "compare.json", contents)
    with only_shown("report.html"):
        shown: dict[str, dict[str, Any]] = {}
        for run in planned:
            of_run = shown_run(out / run.name)
            if (answered := answers[run]) is not None:
                of_run["evaluations"] = evaluations_of(answered, records[run], request.held_out)
            shown[f"{run.contender.label}, seed {run.seed}"] = of_run
        write_file(out / "report.html", comparison_page(request, found, shown).encode())
    return contents


def document(request: ComparisonRequest, results: Results) -> dict[str, Any]:
    """The contents of `compare.json`. The top-level ratios are of the pipeline schedule; None if it was not compared."""
    pipeline = next((row for row in results.rows if row.schedule == PIPELINE), None)
    contents: dict[str, Any] = {
        "ratio_time_to_reward": pipeline.ratio_time_to_reward if pipeline else None,
        "ratio_samples_per_s": pipeline.ratio_samples_per_s if pipeline else None,
        "target_reward": results.target,
        "reward": request.reward,
        "schedules": [{**msgspec.structs.asdict(row), "settings": row.settings._asdict()} for row in results.rows],
        "trials": {
            schedule: [
                {
                    **trial.settings._asdict(),
                    "tokens_per_s": trial.tokens_per_s,
                    "full_length": trial.full,
                    "used": tried.decided_by(trial),
                }
                for trial in tried.trials
            ]
            for schedule, tried in results.trials.items()
        },
        "request": {**plain(request), "schedules": [one.label for one in request.schedules]},
        "runs": [{**msgspec.structs.asdict(run), "settings": run.settings._asdict()} for run in results.runs],
    }
    return dict(rounded(msgspec.to_builtins(contents)))


def evaluations_of(answered: Sequence[Answered], records: RunRecords, problems: int) -> list[dict[str, Any]]:
    """The answers in place of a run's evaluations on a page, at the time at which the trainer finished each version."""
    done = {0: (0.0, 0)}
    rollouts = 0
    for step in records.steps:
        rollouts += step.samples
        done[step.version] = (step.time_s - records.begin_s) / 60, rollouts
    return [
        {
            "when": "after",
            "version": one.version,
            "minutes": done[one.version][0],
            "rollouts": done[one.version][1],
            "problems": problems,
            "reward": one.reward,
            "error": (one.high - one.low) / (2 * 1.96),  # standard error from a 95% interval
            "length": None,
            "failed": {"attempts": one.failed} if one.failed else {},
        }
        for one in answered
    ]


def rounded(value: Any) -> Any:
    """A JSON-like document with floats rounded to six significant digits; NaN and infinities become None."""
    match value:
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
    return value

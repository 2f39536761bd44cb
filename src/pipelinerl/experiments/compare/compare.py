"""`pipelinerl lab compare`: a sweep over schedules and seeds, each schedule with its best settings, and its analysis.

trials of each schedule ─▶ seed 0: a, b, c ─▶ seed 1: b, c, a ─▶ ... ─▶ compare.json, report.html
(the fastest settings)     (one run at a time, then its weights answer held-out problems; finished runs are not repeated)
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.held_out import HELD_OUT_FILE, Answered, read_answers
from pipelinerl.experiments.compare.page import findings, sections
from pipelinerl.experiments.compare.request import CONVENTIONAL, PIPELINE, ComparisonRequest, Contender, trial_length
from pipelinerl.experiments.compare.results import RunResult, row, run_result, target_reward
from pipelinerl.experiments.compare.tuning import Settings, TuningResult, axes, tune
from pipelinerl.experiments.runs import Execution, Folder, PlannedRun, Setting, planned_runs
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.report import number, write_json
from pipelinerl.report.series import RunRecords, read_run, tokens_rate_after
from pipelinerl.run_directory import RunDirectory

Say = Callable[[str], object]
Evaluate = Callable[[Path, ComparisonRequest], Sequence[Answered]]


class Compared(NamedTuple):
    """The contents of `compare.json`, and what they show, in sentences."""

    contents: dict[str, Any]
    findings: list[str]


def compare(
    request: ComparisonRequest,
    out: Path,
    *,
    train: Callable[[RunConfig], object],
    evaluate: Evaluate,
    target: float | None = None,
    say: Say = print,
) -> Compared:
    """Make the runs of `request` that `out` lacks, and write the results there.

    `train` executes one run. `evaluate` then has its weights answer the held-out problems. `target` None: it is chosen from
    the runs. `say` receives lines on the progress. Raises ConfigError if a schedule is incompatible with the run file,
    RunDirectoryError if `out` belongs to another comparison or can't be used, RunInterruptedError, and PipelineRLError if a
    trial or, once all others have ended, a run failed. A run that diverges is a result.
    """
    for contender in request.schedules:  # before anything is run
        try:
            request.run_config(contender, request.start_settings(contender), steps=request.steps)
        except ConfigError as error:
            raise ConfigError(f"{contender.label}: {error}") from error
    folder = Folder(out, train)

    def ended(run: PlannedRun, execution: Execution) -> str:
        """Have the weights of a run answer the held-out problems, unless they have."""
        path = out / run.name
        steps = read_records(RunDirectory(path).metrics, StepRecord)
        text = f", {sum(step.samples for step in steps)} rollouts, {steps[-1].time_s:.0f} s with start-up" if steps else ""
        if request.held_out and execution.finished:
            if not read_answers(path):
                write_json(path / HELD_OUT_FILE, evaluate(path, request), indent=2)
            last = read_answers(path)[-1]
            text += f", held-out reward of version {last.version}: {last.reward:.3f} ({last.low:.3f} to {last.high:.3f})"
        shutil.rmtree(path / WEIGHTS_FOLDER, ignore_errors=True)
        return text

    with folder.claimed(request.to_json(), "comparison"):
        tuning = {one.label: _tuned(request, one, folder, say) for one in request.schedules}
        every = request.evaluate_every if request.held_out else 0
        settings = []
        for one in request.schedules:
            config = request.run_config(one, tuning[one.label].used, steps=request.steps, weights_every=every)
            settings.append(Setting(one.label, one.folder, config))
        runs = planned_runs(settings, request.seed_numbers)
        executions = folder.execute_all(runs, say, ended)
    if (failure := folder.failure(executions)) is not None:
        raise failure
    return _write_results(request, folder, settings, tuning, executions=executions, target=target)


def _tuned(request: ComparisonRequest, contender: Contender, folder: Folder, say: Say) -> TuningResult:
    """The fastest settings of one schedule, found by trials; without tuning, the run file's settings."""
    start = request.start_settings(contender)
    if not request.tune:
        return TuningResult(start)
    short, fill = trial_length(request.trial_steps, contender)

    def measure(settings: Settings, full: bool) -> float | None:
        """Sampled tokens/s after the first steps."""
        steps, uncounted = (request.steps, request.steps // 5) if full else (short, fill)
        config = request.run_config(contender, settings, steps=steps)
        name = f"trials/{contender.folder}/{'full-' if full else ''}{settings.folder}"
        run = PlannedRun(Setting(contender.label, name, config), config.seed)
        folder.execute(run)
        path = folder.root / run.name
        for part in ("rollouts", "checkpoints", "streams"):  # the rate needs only the steps
            shutil.rmtree(path / part, ignore_errors=True)
        records = read_records(RunDirectory(path).metrics, StepRecord)
        rate = tokens_rate_after(records, uncounted) if records else None
        say(f"tried {contender.label}: {settings.label}, {steps} steps: {number(rate, '.0f')} tokens/s")
        return rate

    bound = None if contender.kind == PIPELINE else request.config.trainer.batch_size * contender.steps_per_round
    in_turn = contender.kind == CONVENTIONAL
    ways = axes(request.config, request.machine.cores, most_in_progress=bound, in_turn=in_turn)
    return tune(start, ways, measure, finals=request.finals)


# ---- the results: `compare.json`, and the report


def _write_results(
    request: ComparisonRequest,
    folder: Folder,
    settings: Sequence[Setting],
    tuning: Mapping[str, TuningResult],
    *,
    executions: Mapping[str, Execution],
    target: float | None,
) -> Compared:
    """Read the runs and write all results. Raises RunDirectoryError if a run's records can't be read."""
    planned = [PlannedRun(setting, seed) for setting in settings for seed in request.seed_numbers]
    records = {run.name: read_run(folder.root / run.name) for run in planned}
    answers = {run.name: read_answers(folder.root / run.name) if request.held_out else None for run in planned}
    contenders = {one.label: one for one in request.schedules}

    def results(goal: float | None) -> list[RunResult]:
        found = []
        for name, label in ((run.name, run.setting.label) for run in planned):
            used, answered = tuning[label].used, answers[name]
            found.append(
                run_result(records[name], contenders[label], used, executions[name], target=goal, answered=answered)
            )
        return found

    target = target_reward(results(None)) if target is None else target
    runs = results(target)
    rows = [row(runs, label) for label in contenders]
    pipeline = next((one for one in rows if one.schedule == PIPELINE), None)
    contents: dict[str, Any] = {
        "ratio_time_to_reward": pipeline.ratio_time_to_reward if pipeline else None,
        "ratio_samples_per_s": pipeline.ratio_samples_per_s if pipeline else None,
        "target_reward": target,
        "reward": request.reward,
        "schedules": rows,
        "trials": tuning,
        "request": {**request.to_json(), "schedules": list(contenders)},
        "runs": runs,
    }
    contents = dict(rounded(msgspec.to_builtins(contents)))
    contents["schedules"] = [{**one, **one.pop("quantities")} for one in contents["schedules"]]
    write_json(folder.root / "compare.json", contents)
    shown = {name: {"evaluations": _shown(one, records[name], request)} for name, one in answers.items() if one is not None}
    folder.write_page(
        f"Schedules compared: {request.config.environment.kind}",
        sections(request, target, rows, runs, tuning),
        planned,
        shown,
    )
    return Compared(contents, findings(rows, target, request.reward))


def _shown(answered: Sequence[Answered], records: RunRecords, request: ComparisonRequest) -> list[dict[str, Any]]:
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
            "problems": request.held_out,
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

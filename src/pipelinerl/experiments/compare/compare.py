"""`pipelinerl lab compare`: a sweep over schedules and seeds, each schedule with its best settings, and its analysis.

trials of each schedule ─▶ seed 0: a, b, c ─▶ seed 1: b, c, a ─▶ ... ─▶ compare.json, report.html
(the fastest settings)     (one run at a time, then its weights answer held-out problems; finished runs are not repeated)

A training reward belongs to the weights that sampled the rollout, which are older by the schedule's lag. So schedules are
compared by held-out rewards of a run's versions, measured after the run, with the same versions, problems and random numbers
for every schedule. They are records in the run's `evaluations.jsonl`.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.results import RunResult, findings, row, run_result, sections, target_reward
from pipelinerl.experiments.compare.settings import (
    CONVENTIONAL,
    PIPELINE,
    ComparisonRequest,
    Contender,
    Settings,
    TuningResult,
    tune,
)
from pipelinerl.experiments.runs import Command, Execution, Folder, PlannedRun, Setting, planned_runs, run_commands
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report import number, write_file, write_json
from pipelinerl.report.series import rates_after, read_run
from pipelinerl.resources.roles import process_environment
from pipelinerl.run_directory import RunDirectory

WORTH_A_PROCESS = 100
"""Attempts that take as long as a process takes to load the model."""

Answers = Mapping[int, Sequence[EvaluatedProblem]]
"""The answers of each version of a run's weights to the held-out problems."""


def compare(
    request: ComparisonRequest,
    out: Path,
    *,
    train: Callable[[RunConfig], object],
    answer: Callable[[Path, ComparisonRequest], Answers],
    target: float | None = None,
    say: Callable[[str], object] = print,
) -> list[str]:
    """Make the runs of `request` that `out` lacks, write the results there, and return what they show, in sentences.

    `train` executes one run. `answer` then has its weights answer the held-out problems. `target` None: it is chosen from
    the runs. `say` receives lines on the progress. Raises ConfigError if a schedule does not go with the run file,
    RunDirectoryError if `out` belongs to another comparison or can't be used, RunInterruptedError, and PipelineRLError if a
    trial or, once all others have ended, a run failed. A run that diverges is a result.
    """
    if request.held_out:
        _check_held_out(request)
    engine, trainer = request.config.engine, request.config.trainer
    start = Settings(engine.processes, engine.slots, trainer.ranks)
    for contender in request.schedules:  # before anything is run
        try:
            request.run_config(contender, start, steps=request.steps)
        except ConfigError as error:
            raise ConfigError(f"{contender.label}: {error}") from error
    folder = Folder(out, train)

    def ended(run: PlannedRun, execution: Execution) -> str:
        """Have the weights of a run answer the held-out problems, unless they have."""
        path, text = out / run.name, ""
        if request.held_out and execution.finished:
            found = read_records(RunDirectory(path).evaluations, EvaluationRecord)
            last = (found or _record(path, answer(path, request)))[-1]
            text = f", held-out reward {number(last.reward_mean, '.3f')} of version {last.version}"
        shutil.rmtree(path / WEIGHTS_FOLDER, ignore_errors=True)
        return text

    with folder.claimed(request.to_json(), "comparison"):
        tuning = {one.label: _tuned(request, one, start, folder, say) for one in request.schedules}
        every = request.evaluate_every if request.held_out else 0
        settings = [
            Setting(
                one.label,
                one.folder,
                request.run_config(one, tuning[one.label].used, steps=request.steps, weights_every=every),
            )
            for one in request.schedules
        ]
        runs = planned_runs(settings, request.seed_numbers)
        failure = folder.execute_all(runs, say, ended)
    if failure is not None:
        raise failure
    runs.sort(key=lambda run: (settings.index(run.setting), run.seed))
    return _write_results(request, folder, runs, tuning, target)


def _tuned(
    request: ComparisonRequest, contender: Contender, start: Settings, folder: Folder, say: Callable[[str], object]
) -> TuningResult:
    """The fastest settings of one schedule, found by trials; without tuning, the run file's settings."""
    if not request.tune:
        return TuningResult(start)
    short, fill = request.trial_length(contender)

    def measure(settings: Settings, full: bool) -> float | None:
        """Sampled tokens/s after the first steps."""
        steps, uncounted = (request.steps, request.steps // 5) if full else (short, fill)
        name = re.sub(r"\W+", "-", f"{contender.label}, {settings.label}, {steps} steps")
        config = request.run_config(contender, settings, steps=steps)
        run = PlannedRun(Setting(contender.label, f"trials/{name}", config), config.seed)
        folder.execute(run)
        path = folder.root / run.name
        for part in ("rollouts", "checkpoints", "streams"):  # the rate needs only the steps
            shutil.rmtree(path / part, ignore_errors=True)
        records = read_records(RunDirectory(path).metrics, StepRecord)
        rates = rates_after(records, uncounted) if records else None
        rate = rates[1] if rates else None
        say(f"tried {contender.label}: {settings.label}, {steps} steps: {number(rate, '.0f')} tokens/s")
        return rate

    config, cores = request.config, request.machine.cores
    processes = (*powers_of_two(cores - 1), cores) if config.engine.device == "cpu" else ()
    alone = contender.kind == CONVENTIONAL and config.trainer.device == "cpu"  # while it trains, nothing generates
    sharded_reference = config.model.lora is not None and config.trainer.kl_coefficient > 0
    ranks = (cores,) if alone and not sharded_reference else ()
    in_a_round = math.inf if contender.kind == PIPELINE else config.trainer.batch_size * contender.steps_per_round
    return tune(start, measure, processes=processes, most_slots=in_a_round, ranks=ranks, finals=not request.quick)


def _write_results(
    request: ComparisonRequest,
    folder: Folder,
    runs: Sequence[PlannedRun],
    tuning: Mapping[str, TuningResult],
    target: float | None,
) -> list[str]:
    """Read the runs and write all results. Returns the findings. Raises RunDirectoryError for records that can't be read."""
    records = {run.name: read_run(folder.root / run.name) for run in runs}

    def results(goal: float | None) -> list[RunResult]:
        return [
            run_result(
                records[run.name],
                run.setting.label,
                tuning[run.setting.label].used,
                folder.executions[run.name],
                goal,
            )
            for run in runs
        ]

    target = target_reward(results(None)) if target is None else target
    found = results(target)
    rows = [row(found, one.label) for one in request.schedules]
    pipeline = next((one for one in rows if one.schedule == PIPELINE), None)
    contents: dict[str, Any] = {
        "ratio_time_to_reward": pipeline.ratio_time_to_reward if pipeline else None,
        "ratio_samples_per_s": pipeline.ratio_samples_per_s if pipeline else None,
        "target_reward": target,
        "schedules": rows,
        "trials": tuning,
        "request": request.to_json(),
        "runs": found,
    }
    write_json(folder.root / "compare.json", contents)
    title = f"Schedules compared: {request.config.environment.kind}"
    folder.write_page(title, sections(request, target, rows), runs)
    return findings(rows, target)


# ---- held-out problems


def _check_held_out(request: ComparisonRequest) -> None:
    """Raise ConfigError if there are no held-out problems. Errors of the environment are raised."""
    config = request.config
    args = config.environment.args | request.held_out_args
    environment = make_environment(config.environment.kind, args, load_tokenizer(config.model), config.seed)
    if not environment.held_out(1):
        raise ConfigError(
            f"environment {config.environment.kind} has no held-out problems: define `held_out`, or give --held-out 0 to "
            "compare rates only"
        )


def answer_held_out(run_dir: Path, request: ComparisonRequest) -> Answers:
    """Have every version of `request.evaluated_versions` answer the held-out problems, by `pipelinerl eval`.

    The temperature is the run file's `evaluation.temperature`. On CPUs the versions are distributed over one process per
    core, each with at least `WORTH_A_PROCESS` attempts. Raises PipelineRLError if an evaluation fails, RunInterruptedError.
    """
    versions, config = request.evaluated_versions, request.config
    flags = ["--problems", str(request.held_out), "--attempts", "1"]
    if request.held_out_args:
        args = config.environment.args | request.held_out_args
        flags.append(f"--environment.args={msgspec.json.encode(args).decode()}")
    processes, environment = 1, {}
    if config.engine.device == "cpu":
        flags += ["--engine.threads", "1"]
        environment = process_environment("generation", 1)
        processes = min(len(versions), request.machine.cores, 1 + len(versions) * request.held_out // WORTH_A_PROCESS)
    answers: dict[int, list[EvaluatedProblem]] = {}
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".held-out-") as scratch:
        outs = [Path(scratch) / str(number) for number in range(processes)]
        commands = []
        for place, out in enumerate(outs):
            models = [f"{run_dir}@{version}" for version in versions[place::processes]]
            arguments = ["eval", *models, *flags, "--out", str(out)]
            commands.append(Command(arguments, out.with_suffix(".log"), environment))
        run_commands(commands)
        for out in outs:
            for model in msgspec.json.decode((out / "summary.json").read_bytes())["models"]:
                answers[model["version"]] = read_lines(out / model["folder"] / "attempts.jsonl", EvaluatedProblem)
    return answers


def _record(run_dir: Path, answers: Answers) -> list[EvaluationRecord]:
    """Write the run's evaluations, which are returned, each at the time at which the trainer finished its version."""
    run = read_run(run_dir)
    times = {0: run.begin_s} | {step.version: step.time_s for step in run.steps}
    evaluations = [
        EvaluationRecord.of(problems, when="online", version=version, time_s=times[version])
        for version, problems in sorted(answers.items())
    ]
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in evaluations)
    write_file(RunDirectory(run_dir).evaluations, lines)
    return evaluations

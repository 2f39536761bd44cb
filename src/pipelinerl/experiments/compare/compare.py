"""`pipelinerl lab compare`: a sweep over schedules and seeds, each schedule with its best settings, and its analysis.

trials of each schedule ─▶ seed 0: a, b, c ─▶ seed 1: b, c, a ─▶ ... ─▶ compare.json, report.html
(the fastest settings)     (one run at a time, then its weights answer held-out problems; finished runs are not repeated)

Settings are found in this order: engine processes on the cores ─▶ slots ─▶ the trainer's ranks ─▶ one engine process or
several, by runs of full length.

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
from msgspec.structs import replace

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.schema import RunConfig, ScheduleConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.limit import costs_of
from pipelinerl.experiments.compare.results import (
    CONVENTIONAL,
    PIPELINE,
    Settings,
    findings,
    limit_of,
    row,
    run_result,
    sections,
    target_reward,
)
from pipelinerl.experiments.runs import Command, Execution, Folder, PlannedRun, Setting, bare, planned_runs, run_commands
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report import count, number, write_file, write_json
from pipelinerl.report.series import name_of, rates_after, read_run
from pipelinerl.resources.machine import Machine
from pipelinerl.resources.roles import process_environment
from pipelinerl.run_directory import RunDirectory

EVALUATIONS = 16
"""Default number of versions of each run that answer the held-out problems, besides the initial weights."""
MARGIN = 0.02
"""A setting must be faster by this share to replace one closer to the run file, because rates of short runs vary."""
WORTH_A_PROCESS = 100
"""Attempts that take as long as a process takes to load the model."""

Answers = Mapping[int, Sequence[EvaluatedProblem]]
"""The answers of each version of a run's weights to the held-out problems."""


# ---- what determines the runs


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the runs. Runs that were made for an equal request are reused.

    config             the run file, resolved and without its run_dir
    steps              optimizer steps of every run: whole rounds of every schedule
    held_out           held-out problems that decide when a reward is reached; 0: only rates are compared
    evaluate_every     optimizer steps between the versions that answer them
    held_out_args      overrides of environment arguments while they are answered
    """

    config: RunConfig
    schedules: tuple[ScheduleConfig, ...]
    seeds: int
    steps: int
    quick: bool
    tune: bool
    machine: Machine
    held_out: int
    evaluate_every: int
    held_out_args: dict[str, Any]

    @property
    def evaluated_versions(self) -> list[int]:
        """The versions of every run that answer the held-out problems: the same for all schedules."""
        return [*range(0, self.steps, self.evaluate_every), self.steps] if self.held_out else []

    def run_config(self, schedule: ScheduleConfig, settings: Settings, *, steps: int, weights_every: int = 0) -> RunConfig:
        """The run file of one run: `config` with the schedule, its settings, and nothing else that takes time.

        Evaluation and checkpoints are off, because they would interrupt the schedules to different degrees. Copies of the
        weights every `weights_every` steps (0: none) cost all schedules the same. Raises ConfigError if the schedule is
        incompatible with the rest of `config`.
        """
        engine = {"processes": settings.processes, "slots": settings.slots}
        return bare(
            self.config,
            trainer={"ranks": settings.ranks, "steps": steps, "weights_every": weights_every},
            engine=self.config.engine.model_copy(update=engine),
            schedule=schedule,
        )


def parse_schedules(text: str, base: ScheduleConfig) -> tuple[ScheduleConfig, ...]:
    """Parse `pipeline,conventional:4,async:2`. A pipeline has the lag bound of `base`.

    Raises ConfigError that names the invalid part.
    """
    found: list[ScheduleConfig] = []
    for part in map(str.strip, text.split(",")):
        if not re.fullmatch(r"pipeline|(conventional|async):[1-9][0-9]*", part):
            raise ConfigError(
                f"--schedules: {part!r} is not a schedule; write pipeline, conventional:G or async:G (G optimizer steps a "
                "round, e.g. conventional:4), with commas between"
            )
        kind, _, rounds = part.partition(":")
        max_lag = base.max_lag if kind == PIPELINE else None
        found.append(base.model_copy(update={"kind": kind, "steps_per_round": int(rounds or 1), "max_lag": max_lag}))
    if any(schedule in found[:place] for place, schedule in enumerate(found)):
        raise ConfigError(f"--schedules {text}: list each schedule once")
    return tuple(found)


def make_request(
    config: RunConfig,
    machine: Machine,
    *,
    schedules: str | None = None,
    seeds: int | None = None,
    quick: bool = False,
    tune: bool = True,
    held_out: int | None = None,
    evaluate_every: int | None = None,
    held_out_args: Mapping[str, Any] | None = None,
) -> ComparisonRequest:
    """A request; None takes a default, which for some depends on `quick`.

    The steps are those of the run file (at most 48 if `quick`), rounded down to whole rounds of every schedule: a round that
    is cut short has generated samples that are never trained on, which would count against its schedule. Raises ConfigError.
    """
    usual = "pipeline,conventional:2,conventional:4" if quick else "pipeline,conventional:4,conventional:8"
    compared = parse_schedules(usual if schedules is None else schedules, config.schedule)
    if config.launch.kind != "processes":
        raise ConfigError("launch.kind: compare runs each stage in a separate process; set it to processes")
    steps = min(config.trainer.steps, 48) if quick else config.trainer.steps
    common = math.lcm(*(schedule.steps_per_round for schedule in compared))
    if steps < common:
        raise ConfigError(
            f"trainer.steps: {steps} steps are too few for whole rounds of every schedule; set it to a multiple of {common}"
        )
    steps -= steps % common
    return ComparisonRequest(
        config=config.model_copy(update={"run_dir": None}),
        schedules=compared,
        seeds=seeds or (1 if quick else 2),
        steps=steps,
        quick=quick,
        tune=tune,
        machine=machine,
        held_out=(256 if quick else 512) if held_out is None else held_out,
        evaluate_every=evaluate_every or -(-steps // EVALUATIONS),
        held_out_args=dict(held_out_args or {}),
    )


# ---- the runs


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
    engine, trainer, task = request.config.engine, request.config.trainer, request.config.environment
    if request.held_out:
        args, tokenizer = task.args | request.held_out_args, load_tokenizer(request.config.model)
        if not make_environment(task.kind, args, tokenizer, request.config.seed).held_out(1):
            raise ConfigError(
                f"environment {task.kind} has no held-out problems: define `held_out`, or give --held-out 0 to compare "
                "rates only"
            )
    start = Settings(engine.processes, engine.slots, trainer.ranks)
    for schedule in request.schedules:  # before anything is run
        try:
            request.run_config(schedule, start, steps=request.steps)
        except ConfigError as error:
            raise ConfigError(f"{name_of(schedule)}: {error}") from error
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

    encoded = msgspec.to_builtins(request, enc_hook=lambda config: config.model_dump(mode="json"))
    with folder.claimed(encoded, "comparison"):
        tuned = {name_of(one): _tuned(request, one, start, folder, say) for one in request.schedules}
        settings = [
            Setting(
                name_of(one),
                name_of(one).replace(":", "-"),
                request.run_config(
                    one,
                    tuned[name_of(one)][0],
                    steps=request.steps,
                    weights_every=request.evaluate_every if request.held_out else 0,
                ),
            )
            for one in request.schedules
        ]
        runs = planned_runs(settings, [request.config.seed + number for number in range(request.seeds)])
        failure = folder.execute_all(runs, say, ended)
    if failure is not None:
        raise failure
    runs.sort(key=lambda run: (settings.index(run.setting), run.seed))
    records = {run.name: read_run(out / run.name) for run in runs}
    used = {label: settings for label, (settings, _) in tuned.items()}

    if target is None:
        target = target_reward((run.setting.label, records[run.name].evaluations) for run in runs)
    costs = {run.seed: costs_of(records[run.name]) for run in runs if run.setting.label == PIPELINE}
    found = [
        run_result(
            records[run.name],
            run.setting.label,
            used[run.setting.label],
            folder.executions[run.name],
            target,
            costs=costs.get(run.seed),
            cores=request.machine.cores,
        )
        for run in runs
    ]
    rows, limit = [row(found, label) for label in used], limit_of(found)
    pipeline = next((one for one in rows if one.schedule == PIPELINE), None)
    contents: dict[str, Any] = {
        "ratio_time_to_reward": pipeline.ratio_time_to_reward if pipeline else None,
        "ratio_samples_per_s": pipeline.ratio_samples_per_s if pipeline else None,
        "limit": limit,
        "target_reward": target,
        "schedules": rows,
        "trials": {label: trials for label, (_, trials) in tuned.items()},
        "request": encoded,
        "runs": found,
    }
    write_json(out / "compare.json", contents)
    config, machine = request.config, request.machine
    lead = (
        f"{config.environment.kind} with model {config.model.path}: {request.steps} optimizer steps of "
        f"{config.trainer.batch_size} rollouts per run, {count(request.seeds, 'seed')}. Runs were made one at a time, "
        f"each from the same weights and with the whole machine: {machine.cpu}, {count(machine.cores, 'core')}, "
        f"{machine.system}, {', '.join(f'{name} {version}' for name, version in machine.versions.items())}."
    )
    folder.write_page(f"Schedules compared: {config.environment.kind}", sections(lead, target, rows, limit), runs)
    return findings(rows, target, limit)


# ---- the fastest settings of a schedule


class TuningTrial(msgspec.Struct, frozen=True):
    """Settings that were tried. `tokens_per_s` is None if the run was too short. `full`: at full run length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


def trial_length(schedule: ScheduleConfig, *, quick: bool) -> tuple[int, int]:
    """(steps of a trial, initial steps that do not count because the pipeline fills: a third), in whole rounds."""
    steps, rounds = 8 if quick else 16, schedule.steps_per_round
    fill = -(-steps // (3 * rounds)) * rounds
    return max(-(-steps // rounds) * rounds, fill + rounds), fill


def _tuned(
    request: ComparisonRequest, schedule: ScheduleConfig, start: Settings, folder: Folder, say: Callable[[str], object]
) -> tuple[Settings, list[TuningTrial]]:
    """The fastest settings of one schedule, and the trials that found them; without tuning, the run file's settings."""
    if not request.tune:
        return start, []
    label, (short, fill) = name_of(schedule), trial_length(schedule, quick=request.quick)

    def measure(settings: Settings, full: bool) -> float | None:
        """Sampled tokens/s after the first steps."""
        steps, uncounted = (request.steps, request.steps // 5) if full else (short, fill)
        name = re.sub(r"\W+", "-", f"{label}, {settings.label}, {steps} steps")
        config = request.run_config(schedule, settings, steps=steps)
        run = PlannedRun(Setting(label, f"trials/{name}", config), config.seed)
        folder.execute(run)
        path = folder.root / run.name
        for part in ("rollouts", "checkpoints", "streams"):  # the rate needs only the steps
            shutil.rmtree(path / part, ignore_errors=True)
        records = read_records(RunDirectory(path).metrics, StepRecord)
        rates = rates_after(records, uncounted) if records else None
        rate = rates[1] if rates else None
        say(f"tried {label}: {settings.label}, {steps} steps: {number(rate, '.0f')} tokens/s")
        return rate

    config, cores = request.config, request.machine.cores
    processes = (*powers_of_two(cores - 1), cores) if config.engine.device == "cpu" else ()
    alone = schedule.kind == CONVENTIONAL and config.trainer.device == "cpu"  # while it trains, nothing generates
    sharded_reference = config.model.lora is not None and config.trainer.kl_coefficient > 0
    ranks = (cores,) if alone and not sharded_reference else ()
    in_a_round = math.inf if schedule.kind == PIPELINE else config.trainer.batch_size * schedule.steps_per_round
    return tune(start, measure, processes=processes, most_slots=in_a_round, ranks=ranks, finals=not request.quick)


def tune(
    start: Settings,
    measure: Callable[[Settings, bool], float | None],
    *,
    processes: Sequence[int],
    most_slots: float,
    ranks: Sequence[int] = (),
    finals: bool,
) -> tuple[Settings, list[TuningTrial]]:
    """The fastest settings, and all trials in order. Nothing is measured twice; a rate of None counts as the slowest.

    Tries these numbers of engine `processes`, then twice as many slots, unless these are more than `most_slots` in all, and
    then these numbers of the trainer's `ranks`.
    `measure` returns the rate of some settings in a run: a short one, or one of full length if its second argument is True.
    With `finals`, runs of full length decide between one engine process and several with as many slots in all: short runs
    can't, because the trainer's share of the work shrinks as the model learns and more groups are solved by all attempts.
    """
    trials: list[TuningTrial] = []

    def over(settings: Settings, number: int) -> Settings:
        """The same total number of slots, spread over `number` engines."""
        return replace(settings, processes=number, slots=-(-settings.processes * settings.slots // number))

    def fastest(candidates: Sequence[Settings], *, full: bool = False) -> Settings:
        """The first, unless another is faster by MARGIN."""
        tried = {trial.settings: trial.tokens_per_s for trial in trials if trial.full == full}
        for settings in candidates:
            if settings not in tried:
                tried[settings] = measure(settings, full)
                trials.append(TuningTrial(settings, tried[settings], full))
        best = max(candidates, key=lambda settings: tried[settings] or 0.0)
        return best if (tried[best] or 0.0) > (1 + MARGIN) * (tried[candidates[0]] or 0.0) else candidates[0]

    best = fastest([start, *(over(start, number) for number in processes)])
    if 2 * best.processes * best.slots <= most_slots:
        best = fastest([best, replace(best, slots=2 * best.slots)])
    best = fastest([best, *(replace(best, ranks=number) for number in ranks)])
    others = [trial for trial in trials if trial.settings.processes != best.processes]
    if finals and others:
        other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
        best = fastest([best, over(best, other.processes)], full=True)
    return best, trials


# ---- held-out problems


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
        environment = process_environment(1)
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

"""`pipelinerl compare`: finds the best settings of each schedule, runs every schedule on every seed, and writes the results.

trials of each schedule ─▶ seed 0: a, b, c ─▶ seed 1: b, c, a ─▶ ... ─▶ compare.json, PNGs, report.html
(the fastest settings)     (one run at a time, then its weights answer held-out problems; finished runs are not repeated)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, RunInterruptedError
from pipelinerl.experiments.compare.contenders import PIPELINE, Contender, run_config
from pipelinerl.experiments.compare.folder import Execution, Folder, remove_bulk, remove_weights
from pipelinerl.experiments.compare.held_out import Answered, read_answers, write_answers
from pipelinerl.experiments.compare.output import PlannedRun, write_results
from pipelinerl.experiments.compare.page import TuningResult
from pipelinerl.experiments.compare.request import Request, claim_folder
from pipelinerl.experiments.compare.settings import Settings, Trial, axes, decide, finalists, search, settings_of
from pipelinerl.metrics.records import METRICS_FILE, StepRecord, read_records
from pipelinerl.report.series import tokens_rate_after


def compare(
    request: Request,
    out: Path,
    *,
    train: Callable[[RunConfig], object],
    evaluate: Callable[[Path, Request], Sequence[Answered]],
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
    claim_folder(out, request)
    session = _Session(request, Folder(out, train), evaluate, say)
    try:
        tried = {contender.label: session.tune(contender) for contender in request.schedules}
        planned = plan_runs(request)
        executions = {
            run: session.run(run, tried[run.contender.label].used, f"[{number}/{len(planned)}]")
            for number, run in enumerate(planned, start=1)
        }
    except RunInterruptedError as stopped:
        raise RunInterruptedError(f"stopped; to continue, run the same command with --out {out}") from stopped
    return write_results(request, out, tried, executions, target)


def plan_runs(request: Request) -> list[PlannedRun]:
    """All runs in order. The order of schedules rotates from seed to seed, so that none is always first."""
    runs: list[PlannedRun] = []
    for number, seed in enumerate(request.seed_numbers):
        first = number % len(request.schedules)
        order = (*request.schedules[first:], *request.schedules[:first])
        runs += [PlannedRun(f"runs/seed-{seed}/{_folder_name(one)}", one, seed) for one in order]
    return runs


def trial_length(trial_steps: int, contender: Contender) -> tuple[int, int]:
    """(steps of a trial, initial steps that do not count because the pipeline fills: a third). Both are whole rounds."""
    rounds = contender.steps_per_round
    fill = -(-trial_steps // (3 * rounds)) * rounds
    return max(-(-trial_steps // rounds) * rounds, fill + rounds), fill


@dataclass(frozen=True)
class _Session:
    """The state of one call of `compare`."""

    request: Request
    folder: Folder
    evaluate: Callable[[Path, Request], Sequence[Answered]]
    say: Callable[[str], object]

    def tune(self, contender: Contender) -> TuningResult:
        """The fastest settings of one schedule, found by trials; without tuning, the run file's settings."""
        request = self.request
        start = start_settings(request, contender)
        if not request.tune:
            return TuningResult(start, [])
        bound = None if contender.kind == PIPELINE else request.config.trainer.batch_size * contender.steps_per_round
        cores, factors = request.machine.cores, request.slot_factors
        search_axes = axes(request.config, cores=cores, most_in_progress=bound, slot_factors=factors)
        length, fill = trial_length(request.trial_steps, contender)
        best, tried = search(start, search_axes, lambda settings: self._rate(contender, settings, length, fill))
        candidates = finalists(best, tried) if request.finals else []
        if len(candidates) > 1:
            finals = [
                Trial(one, self._rate(contender, one, request.steps, request.steps // 5, "full-"), full=True)
                for one in candidates
            ]
            best, tried = decide(finals), [*tried, *finals]
        return TuningResult(best, tried)

    def run(self, planned: PlannedRun, settings: Settings, progress: str) -> Execution:
        """Execute one run and its evaluation, unless they are done."""
        request, path = self.request, self.folder.path(planned.name)
        execution = self.folder.done(planned.name)
        if execution is None:
            config = run_config(
                request.config,
                planned.contender,
                settings,
                seed=planned.seed,
                steps=request.steps,
                run_dir=path,
                weights_every=request.evaluate_every if request.held_out else 0,
            )
            execution = self.folder.execute(planned.name, config)
        steps = read_records(path / METRICS_FILE, StepRecord)
        outcome = (
            f"{sum(step.samples for step in steps)} rollouts, {steps[-1].time_s:.0f} s with start-up" if steps else "no step"
        )
        self.say(f"{progress} {planned.contender.label}, seed {planned.seed}: {execution.status}, {outcome}")
        if request.held_out and execution.finished and not read_answers(path):
            write_answers(path, self.evaluate(path, request))
            last = read_answers(path)[-1]
            interval = f"{last.reward:.3f} ({last.low:.3f} to {last.high:.3f})"
            self.say(f"{progress} held-out reward of version {last.version}: {interval}")
        remove_weights(path)
        return execution

    def _rate(self, contender: Contender, settings: Settings, length: int, fill: int, kind: str = "") -> float | None:
        """Sampled tokens/s of a run of `length` steps after the first `fill`. Executes the run unless it is done."""
        request, name = self.request, f"trials/{_folder_name(contender)}/{kind}{settings.folder}"
        path = self.folder.path(name)
        if self.folder.done(name) is None:
            seed = request.config.seed
            config = run_config(request.config, contender, settings, seed=seed, steps=length, run_dir=path)
            self.folder.execute(name, config)
            remove_bulk(path)
        steps = read_records(path / METRICS_FILE, StepRecord)
        rate = tokens_rate_after(steps, fill) if steps else None
        rate_text = "-" if rate is None else f"{rate:.0f}"
        self.say(f"tried {contender.label}: {settings.label}, {length} steps: {rate_text} tokens/s")
        return rate


def start_settings(request: Request, contender: Contender) -> Settings:
    """The run file's settings, with defaults resolved for this schedule."""
    schedule = request.config.schedule.model_copy(update={"kind": contender.kind})
    return settings_of(request.config.model_copy(update={"schedule": schedule}), request.machine.cores)


def _check(request: Request, contender: Contender) -> None:
    """Raise ConfigError if a schedule is incompatible with the run file, before anything is run."""
    settings = start_settings(request, contender)
    try:
        run_config(request.config, contender, settings, seed=0, steps=request.steps, run_dir=Path("checked"))
    except ConfigError as error:
        raise ConfigError(f"{contender.label}: {error}") from error


def _folder_name(contender: Contender) -> str:
    return contender.label.replace(":", "-")

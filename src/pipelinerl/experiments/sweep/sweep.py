"""The runs of a sweep: each is `pipelinerl train` in a process of its own, one after another.

OUT/request.json                      the grid
OUT/02-learning_rate=3e-4/seed-0/     a run directory for each setting and seed
OUT/02-learning_rate=3e-4/seed-0.log  the output of its command; `.yaml`: its run file
OUT/sweep.json                        the results so far, written after each run
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pipelinerl.child import ChildProcess
from pipelinerl.config.load import config_to_yaml
from pipelinerl.errors import INVALID_DATA, RunDirectoryError, RunInterruptedError, TrainingDivergedError, UserError
from pipelinerl.experiments.compare.request import claim_folder
from pipelinerl.experiments.compare.runs import clear_run
from pipelinerl.experiments.sweep.grid import Grid, PlannedRun
from pipelinerl.experiments.sweep.results import DIVERGED, FAILED, WAITING, Results, RunResult, results
from pipelinerl.launch.checks import check_without_running
from pipelinerl.launch.interrupts import Interrupts, counted_interrupts
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.summary import FINISHED, finished_summary
from pipelinerl.launch.trial import try_environment
from pipelinerl.report import number, write_json, writing_to

RESULTS_FILE = "sweep.json"
POLL_S = 0.1
STOP_S = 180.0
"""Time for a run to write a checkpoint and end."""


def sweep(grid: Grid, out: Path, say: Callable[[str], object]) -> Results:
    """Make the runs of `grid` that `out` lacks. Unfinished runs go on from their checkpoints.

    A run that fails is a result, and the others follow; the next call tries it again, unless it diverged. Raises UserError
    before any run starts if a setting can't be run, RunDirectoryError if `out` has another sweep, and RunInterruptedError.
    """
    done = {run.name: _result(run, grid, out) for run in grid.runs} | _diverged(out)
    left = [run for run in grid.runs if done[run.name].status == WAITING]
    _check(left, out)
    claim_folder(out, grid.to_json(), "sweep")

    def write() -> Results:
        by_setting = {one.folder: [done[PlannedRun(one, seed).name] for seed in grid.seeds] for one in grid.settings}
        found = results(grid, by_setting)
        write_json(out / RESULTS_FILE, found)
        return found

    begun_s = time.monotonic()
    with counted_interrupts() as interrupts:
        for place, run in enumerate(left, start=1):
            number_of_all = len(grid.runs) - len(left) + place
            say(f"[{number_of_all}/{len(grid.runs)}] {run.setting.label}, seed {run.seed}: {out / run.name}")
            failure = _train(run, out, interrupts)
            ended = _result(run, grid, out)
            done[run.name] = msgspec.structs.replace(ended, status=failure) if failure else ended
            write()
            more, each_s = len(left) - place, (time.monotonic() - begun_s) / place
            rest = f"; about {each_s * more / 60:.0f} min for the other {more}" if more else ""
            said = failure or f"{ended.status}, {grid.reward} reward {number(ended.reward, '.3f')}"
            say(f"  {said}{rest}")
    return write()


def _result(run: PlannedRun, grid: Grid, out: Path) -> RunResult:
    """What a run has left in its directory."""
    summary = finished_summary(RunDirectory(out / run.name))
    if summary is None:
        return RunResult(folder=run.name, seed=run.seed)
    reward = summary["eval_reward_after" if grid.reward == "held-out" else "reward_last"]
    training = summary["reward_last"]
    return RunResult(folder=run.name, seed=run.seed, status=FINISHED, reward=reward, training_reward=training)


def _diverged(out: Path) -> dict[str, RunResult]:
    """The runs that diverged in an earlier call: they would again. Raises RunDirectoryError."""
    path = out / RESULTS_FILE
    try:
        before = msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        return {}
    except (OSError, *INVALID_DATA) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; choose another --out") from error
    runs = [run for setting in before.settings for run in setting.runs]
    return {run.folder: run for run in runs if run.status.startswith(DIVERGED)}


def _check(runs: Iterable[PlannedRun], out: Path) -> None:
    """Check what a run checks before its start, and try each environment once. Raises UserError that names the setting."""
    tried: set[str] = set()
    for setting in {run.setting.number: run.setting for run in runs}.values():
        config = setting.config.model_copy(update={"run_dir": str(out)})
        used = repr((config.environment, config.model, config.actor, config.evaluation.problems))
        try:
            check_without_running(config)
            if used not in tried:
                try_environment(config)
        except UserError as error:
            raise type(error)(f"{setting.label}: {error}") from error
        tried.add(used)


def _train(run: PlannedRun, out: Path, interrupts: Interrupts) -> str | None:
    """Start a run, or let it go on, and wait for its end. Returns None, or how it failed. Raises RunInterruptedError."""
    path, config = out / run.name, run.config(out)
    if config.stream.kind == "memory":  # it can't go on
        clear_run(path)
    if (path / "config.yaml").is_file():
        arguments = ["--resume", str(path)]
    else:
        run_file = path.with_name(f"{path.name}.yaml")
        with writing_to(out):
            path.parent.mkdir(exist_ok=True)
            run_file.write_text(config_to_yaml(config, only_given=True), encoding="utf-8")
        arguments = [str(run_file)]
    log = path.with_name(f"{path.name}.log")
    with ChildProcess([sys.executable, "-m", "pipelinerl", "train", *arguments], log=log, patience_s=STOP_S) as process:
        asked = 0
        while not process.wait(POLL_S):
            if interrupts.count > asked:  # the first asks for a checkpoint, the second for the end
                asked = interrupts.count
                process.ask_to_stop()
        lines, status = process.log_lines(), process.status
    if interrupts.count or status in (RunInterruptedError.exit_status, 128 + signal.SIGTERM):
        raise RunInterruptedError(f"stopped; to continue, run the same command with --out {out}")
    if not status:
        return None
    why = next((line for line in reversed(lines) if line.startswith("error: ")), process.how_it_ended())
    kind = DIVERGED if status == TrainingDivergedError.exit_status else FAILED
    return f"{kind}: {why.removeprefix('error: ')} ({log})"

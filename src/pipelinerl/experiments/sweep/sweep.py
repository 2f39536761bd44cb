"""The runs of a sweep, one after another.

OUT/02-learning_rate=3e-4/seed-0/     a run directory for each setting and seed
OUT/sweep.json                        the results so far, written after each run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pipelinerl.errors import PipelineRLError, RunInterruptedError, UserError
from pipelinerl.experiments.runs import Folder, claimed, train_in_child
from pipelinerl.experiments.sweep.grid import Grid, PlannedRun
from pipelinerl.experiments.sweep.results import FAILED, WAITING, Results, RunResult, results
from pipelinerl.launch.checks import check_without_running
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.summary import FINISHED, finished_summary
from pipelinerl.launch.trial import try_environment
from pipelinerl.report import number, write_json

RESULTS_FILE = "sweep.json"


def sweep(grid: Grid, out: Path, say: Callable[[str], object]) -> Results:
    """Make the runs of `grid` that `out` lacks. Unfinished runs go on from their checkpoints.

    A run that fails is a result, and the others follow; the next call tries it again, unless it diverged. Raises UserError
    before any run starts if a setting can't be run, RunDirectoryError if `out` has another sweep, and RunInterruptedError.
    """
    folder = Folder(out, train_in_child)
    done = {run.name: _result(run, grid, folder) for run in grid.runs}
    left = [run for run in grid.runs if done[run.name].status == WAITING]
    _check(left, out)

    def write() -> Results:
        by_setting = {one.folder: [done[PlannedRun(one, seed).name] for seed in grid.seeds] for one in grid.settings}
        found = results(grid, by_setting)
        write_json(out / RESULTS_FILE, found)
        return found

    with claimed(out, grid.to_json(), "sweep"):
        begun_s = time.monotonic()
        for place, run in enumerate(left, start=1):
            number_of_all = len(grid.runs) - len(left) + place
            say(f"[{number_of_all}/{len(grid.runs)}] {run.setting.label}, seed {run.seed}: {out / run.name}")
            try:
                folder.execute(run.name, run.config(out), resume=True)
                ended = done[run.name] = _result(run, grid, folder)
            except RunInterruptedError:
                raise
            except PipelineRLError as error:
                ended = done[run.name] = msgspec.structs.replace(done[run.name], status=f"{FAILED}: {error}")
            write()
            more, each_s = len(left) - place, (time.monotonic() - begun_s) / place
            rest = f"; about {each_s * more / 60:.0f} min for the other {more}" if more else ""
            reward = f", {grid.reward} reward {number(ended.reward, '.3f')}" if ended.status == FINISHED else ""
            say(f"  {ended.status}{reward}{rest}")
        return write()


def _result(run: PlannedRun, grid: Grid, folder: Folder) -> RunResult:
    """What a run has left in its directory."""
    summary, done = finished_summary(RunDirectory(folder.root / run.name)), folder.done(run.name)
    if summary is None:  # one that diverged would again
        return RunResult(folder=run.name, seed=run.seed, status=done.status if done else WAITING)
    reward = summary["eval_reward_after" if grid.reward == "held-out" else "reward_last"]
    training = summary["reward_last"]
    return RunResult(folder=run.name, seed=run.seed, status=FINISHED, reward=reward, training_reward=training)


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

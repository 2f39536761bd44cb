"""The folder of a comparison: which of its runs are done, how they ended, and execution of the others.

OUT/request.json                 the request
OUT/runs/seed-0/pipeline/        a run directory for each schedule and seed
OUT/trials/pipeline/p1-e1-.../   a run directory for each trial of settings, records only
OUT/executions.jsonl             a line for each executed run: how it ended, and the load average before it
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config import RunConfig
from pipelinerl.errors import RunDirectoryError, TrainingDivergedError
from pipelinerl.experiments.compare.request import load_average
from pipelinerl.files import JsonLines, read_json_lines
from pipelinerl.launch.outcome import FINISHED
from pipelinerl.launch.run_directory import RunDirectory, RunLock

DIVERGED = "diverged"


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was not interrupted. `status` is "finished" or "diverged: REASON"."""

    run: str
    status: str
    began: str
    load_before: float | None

    @property
    def finished(self) -> bool:
        return self.status == FINISHED


class Folder:
    """Runs of one comparison, identified by name. A name contains everything in which runs of a request differ."""

    def __init__(self, root: Path, train: Callable[[RunConfig], object]) -> None:
        """`train` executes a run in `config.run_dir`. Raises RunDirectoryError if `executions.jsonl` is damaged."""
        self.root = root
        self._train = train
        self._log = root / "executions.jsonl"
        self._done = {execution.run: execution for execution in _read_log(self._log)}

    def path(self, name: str) -> Path:
        return self.root / name

    def done(self, name: str) -> Execution | None:
        execution = self._done.get(name)
        return execution if execution and self.path(name).is_dir() else None

    def execute(self, name: str, config: RunConfig) -> Execution:
        """Execute the run `name` from the start, and delete any incomplete run of that name.

        A run that diverges is a result. Any other error that ends the run is raised.
        """
        _clear(self.path(name))
        began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
        status = FINISHED
        with (self.root / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            try:
                self._train(config)
            except TrainingDivergedError as error:
                status = f"{DIVERGED}: {error}"
        execution = Execution(run=name, status=status, began=began, load_before=load)
        with contextlib.closing(JsonLines(self._log)) as lines:
            lines.write(execution)
        self._done[name] = execution
        return execution


def _read_log(path: Path) -> list[Execution]:
    try:
        return read_json_lines(path, Execution)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; choose another --out") from error


def remove_bulk(run_dir: Path) -> None:
    """Remove the parts of a trial that its rate does not need: rollouts, checkpoints, streams."""
    for part in ("rollouts", "checkpoints", "streams"):
        shutil.rmtree(run_dir / part, ignore_errors=True)


def remove_weights(run_dir: Path) -> None:
    """Remove the copies of a run's weights, which are not needed after the evaluation."""
    shutil.rmtree(run_dir / WEIGHTS_FOLDER, ignore_errors=True)


def _clear(path: Path) -> None:
    """Remove an incomplete run. Waits for its last processes to exit; raises RunDirectoryError if it is still running."""
    if not path.is_dir():
        return
    lock = RunLock(RunDirectory(path))
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise RunDirectoryError(f"can't remove the unfinished run {path}: {error.strerror}") from error
    finally:
        lock.release()

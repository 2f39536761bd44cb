"""A run's folder: made once, used by one run at a time."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError

ORPHAN_PATIENCE_S = 30.0
"""How long the processes of a run may take to end by themselves once their launcher is gone."""


@dataclass(frozen=True)
class RunDirectory:
    """Where everything of a run lies."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def evaluation(self, name: str) -> Path:
        """The answers of the evaluation `before` or `after` training, or `v20`: the one that began at version 20."""
        return self.rollouts / f"evaluation-{name}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def plan(self) -> Path:
        """Where the session that is running, or ran last, started from. Written by this package alone."""
        return self.control / "plan.json"

    @property
    def admission(self) -> Path:
        """What the generation processes of the session that is running share (see `actor/admission.py`)."""
        return self.control / "admission"

    def ready_file(self, role: str) -> Path:
        """Where an engine server of the session that is running says its address."""
        return self.control / f"{role}.ready.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def make_folders(self) -> None:
        for folder in (self.root, self.rollouts, self.checkpoints, self.streams, self.control, self.logs):
            folder.mkdir(parents=True, exist_ok=True)


class RunLock:
    """A run directory, held until `release`, or until this process and all that inherited `fd` have ended, however."""

    def __init__(self, run: RunDirectory) -> None:
        """Raises RunDirectoryError if another run holds it. Processes whose launcher was killed are waited for."""
        self.run = run
        self.fd = os.open(run.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + ORPHAN_PATIENCE_S + 5.0
        while not self._try():
            if self._holder_lives() or time.monotonic() > deadline_s:
                os.close(self.fd)
                raise RunDirectoryError(f"{run.root} is in use by another run; wait for it or choose another --run_dir")
            time.sleep(0.05)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder_lives(self) -> bool:
        """Is the launcher that took the lock there? An empty file is one that is being written: it is."""
        pid = os.pread(self.fd, 32, 0)
        if not pid.isdigit():
            return True
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def create_run_directory(config: RunConfig) -> RunLock:
    """A folder for a new run, held. What a start that never got to train left in `run_dir` is removed.

    Raises RunDirectoryError if `run_dir` holds a run, is in use or can't be written to.
    """
    with _explained():
        root = Path(config.run_dir).absolute() if config.run_dir else _fresh_directory(config)
        run = RunDirectory(root)
        run.root.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run)
        try:
            if run.config.exists():
                _forget_failed_start(run)
            run.make_folders()
        except BaseException:
            lock.release()
            raise
    return lock


def open_run_directory(root: Path) -> RunLock:
    """The folder of a run that was started before, held. Raises RunDirectoryError if it is not one, or is in use."""
    run = RunDirectory(root.absolute())
    if not run.config.is_file():
        raise RunDirectoryError(f"{root} is not a run directory (it has no config.yaml)")
    with _explained():
        lock = RunLock(run)
        run.make_folders()
    return lock


def _forget_failed_start(run: RunDirectory) -> None:
    """Remove what a run wrote before its first optimizer step. Raises RunDirectoryError if it got any further."""
    trained = run.metrics.exists() and run.metrics.stat().st_size > 0
    if trained or not run.plan.is_file():  # without a plan, it is somebody else's config.yaml
        raise RunDirectoryError(
            f"{run.root} holds a run already; continue it with --resume {run.root} or choose another --run_dir"
        )
    shutil.rmtree(run.streams, ignore_errors=True)
    for path in run.checkpoints.glob("step_*"):
        shutil.rmtree(path)
    records = (*run.root.glob("timeline-*.jsonl"), *run.rollouts.glob("*.jsonl"))
    for path in (run.evaluations, run.summary, run.config, *records, *run.control.iterdir()):
        path.unlink(missing_ok=True)


def set_aside(run: RunDirectory) -> Path:
    """Make the folder ready for a start from the beginning: records move into the folder that is returned, the rest goes."""
    with _explained():
        kept = next(path for number in itertools.count(1) if not (path := run.root / f"before-{number}").exists())
        kept.mkdir()
        records = (run.metrics, run.evaluations, run.summary, run.curves, run.rollouts, run.root / "tensorboard")
        for path in (*records, *run.root.glob("timeline-*.jsonl")):
            if path.exists():
                path.rename(kept / path.name)
        shutil.copy(run.config, kept)
        shutil.rmtree(run.streams, ignore_errors=True)
        for path in run.control.iterdir():
            path.unlink()
        run.make_folders()
    return kept


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"can't write to {error.filename}: {error.strerror}; choose a --run_dir that can be written to"
        ) from error


def _fresh_directory(config: RunConfig) -> Path:
    """A new folder `runs/<date>-<environment>-<schedule>`, with a number behind it if there is one of that name."""
    environment = Path(config.environment.kind.split(":")[0]).stem
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{environment}-{config.schedule.kind}"
    runs = Path("runs").absolute()
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count ended")

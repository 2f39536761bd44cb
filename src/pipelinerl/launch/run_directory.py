"""A run's folder: created once, used by one run at a time."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError


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

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def stream(self) -> Path:
        return self.root / "streams" / "rollouts"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"


class RunLock:
    """Holds a run directory for this process; the system lets go of it when the process ends, however it ends."""

    def __init__(self, run: RunDirectory) -> None:
        self._fd = os.open(run.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RunDirectoryError(
                f"{run.root} is in use by another run; wait for it or choose another --run_dir"
            ) from None

    def release(self) -> None:
        os.close(self._fd)


def create_run_directory(config: RunConfig) -> RunDirectory:
    """A folder for a new run. Raises RunDirectoryError if `run_dir` holds a run already or can't be created."""
    root = Path(config.run_dir) if config.run_dir else _fresh_name(config)
    run = RunDirectory(root.absolute())
    if run.config.exists():
        raise RunDirectoryError(f"{root} holds a run already; continue it with --resume {root} or choose another --run_dir")
    try:
        for folder in (run.root, run.rollouts, run.checkpoints, run.stream.parent, run.control, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"can't create {error.filename}: {error.strerror}; choose a --run_dir that can be written to"
        ) from error
    return run


def open_run_directory(root: Path) -> RunDirectory:
    """The folder of a run that was started before. Raises RunDirectoryError if it is not one."""
    run = RunDirectory(root.absolute())
    if not run.config.is_file():
        raise RunDirectoryError(f"{root} is not a run directory (it has no config.yaml)")
    for folder in (run.rollouts, run.checkpoints, run.stream.parent, run.control, run.logs):
        folder.mkdir(parents=True, exist_ok=True)
    return run


def _fresh_name(config: RunConfig) -> Path:
    environment = Path(config.environment.kind.split(":")[0]).stem
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{environment}-{config.schedule.kind}"
    candidates = [Path("runs") / stem, *(Path("runs") / f"{stem}-{n}" for n in range(2, 100))]
    return next(path for path in candidates if not path.exists())

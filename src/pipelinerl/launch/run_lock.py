"""Creates a run's directory, or opens it again: with a lock, and without the files of an earlier start."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.files import remedy, write_atomically
from pipelinerl.launch.session import StartPlan
from pipelinerl.run_directory import ORPHAN_PATIENCE_S, RunDirectory, existing_run

DYING_PATIENCE_S = 2.0
"""A launcher that was just killed exists for a moment longer: the time that a new one waits for it."""


class RunLock:
    """A lock on a run directory, held until `fd` is closed: by `close` and by the end of all processes that inherited it."""

    def __init__(self, run: RunDirectory) -> None:
        """Waits for a killed launcher and its processes to end. Raises RunDirectoryError if another run holds the lock."""
        self.run = run
        self.fd = os.open(run.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        begin_s = time.monotonic()
        while not self._try_lock():
            if time.monotonic() > begin_s + (DYING_PATIENCE_S if self._holder_alive() else ORPHAN_PATIENCE_S + 5.0):
                os.close(self.fd)
                raise RunDirectoryError(
                    f"{run.root} is in use by another run, or by stopped processes of one (Ctrl-Z): wait for it, or "
                    "choose a --run_dir elsewhere"
                )
            time.sleep(0.05)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        os.close(self.fd)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # held; which of them depends on the file system
                return False
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # some file systems have no locks
                os.close(self.fd)
                raise RunDirectoryError(
                    f"{self.run.root} can't be locked: {error.strerror}; choose a --run_dir elsewhere"
                ) from error
        return True

    def _holder_alive(self) -> bool:
        """Whether another launcher of this machine holds the lock, and not what a killed one, or this one, had started."""
        written = os.pread(self.fd, 32, 0)  # nothing yet if it was taken just now
        try:
            os.kill(int(written or os.getpid()), 0)
        except OSError as error:
            return error.errno != errno.ESRCH
        return int(written or 0) != os.getpid()


def lock_run_directory(config: RunConfig, existing: Path | None) -> RunLock:
    """Lock the directory of a run: an `existing` one, or the one of a new run, without files of a start that never trained.

    Raises RunDirectoryError if it is in use, is no run directory, or already has a run; OSError if it can't be written to.
    """
    if existing is not None:
        run = existing_run(existing.absolute())
    else:
        kind, schedule = config.environment.kind, config.schedule.kind
        run = RunDirectory(Path(config.run_dir).absolute() if config.run_dir else fresh_directory(kind, schedule))
        run.root.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run)
    try:
        if existing is None and run.config.exists():
            trained = run.metrics.exists() and run.metrics.stat().st_size > 0
            if trained or not run.plan.is_file():  # without a plan, config.yaml is not of a run
                raise RunDirectoryError(
                    f"{run.root} already has a run; continue it with --resume {run.root} or choose a --run_dir elsewhere"
                )
            for path in (*run.records(), *run.checkpoints.glob("step_*"), run.config):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        run.make_folders()
    except BaseException:
        lock.close()
        raise
    return lock


@contextmanager
def errors_explained() -> Iterator[None]:
    """Turn an OSError of a file inside into a RunDirectoryError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno == errno.ENOMEM:  # not for want of the file
            raise
        advice = f"{remedy(error)}, or choose a --run_dir elsewhere"
        raise RunDirectoryError(f"can't use {error.filename}: {error.strerror}; {advice}") from error


@errors_explained()
def keep_settings(config: RunConfig, run: RunDirectory) -> None:
    """Make these the run's settings in `config.yaml`. Raises RunDirectoryError.

    Called when all parts of a session have loaded: a resume that fails changes nothing.
    """
    text = config_to_yaml(config).encode()
    if not run.config.exists() or run.config.read_bytes() != text:
        write_atomically(run.config, text, mode=0o600)


def fresh_directory(kind: str, schedule: str) -> Path:
    """Make the folder `runs/<date>-<environment>-<schedule>`, with a number appended if it exists already."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(kind.partition(':')[0]).stem}-{schedule}"
    runs = Path("runs").absolute()
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with suppress(FileExistsError):
            (path := runs / (stem if number == 1 else f"{stem}-{number}")).mkdir()
            break
    return path


def last_plan(run: RunDirectory) -> StartPlan | None:
    """The plan of the latest session. Raises RunDirectoryError if its plan is damaged."""
    try:
        return msgspec.json.decode(run.plan.read_bytes(), type=StartPlan)
    except FileNotFoundError:
        return None
    except (OSError, *INVALID_DATA) as error:
        raise RunDirectoryError(
            f"{run.plan} can't be read ({error}): delete it, and start the servers again that engine.urls names, if any"
        ) from error

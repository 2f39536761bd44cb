"""The processes of a run, seen from outside: start them, notice their end, say why, leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl import errors
from pipelinerl.errors import PipelineRLError, StageDiedError
from pipelinerl.launch.run_directory import RunDirectory

HUNG_PATIENCE_S = 5.0
"""Time to end for a process that may be stuck in code that is not ours, and has nothing to save."""


class LastWords(msgspec.Struct, frozen=True):
    """What a worker leaves behind when it ends with an error: the error's class in `errors`, and its message."""

    kind: str
    message: str
    traceback: str


class WorkerResult(msgspec.Struct, frozen=True):
    """What a worker leaves behind when it ends well."""

    peak_memory_bytes: int


@dataclass(frozen=True)
class WorkerFiles:
    """Where a worker's output and last words go."""

    log: Path
    last_words: Path
    result: Path


def worker_files(run: RunDirectory, role: str) -> WorkerFiles:
    return WorkerFiles(run.log(role), run.control / f"{role}.error.json", run.control / f"{role}.result.json")


class Worker:
    """One process of the run. It lives in a session of its own, so that Ctrl-C reaches only the launcher."""

    def __init__(
        self, role: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], files: WorkerFiles
    ) -> None:
        """Start it. It inherits `fds`. Its files of an earlier session are removed, its log is continued."""
        self.role = role
        self.files = files
        self._asked_to_stop = False
        for stale in (files.last_words, files.result):
            stale.unlink(missing_ok=True)
        with files.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own module, our own arguments)
                [sys.executable, "-m", "pipelinerl.launch.hosts.worker", role, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=tuple(fds),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        if self.running:
            self._asked_to_stop = True
            self._process.send_signal(signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have the worker write the stacks of its threads to its log (see faulthandler)."""
        if self.running:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End it now, with all processes that it started; if it has ended, those that it has left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def peak_memory_bytes(self) -> int | None:
        try:
            return msgspec.json.decode(self.files.result.read_bytes(), type=WorkerResult).peak_memory_bytes
        except (OSError, msgspec.DecodeError):
            return None

    def failure(self) -> PipelineRLError | None:
        """Why it ended, as the error it ended with; None while it runs, if it ended well, or as it was asked to."""
        code = self._process.poll()
        if not code or (self._asked_to_stop and code == -signal.SIGTERM):
            return None
        try:
            words = msgspec.json.decode(self.files.last_words.read_bytes(), type=LastWords)
        except (OSError, msgspec.DecodeError):
            return StageDiedError(self._obituary(code))
        kind = getattr(errors, words.kind, StageDiedError)
        error: PipelineRLError = kind(words.message)
        error.add_note(words.traceback)
        return error

    def desertion(self) -> PipelineRLError:
        """What to say of a worker that ended as if all were well, before the run was over."""
        return StageDiedError(f"the {self.role} process (pid {self.pid}) ended before the run did (was it told to stop?)")

    def _obituary(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        tail = _last_lines(self.files.log, 5)
        said = f"; its last words:\n{tail}" if tail else " without a word"
        return f"the {self.role} process (pid {self.pid}) {how}{said}\n(its log: {self.files.log})"


def stop_all(
    workers: Sequence[Worker], patience_s: float, hurry: Callable[[], bool], *, hung: Sequence[Worker] = ()
) -> list[Worker]:
    """Ask all workers to end, wait, and kill what is left after `patience_s` or when `hurry` says so: returns those.

    Workers in `hung` have `HUNG_PATIENCE_S` at most.
    """
    for worker in workers:
        worker.ask_to_stop()
    deadline_s, hung_deadline_s = time.monotonic() + patience_s, time.monotonic() + min(patience_s, HUNG_PATIENCE_S)
    killed: list[Worker] = []
    while any(worker.running for worker in workers) and time.monotonic() < deadline_s and not hurry():
        if time.monotonic() > hung_deadline_s:
            killed += _killed(worker for worker in hung if worker.running)
        time.sleep(0.02)
    return killed + _killed(worker for worker in workers if worker.running)


def _killed(workers: Iterable[Worker]) -> list[Worker]:
    left = list(workers)
    for worker in left:
        worker.kill()
    return left


def _last_lines(path: Path, count: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 4096))
            return b"\n".join(log.read().splitlines()[-count:]).decode(errors="replace").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------------------------
# How processes notice that nobody is left to work for, however that came about.


class Lifeline:
    """A pipe to which nothing is written. Who reads `fd` learns when the last process that has `held_fd` let go, or died."""

    def __init__(self) -> None:
        self.fd, self.held_fd = os.pipe()

    def let_go(self) -> None:
        """Close this process's hold. Twice is fine."""
        if self.held_fd >= 0:
            os.close(self.held_fd)
            self.held_fd = -1

    def close(self) -> None:
        self.let_go()
        os.close(self.fd)

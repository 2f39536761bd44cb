"""Start, stop and kill the processes of a run, and report why one ended."""

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
"""Time to end for a process that may be stuck in user code and has nothing to save."""


class ErrorReport(msgspec.Struct, frozen=True):
    """The file that a worker writes when it ends with an error. `kind` is the error's class in `errors`."""

    kind: str
    message: str
    traceback: str


class WorkerResult(msgspec.Struct, frozen=True):
    """The file that a worker writes when it ends without an error."""

    peak_memory_bytes: int


@dataclass(frozen=True)
class WorkerFiles:
    """Where a worker's output, error report and result go."""

    log: Path
    error_report: Path
    result: Path


def worker_files(run: RunDirectory, role: str) -> WorkerFiles:
    return WorkerFiles(run.log(role), run.control / f"{role}.error.json", run.control / f"{role}.result.json")


class Worker:
    """One process of the run. It has its own process session, so that Ctrl-C reaches only the launcher."""

    def __init__(
        self, role: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], files: WorkerFiles
    ) -> None:
        """Start the process, which inherits `fds`. Its error report and result of an earlier session are removed; its log
        is appended to.
        """
        self.role = role
        self.files = files
        self._asked_to_stop = False
        for stale in (files.error_report, files.result):
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
        """Have the worker write the stacks of all its threads to its log (see faulthandler)."""
        if self.running:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill its process group: the worker, if it still runs, and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def peak_memory_bytes(self) -> int | None:
        try:
            return msgspec.json.decode(self.files.result.read_bytes(), type=WorkerResult).peak_memory_bytes
        except (OSError, msgspec.DecodeError):
            return None

    def failure(self) -> PipelineRLError | None:
        """The error that the worker ended with. None if it still runs, ended with status 0, or was stopped on request."""
        code = self._process.poll()
        if not code or (self._asked_to_stop and code == -signal.SIGTERM):
            return None
        try:
            report = msgspec.json.decode(self.files.error_report.read_bytes(), type=ErrorReport)
        except (OSError, msgspec.DecodeError):
            return StageDiedError(self._exit_report(code))
        kind = getattr(errors, report.kind, StageDiedError)
        error: PipelineRLError = kind(report.message)
        error.add_note(report.traceback)
        return error

    def premature_exit(self) -> PipelineRLError:
        """The error for a worker that ended with status 0 before the run was over."""
        return StageDiedError(f"the {self.role} process (pid {self.pid}) ended before the run did (was it told to stop?)")

    def _exit_report(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        tail = _last_lines(self.files.log, 5)
        output = f"; the end of its log:\n{tail}" if tail else " without any output"
        return f"the {self.role} process (pid {self.pid}) {how}{output}\n(its log: {self.files.log})"


def stop_all(
    workers: Sequence[Worker], patience_s: float, hurry: Callable[[], bool], *, hung: Sequence[Worker] = ()
) -> list[Worker]:
    """Ask all workers to stop, and kill those that still run after `patience_s` or once `hurry` returns True.

    Workers in `hung` have at most `HUNG_PATIENCE_S`. Returns the killed workers.
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


class ParentDeathPipe:
    """A pipe that tells child processes when their parent has exited or crashed.

    Nothing is written to it. A read from `read_fd` returns once every process that has `write_fd` has closed it or ended.
    """

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def close_write_end(self) -> None:
        """Close this process's write end. May be called twice."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        self.close_write_end()
        os.close(self.read_fd)

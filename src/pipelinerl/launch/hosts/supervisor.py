"""A process of a run, as the launcher sees it: started with its role, and why it ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec

from pipelinerl import errors
from pipelinerl.child import ChildProcess
from pipelinerl.errors import PipelineRLError, StageDiedError
from pipelinerl.launch.run_directory import RunDirectory


class ErrorReport(msgspec.Struct, frozen=True):
    """The file that a worker writes when it ends with an error. `kind` is the error's class in `errors`."""

    kind: str
    message: str
    traceback: str


class WorkerResult(msgspec.Struct, frozen=True):
    """The file that a worker writes when it ends without an error."""

    peak_memory_bytes: int


class Worker(ChildProcess):
    """One process of the run."""

    def __init__(
        self, run: RunDirectory, role: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> None:
        """Start the process, which inherits `fds`. Its error report and result of an earlier session are removed; its log
        is appended to.
        """
        self.role = role
        self._error_report, self._result = run.error_report(role), run.result(role)
        for stale in (self._error_report, self._result):
            stale.unlink(missing_ok=True)
        super().__init__(
            [sys.executable, "-m", "pipelinerl.launch.hosts.worker", role, str(run.root), *arguments],
            log=run.log(role),
            environment={**environment, "PYTHONUNBUFFERED": "1"},
            fds=fds,
            watches_parent=True,
        )

    def dump_stacks(self) -> None:
        """Have the worker write the stacks of all its threads to its log (see faulthandler)."""
        self.send_signal(signal.SIGUSR1)

    def peak_memory_bytes(self) -> int | None:
        try:
            return msgspec.json.decode(self._result.read_bytes(), type=WorkerResult).peak_memory_bytes
        except (OSError, msgspec.DecodeError):
            return None

    def failure(self) -> PipelineRLError | None:
        """The error that the worker ended with. None if it still runs, ended with status 0, or was stopped on request."""
        status = self.status
        if not status or (self.asked_to_stop and status == -signal.SIGTERM):
            return None
        try:
            report = msgspec.json.decode(self._error_report.read_bytes(), type=ErrorReport)
        except (OSError, msgspec.DecodeError):
            return StageDiedError(f"the {self.role} process (pid {self.pid}) {self.how_it_ended()}{self.log_excerpt()}")
        kind = getattr(errors, report.kind, StageDiedError)
        error: PipelineRLError = kind(report.message)
        error.add_note(report.traceback)
        return error

    def premature_exit(self) -> PipelineRLError:
        """The error for a worker that ended with status 0 before the run was over."""
        return StageDiedError(f"the {self.role} process (pid {self.pid}) ended before the run did (was it told to stop?)")

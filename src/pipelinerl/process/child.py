"""Child processes: started in a process group of their own, watched, and ended with all processes that they started.

No child outlives this process. Each inherits the read end of a pipe whose write end this process holds and never writes
to: the parent-death pipe. It closes when this process exits or crashes. Then either the kernel kills the child's process
group, or the child, which watches the pipe, ends by itself.

Errors are plain `OSError`: only the caller can say what the process is to the user.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from pipelinerl.process.forks import Fork, ForkServer

HUNG_PATIENCE_S = 5.0
"""Time to end for a process that may be stuck in user code and has nothing to save."""
KILL_TIMEOUT_S = 5.0
"""Time for the kernel to end a killed process."""
LOG_TAIL_BYTES = 16 << 10
UNKNOWN_STATUS = 256
"""Of a process that ended when its parent, a fork server, had been killed."""


class Stoppable(ABC):
    """What `stop_all` stops: a process, which may be on another machine. `asked_to_stop`: while it ran."""

    pid: int
    asked_to_stop = False

    @property
    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> object:
        """Send a signal to the process, not to its group, if it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Kill what is left of the process and of its children. Does not wait. Idempotent."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, for at most `timeout_s`. Returns whether it has."""

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process if it runs."""
        if self.running:
            self.asked_to_stop = True
            self.send_signal(signal.SIGTERM)


class ChildProcess(Stoppable):
    """A process that leads a session of its own: Ctrl-C in the terminal does not reach it, and its children die with it.

    As a context manager it is stopped at the end. It ends as without a parent when this object is garbage-collected.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        fds: Sequence[int] = (),
        watches_parent: bool = False,
        patience_s: float = 0.0,
        forks: ForkServer | None = None,
    ) -> None:
        """Start it. Raises OSError if that fails.

        log              its output is appended to this file; None: its output is this process's
        environment      variables in addition to this process's
        stdin, fds       files that it inherits; files in `fds` keep their numbers
        watches_parent   its standard input is the parent-death pipe, which it watches. Otherwise the kernel kills its
                         process group when the pipe closes (on Linux; other kernels can't)
        patience_s       how long `stop` gives it to end by itself
        forks            it is a fork of this server, if there is one
        """
        self.log = log
        self._patience_s = patience_s
        pipe, write_fd = os.pipe()
        self._parent_pipe = open(write_fd, "wb", buffering=0)  # noqa: SIM115 - closed by `kill`
        try:
            with ExitStack() as stack:
                stack.callback(os.close, pipe)
                output = None if log is None else stack.enter_context(log.open("ab"))
                start = forks.popen if forks else subprocess.Popen
                self._process: Fork | subprocess.Popen[bytes] = start(  # our commands, or named in the run file
                    command,
                    stdin=pipe if watches_parent else stdin,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **(environment or {})},
                    pass_fds=fds if watches_parent else (*fds, pipe),
                    start_new_session=True,
                )
                self.pid = self._process.pid  # the id of its process group, too
                if not watches_parent and hasattr(fcntl, "F_SETSIG"):  # the kernel kills the group when the pipe closes
                    fcntl.fcntl(pipe, fcntl.F_SETOWN, -self.pid)
                    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
                    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        except OSError:
            self._parent_pipe.close()
            raise

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if not self._parent_pipe.closed:
            self._parent_pipe.close()
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to stop, and kill it after `patience_s`, or what is left of its process group. Idempotent."""
        stop_all([self], self._patience_s)

    def wait(self, timeout_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.running

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
        """Wait until `ready()`. Returns False if it is not within `timeout_s`, or when the process has ended."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            last = not self.running or time.monotonic() > deadline_s
            if ready():
                return True
            if last:
                return False
            time.sleep(poll_s)

    def how_it_ended(self) -> str:
        """For example "ended with status 3" or "was killed by SIGKILL"."""
        status = self._process.returncode or 0
        if status == UNKNOWN_STATUS:
            return "ended (nobody knows how)"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"was killed by signal {-status}"

    def log_lines(self) -> list[str]:
        """The last lines of its log, of 16 KiB; empty if there is no log."""
        if self.log is None:
            return []
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip().splitlines()
        return []

    def log_excerpt(self, count: int = 5) -> str:
        """The end of an error message: the last lines of the log, and its path."""
        if not (lines := self.log_lines()[-count:]):
            return f"; its log, {self.log}, is empty"
        return "\n".join(["; the end of its log:", *lines, f"(log: {self.log})"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


ChildT = TypeVar("ChildT", bound=Stoppable)


def stop_all(
    children: Sequence[ChildT], patience_s: float, hurry: Callable[[], bool] = lambda: False, *, hung: Sequence[ChildT] = ()
) -> list[ChildT]:
    """Ask all to stop, and kill the rest after `patience_s` or once `hurry` returns True.

    Children in `hung` have at most `HUNG_PATIENCE_S`. At the end the process groups of all are killed. Returns the children
    that were killed while they ran.
    """
    killed: list[ChildT] = []

    def kill_running(late: Sequence[ChildT]) -> None:
        for child in late:
            if child.running:
                child.kill()
                killed.append(child)
        for child in killed:
            child.wait(KILL_TIMEOUT_S)

    for child in children:
        child.ask_to_stop()
    deadline_s, hung_deadline_s = time.monotonic() + patience_s, time.monotonic() + min(patience_s, HUNG_PATIENCE_S)
    try:
        while any(child.running for child in children) and time.monotonic() < deadline_s and not hurry():
            if time.monotonic() > hung_deadline_s:
                kill_running(hung)
            time.sleep(0.02)
    finally:
        kill_running(children)
        for child in children:
            child.kill()
    return killed

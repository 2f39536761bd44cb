"""Starts processes as forks of one that has imported what they import: torch and transformers take each process seconds.

    parent ── command, variables, files ──▶ server ── fork ──▶ process
           ◀── its pid; at its end, its status ──

A fork has a session, files, variables, a folder and random numbers of its own, and shares the memory of what is imported.
The server (`forked`) ends with its parent. If it is killed, its forks go on, and the next one has another server.

`multiprocessing` has such a server, too. It sends pickles, and imports the user's program again in each process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import msgspec

from pipelinerl.errors import StageDiedError
from pipelinerl.process.child import UNKNOWN_STATUS, ChildProcess
from pipelinerl.process.forked import Request

ANSWER_S = 10.0
"""Time for a server that has imported everything to answer. One that needs longer is replaced."""
TRIALS = 3
"""How many servers in a row may end without a fork."""


def can_fork() -> bool:
    """Whether this system can watch processes that are not children. Only Linux can, and not in every container."""
    try:
        this_process = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(this_process, 0)
        os.close(this_process)
    except (AttributeError, OSError):
        return False
    return True


class ForkServer(AbstractContextManager["ForkServer"]):
    """The parent's side. As a context manager, it ends the server, not its forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Start the server, which imports `modules`; what can't be imported fails in the processes that need it.

        `environment`: variables that are read when something is imported. `timeout_s`: how long the imports may take.
        """
        self._modules, self._environment, self._timeout_s = modules, environment, timeout_s
        self._log, self._failed = NamedTemporaryFile(prefix="pipelinerl-forks-"), 0  # noqa: SIM115 - closed at the end
        self._begin()

    def _begin(self) -> None:
        self._imported, (self._requests, server) = False, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with server:
            self._process = ChildProcess(
                [sys.executable, "-m", "pipelinerl.process.forked", str(server.fileno()), *self._modules],
                log=Path(self._log.name),
                environment={**self._environment, "PYTHONUNBUFFERED": "1"},
                fds=[server.fileno()],
            )

    def ready(self) -> bool:
        """Whether a fork takes no time. A server that has ended is replaced.

        Raises StageDiedError if this has happened too often since the last fork.
        """
        if not self._process.running:
            self._failed += 1
            if self._failed == TRIALS:
                ended = f"the process that forks the others {self._process.how_it_ended()}"
                raise StageDiedError(f"{ended}{self._process.log_excerpt()}")
            self._requests.close()
            self._begin()
        self._imported = self._imported or _readable(self._requests.fileno())
        return self._imported

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes] | None,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **_: object,
    ) -> Fork:
        """As `subprocess.Popen`, with one file for all output and a session of its own, for a `command` that begins with
        the interpreter and `-m`. Waits for the imports. Raises OSError and StageDiedError.
        """
        with open(os.devnull, "rb") as empty:
            files = {fd: fd for fd in (1, 2, *pass_fds)} | {0: empty.fileno() if stdin == subprocess.DEVNULL else stdin}
            if stdout is not None:
                files |= {1: stdout.fileno(), 2: stdout.fileno()}
            request = Request.of(command[2:], env, os.getcwd(), [*files])
            while True:
                limit_s = ANSWER_S if self.ready() else self._timeout_s
                with suppress(EOFError, ConnectionError, TimeoutError):
                    fork = Fork(self._requests, request, [*files.values()], limit_s)
                    self._failed = 0
                    return fork
                self._process.stop()

    def __exit__(self, *exception: object) -> None:
        self._process.stop()
        self._requests.close()
        self._log.close()


class Fork:
    """A process that a server forked, with those methods of `subprocess.Popen` that `ChildProcess` needs."""

    def __init__(self, requests: socket.socket, request: Request, files: Sequence[int], timeout_s: float) -> None:
        """Raises OSError if it can't be started; EOFError, ConnectionError or TimeoutError if the server does not answer."""
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.memfd_create("request"), "w+b", buffering=0) as described:
            described.write(msgspec.msgpack.encode(request))
            socket.send_fds(requests, [b"fork"], [theirs.fileno(), described.fileno(), *files])
        self._answers.settimeout(timeout_s)
        what, _, number = self._answers.recv(64).decode().partition(" ")
        if what == "error":
            raise OSError(int(number), os.strerror(int(number)))
        if what != "pid":  # the server has ended, or the fork before it was the process
            raise EOFError
        self.pid, self._ended = int(number), -1
        with suppress(ProcessLookupError):  # it has ended
            self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None) -> int:
        """Wait until it has ended. Returns its status. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self.returncode is None:
            if self._ended >= 0 and not _readable(self._ended, timeout):
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            known = _readable(self._answers.fileno(), ANSWER_S) and self._answers.recv(64).decode().partition(" ")[2]
            self.returncode = int(known or UNKNOWN_STATUS)
            self._answers.close()
            if self._ended >= 0:
                os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)


def _readable(file: int, timeout_s: float | None = 0.0) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

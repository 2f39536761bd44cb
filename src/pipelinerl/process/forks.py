"""Starts processes as forks of one that has imported what they import: torch and transformers take each process seconds.

    parent ── command, variables, files ──▶ server ── fork ──▶ process
           ◀── its pid; at its end, its status ──

A fork has a session, files, variables, a folder and random numbers of its own, and shares the memory of what is imported.
The server (`forked`) ends with its parent. If it is killed, its forks go on, and the next one starts another server.

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
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from pipelinerl.process.child import UNKNOWN_STATUS, ChildProcess
from pipelinerl.process.forked import Request

DEVNULL = Path(os.devnull)
ANSWER_S = 10.0
"""Time for a server that has imported everything to answer. One that needs longer is stopped, and replaced."""


class ForkServer:
    """The parent's side. As a context manager, it ends the server, not its forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Start the server, which imports `modules`; what can't be imported fails in the processes that need it.

        `environment`: variables that are read when something is imported. `timeout_s`: how long a start may take.
        """
        self._modules, self._environment, self._timeout_s = modules, environment, timeout_s
        self._begin()

    def _begin(self) -> None:
        self._requests, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with server:
            self._process = ChildProcess(
                [sys.executable, "-m", "pipelinerl.process.forked", str(server.fileno()), *self._modules],
                log=DEVNULL,
                environment=self._environment,
                fds=[server.fileno()],
                watches_parent=True,
            )

    @property
    def ready(self) -> bool:
        """Whether a fork takes no time. Also true of a server that has been killed."""
        return _readable(self._requests.fileno()) or not self._process.running

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
        the interpreter and `-m`. Raises OSError.
        """
        with DEVNULL.open("rb") as empty:
            files = {fd: fd for fd in (1, 2, *pass_fds)} | {0: empty.fileno() if stdin == subprocess.DEVNULL else stdin}
            if stdout is not None:
                files |= {1: stdout.fileno(), 2: stdout.fileno()}
            request = Request([*command[2:]], dict(env), os.getcwd(), [*files])
            for _attempt in range(2):  # the server may have been killed, also while it imports
                if not self._process.running:
                    self._requests.close()
                    self._begin()
                with suppress(EOFError, ConnectionError, TimeoutError):
                    limit_s = ANSWER_S if self.ready else self._timeout_s
                    return Fork(self._requests, request, [*files.values()], limit_s)
                self._process.stop()
        raise OSError(f"the process that forks the others {self._process.how_it_ended()}")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stop()
        self._requests.close()


class Fork:
    """A process that a server forked, with those methods of `subprocess.Popen` that `ChildProcess` needs."""

    def __init__(self, requests: socket.socket, request: Request, files: Sequence[int], timeout_s: float) -> None:
        """Raises OSError if it can't be started; EOFError, ConnectionError or TimeoutError if the server does not answer."""
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(requests, [msgspec.json.encode(request)], [theirs.fileno(), *files])
        self._answers.settimeout(timeout_s)
        if not (answer := self._answers.recv(64)):
            raise EOFError
        what, _, number = answer.decode().partition(" ")
        if what != "pid":
            raise OSError(int(number), os.strerror(int(number)))
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
            if self._ended >= 0:
                if not _readable(self._ended, timeout):
                    raise subprocess.TimeoutExpired("fork", timeout or 0)
                os.close(self._ended)
            known = _readable(self._answers.fileno(), ANSWER_S) and self._answers.recv(64).decode().partition(" ")[2]
            self.returncode = int(known or UNKNOWN_STATUS)
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)


def _readable(file: int, timeout_s: float | None = 0.0) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

"""How a started process learns that it should end: the child's end of a parent-death pipe (`child` has the parent's), and
signals.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable


def take_stdin() -> int:
    """The file of standard input under a new number, which programs started from here do not inherit.

    Standard input is empty from now on: user code must not read what is ours.
    """
    fd = os.dup(0)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    return fd


def when_closed(pipe_fd: int, stop: Callable[[], None], patience_s: float) -> None:
    """Once the parent-death pipe has closed, call `stop` in a thread, and end this process after `patience_s`."""

    def watch() -> None:
        os.read(pipe_fd, 1)
        stop()
        time.sleep(patience_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_on_sigterm(stopping: threading.Event) -> Callable[[], bool]:
    """From now on SIGTERM asks for a clean stop. Before, it ends the process, which has nothing to save yet."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    return stopping.is_set


POLL_S = 0.02


class Turns:
    """What a process is told that may take part in several sessions of a run.

    SIGTERM asks it to stop. SIGUSR2 asks it to end its part of the session, and later to take part in the next one.
    """

    def __init__(self) -> None:
        self._stopping, self._told = threading.Event(), threading.Event()

    def listen(self) -> None:
        """Obey signals from now on. Before, they end the process."""
        stop_on_sigterm(self._stopping)
        signal.signal(signal.SIGUSR2, lambda *_: self._told.set())

    def over(self) -> bool:
        """Whether its part of the session shall end."""
        return self._stopping.is_set() or self._told.is_set()

    def wait(self) -> None:
        """Wait until its part of the session shall end."""
        while not self.over():
            time.sleep(POLL_S)

    def another(self, ready: Callable[[], object]) -> bool:
        """If it was asked to wait for another session, call `ready` and wait. Returns whether there is one."""
        if not self._told.is_set():
            return False
        self._told.clear()
        ready()
        self.wait()
        self._told.clear()
        return not self._stopping.is_set()

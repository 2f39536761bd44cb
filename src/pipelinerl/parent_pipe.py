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

"""What a process of this package does about itself: how it learns that it should end, its priority, its peak of memory.

`child` has the parent's side, and `forks` a faster way to start a child.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
NICENESS = 10
"""What `lower_priority` adds."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def name_process(name: str) -> None:
    """Have tools like `top` show at most 15 characters of this name. Only Linux can."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


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


class Interrupts:
    """Counts Ctrl-C and SIGTERM: the first asks for a clean stop, the second for an immediate end.

    `raises_at`: this one raises KeyboardInterrupt, for code in this thread that can't check the count; 0: none does.
    `terminated`: one of them was SIGTERM.
    """

    def __init__(self, raises_at: int) -> None:
        self.count = 0
        self.terminated = False
        self._raises_at = raises_at

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.terminated |= number == signal.SIGTERM
        if self.count + 1 == self._raises_at:
            for each in SIGNALS:
                signal.signal(each, signal.default_int_handler)
        elif self.count == self._raises_at:
            signal.default_int_handler(number, frame)


@contextmanager
def counted_interrupts(*signals: signal.Signals, raises_at: int = 0) -> Iterator[Interrupts]:
    """Count these signals, by default both, also for an outer block.

    Works in the main thread only; elsewhere the count stays 0.
    """
    interrupts = Interrupts(raises_at)
    previous = {}
    try:
        for number in signals or SIGNALS:
            previous[number] = signal.signal(number, interrupts)
    except ValueError:  # not the main thread: the embedding program handles its signals
        pass
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
            if isinstance(handler, Interrupts):
                handler.terminated |= interrupts.terminated


def lower_priority() -> None:
    """Lower the priority of all threads of this process."""
    threads = [int(thread.name) for thread in Path("/proc/self/task").glob("*")] or [0]  # 0: this process
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    # Linux may compare sessions instead of processes (autogroup), and each process of a run has a session of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


class PeakMemory(msgspec.Struct, frozen=True):
    """The most that a process used so far, in bytes: resident memory, and what PyTorch reserved on GPUs."""

    host: int
    gpu: int = 0


def peak_memory() -> PeakMemory:
    """The peak of this process."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    torch = sys.modules.get("torch")  # a process that has not loaded it has used no GPU
    if torch is None or not torch.cuda.is_initialized():
        return PeakMemory(host)
    return PeakMemory(host, sum(torch.cuda.max_memory_reserved(gpu) for gpu in range(torch.cuda.device_count())))

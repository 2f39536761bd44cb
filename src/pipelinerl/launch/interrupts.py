"""Ctrl-C as a request to stop instead of an exception at an arbitrary point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Counts Ctrl-C and SIGTERM: the first asks for a clean stop, the second for an immediate end.

    `raising`: the second raises KeyboardInterrupt, for code that computes in this thread and cannot check the count.
    """

    def __init__(self, *, raising: bool) -> None:
        self.count = 0
        self._raising = raising

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.hurried and self._raising:
            raise KeyboardInterrupt

    @property
    def hurried(self) -> bool:
        return self.count > 1


@contextmanager
def counted_interrupts(*, raising: bool = False) -> Iterator[Interrupts]:
    """Count interrupts instead of raising KeyboardInterrupt. Works in the main thread only; elsewhere the count stays 0."""
    interrupts = Interrupts(raising=raising)
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, interrupts)
    except ValueError:  # not the main thread: the embedding program handles its signals
        pass
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

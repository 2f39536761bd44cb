"""Ctrl-C as a request to stop instead of an exception at an arbitrary point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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

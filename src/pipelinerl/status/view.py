"""The terminal view of a run: live in a terminal, plain lines elsewhere. The contents are in `screen.py`.

The caller may pass the status board's contents as often as it likes: a live view redraws at most twice a second.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, Literal, TextIO

from pipelinerl.metrics.totals import trainer_progress
from pipelinerl.status.screen import REDRAW_S, RunView, Trends, plain_line, stage_lines
from pipelinerl.types import StageStatus

PLAIN_EVERY_S = 10.0
LONG_WAIT_S = 10.0


class _Dropping(io.FileIO):
    """A file that drops what can't be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def output_that_never_fails() -> Iterator[None]:
    """Within it, standard output and error drop what they can't write: the reader has gone, or the disk of a log is full.

    A run's views, tables and messages must not decide how it ends. Streams without a file (notebooks) stay as they are.
    """
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if not isinstance(stream, io.TextIOWrapper) or isinstance(stream.buffer, io.BytesIO):
                continue
            with suppress(OSError):
                stream.flush()
            raw = io.BufferedWriter(_Dropping(stream.fileno(), "wb", closefd=False))
            lines = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
            stack.enter_context(redirect(stack.enter_context(lines)))
        yield


class PlainView(RunView):
    """Prints a line every `every_steps` optimizer steps, and at least every 10 s.

    It is followed by a line for each evaluation that runs, and for each stage that waits, starts, failed or is silent for
    over 10 s (before step 1: any time).
    """

    def __init__(self, stream: TextIO, *, target: int) -> None:
        super().__init__(stream)
        self._target = target
        self._every_steps = max(1, target // 20)
        self._trends = Trends()
        self._first_s = 0.0
        self._printed: tuple[int, float] = (0, 0.0)
        self._last: tuple[Mapping[str, StageStatus], float] | None = None

    def update(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        super().update(statuses, now)
        if self._last is None:
            self._first_s, self._printed = now, (_version(statuses), now)
        elif now - self._last[1] < REDRAW_S:
            return
        self._trends.observe(statuses, now)
        self._last = (dict(statuses), now)
        version, printed_s = self._printed
        if _version(statuses) >= version + self._every_steps or now - printed_s >= PLAIN_EVERY_S:
            self._print(*self._last)

    def close(self) -> None:
        if self._last is not None and self._printed != (_version(self._last[0]), self._last[1]):
            self._print(*self._last)

    def _print(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        self._printed = (_version(statuses), now)
        self.say(plain_line(statuses, self._target, self._trends, now - self._first_s))
        for line in stage_lines(statuses, now, LONG_WAIT_S if self._printed[0] else 0.0):
            self.say(f"            {line}")


def make_view(
    kind: Literal["auto", "live", "plain", "none"], stream: TextIO, *, target: int, title: str = "pipelinerl"
) -> RunView:
    """The view of kind `metrics.view`. `auto` is live on a terminal that can move its cursor, and plain elsewhere.

    It is plain where `CI` is set, too: such terminals are logs that are read later.
    """
    if kind == "none":
        return RunView(stream)
    if kind == "auto":
        log = os.environ.get("TERM") == "dumb" or os.environ.get("CI", "").lower() not in ("", "0", "false")
        kind = "live" if stream.isatty() and not log else "plain"
    if kind == "live":
        from pipelinerl.status.live import LiveView  # noqa: PLC0415 - logs need no drawing

        return LiveView(stream, target=target, title=title)
    return PlainView(stream, target=target)


def _version(statuses: Mapping[str, StageStatus]) -> int:
    trainer = trainer_progress(statuses)
    return trainer.version if trainer else 0

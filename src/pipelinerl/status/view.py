"""The terminal view of a run: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, Literal, TextIO

from pipelinerl.metrics.statistics import trainer_progress
from pipelinerl.status.screen import (
    NO_STAGE,
    REDRAW_S,
    RunView,
    Trends,
    dropped_rollouts,
    duration,
    headline,
    shown_stages,
)
from pipelinerl.types import ActorProgress, StageStatus, TrainerProgress

PLAIN_EVERY_S = 10.0
LONG_WAIT_S = 10.0


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
        version = (trainer_progress(statuses) or TrainerProgress()).version
        if self._last is None:
            self._first_s, self._printed = now, (version, now)
        elif now - self._last[1] < REDRAW_S:
            return
        self._trends.observe(statuses, now)
        self._last = (dict(statuses), now)
        printed, printed_s = self._printed
        if version >= printed + self._every_steps or now - printed_s >= PLAIN_EVERY_S:
            self._print(*self._last)

    def close(self) -> None:
        if self._last is not None and self._printed[1] != self._last[1]:
            self._print(*self._last)

    def _print(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        trainer, trends = trainer_progress(statuses) or TrainerProgress(), self._trends
        self._printed = (trainer.version, now)
        parts = [f"[{duration(now - self._first_s):>7}]", f"step {trainer.version}/{self._target}"]
        parts += [f"{name} {shown}" for name, shown in headline(trainer.latest).items()]
        rates = {"tok": trends.generated, "samples": trends.samples}
        parts += [rate.text(unit) for unit, rate in rates.items() if rate.per_s is not None]
        parts += [f"queued {trainer.queued}", *filter(None, [dropped_rollouts(statuses)])]
        if (left_s := trends.remaining_s(max(0, self._target - trainer.version))) is not None:
            parts.append(f"left {duration(left_s)}")
        self.say("  ".join(parts))
        for line in _stage_lines(statuses, trends, now, LONG_WAIT_S if trainer.version else 0.0):
            self.say(f"            {line}")


def _stage_lines(statuses: Mapping[str, StageStatus], trends: Trends, now: float, longer_than_s: float) -> Iterator[str]:
    """A line for each evaluation, and for each stage that has been waiting, starting, failed or silent for so long."""
    if not statuses:
        yield NO_STAGE
    for one in shown_stages(statuses, trends, now):
        progress = statuses[one.stage].progress
        if one.state in ("working", "waiting") and isinstance(progress, ActorProgress) and progress.evaluating:
            yield f"{one.stage} {progress.evaluating}"
        if one.state in ("waiting", "starting", "failed") and one.for_s > longer_than_s:
            yield f"{one.stage} {one.state} for {duration(one.for_s)}: {one.detail}"
        elif one.state == "working" and one.silent_s is not None:
            yield f"{one.stage} has not reported for {duration(one.silent_s)}: {one.detail}"


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

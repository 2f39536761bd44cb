"""What is shown of a run while it goes: stages, rates and counts, as functions of stage statuses; and the views.

The page of `pipelinerl watch` shows the same. A view is live in a terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, Literal, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.metrics.statistics import LOW_ESS, actor_total, engine_total
from pipelinerl.status.watchdog import waits_on
from pipelinerl.types import (
    TRAINER,
    ActorProgress,
    EngineProgress,
    StageState,
    StageStatus,
    TrainerProgress,
    trainer_progress,
)

REDRAW_S = 0.5
PLAIN_EVERY_S = 10.0
LONG_WAIT_S = 10.0
SILENT_S = 15.0
"""A stage that has not reported for longer than this is shown as silent."""
NARROW = 92
"""Columns of a terminal below which the rates of stages are left out."""
_NO_STAGE = "no stage has reported yet"
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}
_INVISIBLE = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF]
_SHOWN = _PICTURES | {code: f"<U+{code:04X}>" for code in (*_INVISIBLE, *range(0xD800, 0xE000))}
_MARKS = {
    "starting": ("◌", "cyan"),
    "working": ("●", "green"),
    "waiting": ("◦", "yellow"),
    "done": ("✓", "blue"),
    "failed": ("✗", "bold red"),
}


# ---- text


def printable(text: str) -> str:
    """Make text that may come from data or models safe to print: it never reaches the terminal as control codes.

    Control characters become pictures (`␛`), except newlines, and bidirectional or invisible ones `<U+XXXX>`.
    """
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def duration(seconds: float | None) -> str:
    """`42s`, `3:07`, `2:05:00`; `-` for None."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def short(value: float | None) -> str:
    """Three significant digits with a unit: 7.81k, 52, 1.2M; `-` for None."""
    if value is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def pause(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ---- what changes from look to look


class Rate:
    """The rate of one growing counter, in units per second, over a sliding window.

    Time counts from the first change, so that time without work (start-up, the evaluation before training) does not lower
    the rate. If the counter decreases (the stage was restarted), the measurement starts over.
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()
        self._moving = False

    def observe(self, now: float, count: float) -> None:
        points = self._points
        if points and count < points[-1][1]:
            points.clear()
            self._moving = False
        if not self._moving:
            self._moving = bool(points) and count > points[-1][1]
            points.clear()
        points.append((now, count))
        # Keep one point at or before the start of the window, so that a counter slower than the window has a rate.
        while len(points) > 2 and points[1][0] <= now - self._window_s:
            points.popleft()

    @property
    def per_s(self) -> float | None:
        """None until the counter has two points."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None


class Trends:
    """Throughputs, computed from many statuses.

    They are over the last 30 s; the time left is estimated from the optimizer steps of the last 30 minutes.
    """

    def __init__(self) -> None:
        self.trained_tokens, self.samples, self.steps = Rate(), Rate(), Rate(1800.0)
        self.generated: dict[str, Rate] = {}  # by engine

    def observe(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        trainer = trainer_progress(statuses.get(TRAINER))
        for stage, status in statuses.items():
            if isinstance(status.progress, EngineProgress):
                self.generated.setdefault(stage, Rate()).observe(now, status.progress.tokens_generated)
        if trainer is not None:
            self.trained_tokens.observe(now, trainer.tokens_trained)
            self.samples.observe(now, trainer.trained)
            self.steps.observe(now, trainer.version)

    def remaining_s(self, steps_left: int) -> float | None:
        rate = self.steps.per_s
        return max(0, steps_left) / rate if rate else None


# ---- what is shown


class ShownStage(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a stage; its texts are safe to print.

    for_s        time in its state. `silent_s`: time since its last report, if that is too long
    busy, rate   share of its time in which it works, and what it does in a second; empty where that has no meaning
    """

    stage: str
    state: StageState
    detail: str
    for_s: float
    silent_s: float | None
    waits_on: tuple[str, ...]
    machine: str
    busy: str
    rate: str


def shown_stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float) -> list[ShownStage]:
    """The stages at `now` (`time.monotonic`)."""
    shown = []
    for stage, status in statuses.items():
        progress, busy, rate, silent_s = status.progress, "", "", now - status.written_s
        if isinstance(progress, EngineProgress):
            rate = f"{short(trends.generated.get(stage, Rate()).per_s)} tok/s"
        elif isinstance(progress, TrainerProgress):
            rate = f"{short(trends.samples.per_s)} samples/s, {short(trends.trained_tokens.per_s)} tok/s"
        if isinstance(progress, EngineProgress | TrainerProgress):
            busy = f"{progress.busy_s / progress.ready_s:.0%}" if progress.ready_s > 0 else "-"
        one = ShownStage(
            stage=stage,
            state=status.state,
            detail=printable(status.detail),
            for_s=max(0.0, now - status.since_s),
            silent_s=silent_s if status.state in ("working", "waiting") and silent_s > SILENT_S else None,
            waits_on=waits_on(status, statuses),
            machine=printable(status.machine),
            busy=busy,
            rate=rate,
        )
        shown.append(one)
    return shown


def facts(statuses: Mapping[str, StageStatus]) -> dict[str, str]:
    """Weights, slots and rollouts, as the stages have counted them."""
    engine, actor = engine_total(statuses), actor_total(statuses)
    trainer = trainer_progress(statuses.get(TRAINER)) or TrainerProgress()
    found = {}
    if engine is not None:
        last = f", last pause {pause(engine.pauses_s[-1])}" if engine.pauses_s else ""
        published = f"trainer at version {trainer.version}, engine at {engine.version}"
        found["weights"] = f"{published}; {engine.weight_updates} updates applied{last}"
        found["engine"] = f"{engine.in_progress} of {engine.slots} slots in progress, {engine.queued} queued"
    if actor is not None:
        skipped = f"; {actor.groups_skipped} problems skipped" if actor.groups_skipped else ""
        found["rollouts"] = (
            f"{actor.rollouts_started} started, {trainer.trained} trained, {trainer.queued} queued, "
            f"{actor.rollouts_in_progress} in progress, {dropped_rollouts(statuses) or '0 dropped'}{skipped}"
        )
    return found


def dropped_rollouts(statuses: Mapping[str, StageStatus]) -> str:
    """How many rollouts were dropped, by reason; empty if none was."""
    actor, trainer = actor_total(statuses), trainer_progress(statuses.get(TRAINER))
    dropped = Counter(actor.rollouts_dropped if actor else {})
    dropped.update(trainer.dropped if trainer else {})
    reasons = ", ".join(f"{printable(reason)} {count}" for reason, count in (+dropped).most_common())
    return f"{dropped.total()} dropped ({reasons})" if reasons else ""


def headline(latest: Mapping[str, float]) -> dict[str, str]:
    """What is known of the latest step's most important numbers, as text by name."""
    patterns = {
        "reward": ("reward_read_mean", ".3f"),
        "ess": ("ess", ".3f"),
        "lag": ("lag_mean", ".1f"),
        "entropy": ("entropy_mean", ".2f"),
        "length": ("completion_length_mean", ".0f"),
    }
    found = {name: format(latest[key], pattern) for name, (key, pattern) in patterns.items() if key in latest}
    if "lag" in found and "lag_max" in latest:
        found["lag"] += f" (max {latest['lag_max']:.0f})"
    if latest.get("ess", 1.0) < LOW_ESS:
        found["ess"] += " (low)"
    return found


# ---- the views


def make_view(
    kind: Literal["auto", "live", "plain", "none"], stream: TextIO, *, target: int, title: str = "pipelinerl"
) -> RunView:
    """The view of kind `metrics.view`. `auto` is live on a terminal that can move its cursor, and plain elsewhere.

    It is plain where `CI` is set, too: such terminals are logs that are read later.
    """
    if kind == "auto":
        log = os.environ.get("TERM") == "dumb" or os.environ.get("CI", "").lower() not in ("", "0", "false")
        kind = "live" if stream.isatty() and not log else "plain"
    kinds = {"none": RunView, "plain": PlainView, "live": LiveView}
    return kinds[kind](stream, target=target, title=title)


class RunView:
    """Shows a run of `target` optimizer steps to its user. This view, of kind `none`, only prints messages."""

    def __init__(self, stream: TextIO, *, target: int = 0, title: str = "pipelinerl") -> None:
        self._stream, self._target, self._title = stream, target, title
        self._trends = Trends()
        self._said: set[str] = set()
        self._first_s = self._looked_s = 0.0
        self._last: tuple[Mapping[str, StageStatus], float] | None = None

    def update(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        """Show the statuses of all stages at `now` (`time.monotonic`). May be called as often as the caller likes.

        Notes of the model's loading and of training are messages: what does not agree between model and tokenizer, how
        engine and trainer run the model, a collapse.
        """
        engine, trainer = engine_total(statuses), trainer_progress(statuses.get(TRAINER))
        lines = list(engine.notes) if engine else []
        if engine and trainer and trainer.runner:
            generates = f"generates {engine.runner}; " if engine.runner else ""
            lines.append(f"model: {generates}is trained {trainer.runner}")
        for line in (*lines, *(trainer.notes if trainer else ())):
            if line not in self._said:
                self._said.add(line)
                self.say(line)
        first, self._last = self._last is None, (dict(statuses), now)
        if first:
            self._first_s = now
        if first or now - self._looked_s >= REDRAW_S:
            self._looked_s = now
            self._trends.observe(statuses, now)
            self._show(*self._last, end=False)

    def say(self, text: str) -> None:
        """Print a message that stays on the screen, like a warning or a process's crash message."""
        print(printable(text.expandtabs()), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. May be called twice."""
        if self._last is not None:
            self._show(*self._last, end=True)

    def _show(self, statuses: Mapping[str, StageStatus], now: float, *, end: bool) -> None:
        """Called for the first statuses, then every `REDRAW_S`, and at the end."""


class PlainView(RunView):
    """Prints a line every twentieth of the optimizer steps, and at least every 10 s.

    It is followed by a line for each evaluation that runs, and for each stage that waits, starts, failed or is silent for
    over 10 s (before step 1: any time).
    """

    _printed: tuple[int, float] | None = None

    def _show(self, statuses: Mapping[str, StageStatus], now: float, *, end: bool) -> None:
        trainer, trends = trainer_progress(statuses.get(TRAINER)) or TrainerProgress(), self._trends
        printed, printed_s = self._printed = self._printed or (trainer.version, now)
        due = trainer.version >= printed + max(1, self._target // 20) or now - printed_s >= PLAIN_EVERY_S
        if not due and (not end or now == printed_s):
            return
        self._printed = (trainer.version, now)
        parts = [f"[{duration(now - self._first_s):>7}]", f"step {trainer.version}/{self._target}"]
        parts += [f"{name} {shown}" for name, shown in headline(trainer.latest).items()]
        generated = [rate.per_s for rate in trends.generated.values() if rate.per_s is not None]
        rates = {"tok": sum(generated) if generated else None, "samples": trends.samples.per_s}
        parts += [f"{short(rate)} {unit}/s" for unit, rate in rates.items() if rate is not None]
        parts += [f"queued {trainer.queued}", *filter(None, [dropped_rollouts(statuses)])]
        if (left_s := trends.remaining_s(self._target - trainer.version)) is not None:
            parts.append(f"left {duration(left_s)}")
        self.say("  ".join(parts))
        for line in _stage_lines(statuses, trends, now, LONG_WAIT_S if trainer.version else 0.0):
            self.say(f"            {line}")


def _stage_lines(statuses: Mapping[str, StageStatus], trends: Trends, now: float, longer_than_s: float) -> Iterator[str]:
    """A line for each evaluation, and for each stage that has been waiting, starting, failed or silent for so long."""
    if not statuses:
        yield _NO_STAGE
    for one in shown_stages(statuses, trends, now):
        progress = statuses[one.stage].progress
        if one.state in ("working", "waiting") and isinstance(progress, ActorProgress) and progress.evaluating:
            yield f"{one.stage} {progress.evaluating}"
        if one.state in ("waiting", "starting", "failed") and one.for_s > longer_than_s:
            yield f"{one.stage} {one.state} for {duration(one.for_s)}: {one.detail}"
        elif one.state == "working" and one.silent_s is not None:
            yield f"{one.stage} has not reported for {duration(one.silent_s)}: {one.detail}"


class LiveView(RunView):
    """A view redrawn in place. Takes over the terminal at the first update, and releases it in `close`."""

    def __init__(self, stream: TextIO, *, target: int, title: str = "pipelinerl") -> None:
        super().__init__(stream, target=target, title=title)
        console = Console(file=stream, force_terminal=True)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def say(self, text: str) -> None:
        self._live.console.print(printable(text.expandtabs()), markup=False, highlight=False)

    def _show(self, statuses: Mapping[str, StageStatus], now: float, *, end: bool) -> None:
        if end and not self._live.is_started:
            return
        elapsed_s, width = now - self._first_s, self._live.console.width
        body = render(statuses, now, self._target, self._trends, elapsed_s, width=width)
        panel = Panel(body, title=escape(self._title), title_align="left", border_style="dim", padding=(0, 1))
        self._live.start()
        self._live.update(panel, refresh=True)
        if end:
            self._live.stop()


def render(
    statuses: Mapping[str, StageStatus], now: float, target: int, trends: Trends, elapsed_s: float, *, width: int = 120
) -> RenderableType:
    """The live view at `now` (`time.monotonic`) of a run of `target` optimizer steps. Stages may be missing."""
    trainer = trainer_progress(statuses.get(TRAINER)) or TrainerProgress()
    share, left = trainer.version / target if target else 0.0, trends.remaining_s(target - trainer.version)
    progress = Table.grid(expand=True)
    progress.add_row(ProgressBar(max(1, target), trainer.version))
    times = f"   {share:.0%}   {duration(elapsed_s)} elapsed, {duration(left)} left"
    known = headline(trainer.latest)
    learning = Text() if known else Text("no optimizer step yet   ", "dim")
    evaluations = (actor_total(statuses) or ActorProgress()).evaluations
    for name, shown in (known | {f"held-out {when}": f"{reward:.3f}" for when, reward in evaluations.items()}).items():
        learning.append(f"{name} ", "dim").append(f"{shown}   ", "bold")
    counts = Table.grid(padding=(0, 2))
    counts.add_column(style="dim", no_wrap=True)
    counts.add_column()
    for name, text in facts(statuses).items():
        counts.add_row(name, Text(text))
    return Group(
        Text(f"step {trainer.version}/{target}", "bold").append(times, "not bold"),
        progress,
        learning,
        Text(),
        _stages(statuses, trends, now, rates=width >= NARROW),
        Text(),
        counts,
    )


def _stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float, *, rates: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("doing, or waiting for", ratio=1)
    if rates:
        table.add_column("busy", no_wrap=True, justify="right")
        table.add_column("throughput", no_wrap=True)
    for one in shown_stages(statuses, trends, now):
        mark, style = _MARKS[one.state]
        detail = Text(one.detail, "" if one.state == "working" else style)
        if one.silent_s is not None:
            detail = Text(f"no report for {duration(one.silent_s)}; {one.detail}", "bold red")
        state = Text(f"{mark} {one.state} {duration(one.for_s)}", style)
        table.add_row(one.stage, state, detail, *((one.busy, one.rate) if rates else ()))
    if not statuses:
        table.add_row("-", Text("◌ starting", "cyan"), _NO_STAGE)
    return table


# ---- output that nobody reads


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

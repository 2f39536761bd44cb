"""The view that is redrawn in place on a terminal. It is imported only there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.metrics.totals import actor_total, engine_total, trainer_progress
from pipelinerl.status.screen import (
    NO_STAGE,
    REDRAW_S,
    SILENT_S,
    RunView,
    Trends,
    dropped_by_reason,
    duration,
    headline,
    pause,
    printable,
    reasons,
    throughput,
)
from pipelinerl.types import ActorProgress, StageStatus, TrainerProgress

NARROW = 92
"""Columns of a terminal below which the rates of stages are left out."""

_BARS = "▁▂▃▄▅▆▇█"
_MARKS = {
    "starting": ("◌", "cyan"),
    "working": ("●", "green"),
    "waiting": ("◦", "yellow"),
    "done": ("✓", "blue"),
    "failed": ("✗", "bold red"),
}


class LiveView(RunView):
    """A view redrawn in place. Takes over the terminal at the first update, and releases it in `close`."""

    def __init__(self, stream: TextIO, *, target: int, title: str = "pipelinerl") -> None:
        super().__init__(stream)
        self._target = target
        self._title = title
        self._trends = Trends()
        self._first_s = self._drawn_s = 0.0
        self._last: tuple[Mapping[str, StageStatus], float] | None = None
        console = Console(file=stream, force_terminal=True)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def update(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        super().update(statuses, now)
        first = self._last is None
        shown = {stage: msgspec.structs.replace(one, detail=printable(one.detail)) for stage, one in statuses.items()}
        self._last = (shown, now)
        if first:
            self._first_s = now
            self._live.start()
        if first or now - self._drawn_s >= REDRAW_S:
            self._draw(*self._last)

    def say(self, text: str) -> None:
        self._live.console.print(printable(text.expandtabs()), markup=False, highlight=False)

    def close(self) -> None:
        if self._last is not None and self._live.is_started:
            self._draw(*self._last)
            self._live.stop()

    def _draw(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        self._drawn_s = now
        self._trends.observe(statuses, now)
        body = render(statuses, now, self._target, self._trends, now - self._first_s, width=self._live.console.width)
        panel = Panel(body, title=escape(self._title), title_align="left", border_style="dim", padding=(0, 1))
        self._live.update(panel, refresh=True)


def render(
    statuses: Mapping[str, StageStatus], now: float, target: int, trends: Trends, elapsed_s: float, *, width: int = 120
) -> RenderableType:
    """The view at `now` (`time.monotonic`) of a run of `target` optimizer steps. Stages may be missing."""
    version = (trainer_progress(statuses) or TrainerProgress()).version
    share, left = version / target if target else 0.0, trends.remaining_s(max(0, target - version))
    bar = Table.grid(expand=True)
    bar.add_row(ProgressBar(max(1, target), version))
    times = f"   {share:.0%}   {duration(elapsed_s)} elapsed, {duration(left)} left"
    return Group(
        Text(f"step {version}/{target}", "bold").append(times, "not bold"),
        bar,
        _learning_line(statuses, trends),
        Text(),
        _stages(statuses, trends, now, rates=width >= NARROW),
        Text(),
        _facts(statuses),
    )


def sparkline(values: Iterable[float], width: int) -> str:
    """The values as bars, scaled to their minimum and maximum; more than `width` values are averaged to `width` bars."""
    points = list(values)
    count = min(width, len(points))
    edges = [len(points) * i // count for i in range(count + 1)] if count else []
    means = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, spread = min(means), max(means) - min(means)
    return "".join(_BARS[int((mean - low) / spread * (len(_BARS) - 1) + 0.5) if spread else 0] for mean in means)


def _learning_line(statuses: Mapping[str, StageStatus], trends: Trends) -> RenderableType:
    actor = actor_total(statuses) or ActorProgress()
    trainer = trainer_progress(statuses) or TrainerProgress()
    known = headline(trainer.latest)
    line = Text() if known else Text("no optimizer step yet   ", "dim")
    for name, shown in known:
        line.append(f"{name} ", "dim").append(shown, "bold")
        if name == "reward" and len(trends.rewards) > 1:
            line.append(f" {sparkline(trends.rewards, 16)}", "green")
        line.append("   ")
    for when, reward in actor.evaluations.items():
        line.append(f"held-out {when} ", "dim").append(f"{reward:.3f}   ", "bold")
    return line


def _stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float, *, rates: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("doing, or waiting for", ratio=1)
    if rates:
        table.add_column("busy", no_wrap=True, justify="right")
        table.add_column("throughput", no_wrap=True)
    for status in statuses.values():
        mark, style = _MARKS[status.state]
        state = Text(f"{mark} {status.state} {duration(now - status.since_s)}", style)
        silent_s = now - status.written_s
        detail = Text(status.detail, "" if status.state == "working" else style)
        if status.state in ("working", "waiting") and silent_s > SILENT_S:
            detail = Text(f"no report for {duration(silent_s)}; {status.detail}", "bold red")
        table.add_row(status.stage, state, detail, *(throughput(status, trends) if rates else ()))
    if not statuses:
        table.add_row("-", Text("◌ starting", "cyan"), NO_STAGE)
    return table


def _facts(statuses: Mapping[str, StageStatus]) -> RenderableType:
    """Weights, slots and rollouts, as the stages have counted them."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    engine, actor = engine_total(statuses), actor_total(statuses)
    trainer = trainer_progress(statuses) or TrainerProgress()
    if engine is not None:
        last = f", last pause {pause(engine.pauses_s[-1])}" if engine.pauses_s else ""
        published = f"trainer at version {trainer.version}, engine at {engine.version}"
        table.add_row("weights", f"{published}; {engine.weight_updates} updates applied{last}")
        table.add_row("engine", f"{engine.in_progress} of {engine.slots} slots in progress, {engine.queued} queued")
    if actor is not None:
        counts = (
            f"{actor.rollouts_started} started, {trainer.trained} trained, {trainer.queued} queued, "
            f"{actor.rollouts_in_progress} in progress"
        )
        dropped = dropped_by_reason(statuses)
        text = Text(f"{counts}, ").append(f"{dropped.total()} dropped", "bold yellow" if dropped else "")
        table.add_row("rollouts", text.append(f" ({reasons(dropped)})" if dropped else ""))
    return table

"""The view that is redrawn in place on a terminal. It is imported only there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.metrics.statistics import actor_total, trainer_progress
from pipelinerl.status.screen import (
    NO_STAGE,
    REDRAW_S,
    RunView,
    Trends,
    duration,
    facts,
    headline,
    printable,
    shown_stages,
)
from pipelinerl.types import ActorProgress, StageStatus, TrainerProgress

NARROW = 92
"""Columns of a terminal below which the rates of stages are left out."""

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
        self._last = (dict(statuses), now)
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
    counts = Table.grid(padding=(0, 2))
    counts.add_column(style="dim", no_wrap=True)
    counts.add_column()
    for name, text in facts(statuses).items():
        counts.add_row(name, Text(text))
    return Group(
        Text(f"step {version}/{target}", "bold").append(times, "not bold"),
        bar,
        _learning_line(statuses),
        Text(),
        _stages(statuses, trends, now, rates=width >= NARROW),
        Text(),
        counts,
    )


def _learning_line(statuses: Mapping[str, StageStatus]) -> RenderableType:
    known = headline((trainer_progress(statuses) or TrainerProgress()).latest)
    line = Text() if known else Text("no optimizer step yet   ", "dim")
    for name, shown in known.items():
        line.append(f"{name} ", "dim").append(f"{shown}   ", "bold")
    for when, reward in (actor_total(statuses) or ActorProgress()).evaluations.items():
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
    for one in shown_stages(statuses, trends, now):
        mark, style = _MARKS[one.state]
        detail = Text(one.detail, "" if one.state == "working" else style)
        if one.silent_s is not None:
            detail = Text(f"no report for {duration(one.silent_s)}; {one.detail}", "bold red")
        state = Text(f"{mark} {one.state} {duration(one.for_s)}", style)
        table.add_row(one.stage, state, detail, *((one.busy, one.rate) if rates else ()))
    if not statuses:
        table.add_row("-", Text("◌ starting", "cyan"), NO_STAGE)
    return table

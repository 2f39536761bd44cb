"""The view that is redrawn in place on a terminal. It is imported only there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.metrics.totals import actor_total, engine_total, trainer_progress
from pipelinerl.status.screen import (
    NO_STAGE,
    REDRAW_S,
    SILENT_S,
    Trends,
    View,
    dropped_by_reason,
    duration,
    headline,
    pause,
    printable,
    reasons,
    throughput,
    wait_line,
)
from pipelinerl.types import ActorProgress, StageStatus, TrainerProgress

NARROW = 92
"""Columns of a terminal below which a stage takes two lines."""

_BARS = "▁▂▃▄▅▆▇█"
MARKS = {
    "starting": ("◌", "cyan"),
    "working": ("●", "green"),
    "waiting": ("◦", "yellow"),
    "done": ("✓", "blue"),
    "failed": ("✗", "bold red"),
}


class LiveView(View):
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
        elapsed_s = now - self._first_s
        width, title = self._live.console.width, self._title
        screen = render(statuses, now, self._target, trends=self._trends, elapsed_s=elapsed_s, title=title, width=width)
        self._live.update(screen, refresh=True)


def render(
    statuses: Mapping[str, StageStatus],
    now: float,
    target: int,
    *,
    trends: Trends | None = None,
    elapsed_s: float | None = None,
    title: str = "pipelinerl",
    width: int = 120,
) -> RenderableType:
    """The whole view at `now` (`time.monotonic`) of a run of `target` optimizer steps. Stages may be missing."""
    trends = trends or Trends()
    progress, stages = (_narrow_progress, _narrow_stages) if width < NARROW else (_progress_line, _stages)
    trainer = trainer_progress(statuses) or TrainerProgress()
    body = Group(
        progress(trainer.version, target, trends, elapsed_s),
        Text(),
        _learning_line(statuses, trends),
        Text(),
        stages(statuses, trends, now),
        Text(),
        _facts(statuses, now),
    )
    return Panel(body, title=escape(title), title_align="left", border_style="dim", padding=(0, 1))


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


def _progress_line(version: int, target: int, trends: Trends, elapsed_s: float | None) -> RenderableType:
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    share = version / target if target else 0.0
    left = trends.remaining_s(max(0, target - version))
    times = f"{share:4.0%}   {duration(elapsed_s)} elapsed, {duration(left)} left"
    line.add_row(Text(f"step {version}/{target}", "bold"), ProgressBar(max(1, target), version), times)
    return line


def _learning_line(statuses: Mapping[str, StageStatus], trends: Trends) -> RenderableType:
    actor = actor_total(statuses) or ActorProgress()
    trainer = trainer_progress(statuses) or TrainerProgress()
    known = [(name, shown) for name, shown in headline(trainer.latest) if shown != "-"]
    line = Text() if known else Text("no optimizer step yet   ", "dim")
    for name, shown in known:
        line.append(f"{name} ", "dim").append(shown, "bold")
        if name == "reward" and len(trends.rewards) > 1:
            line.append(f" {sparkline(trends.rewards, 16)}", "green")
        line.append("   ")
    for when, reward in actor.evaluations.items():
        line.append(f"held-out {when} ", "dim").append(f"{reward:.3f}   ", "bold")
    return line


def _stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("doing, or waiting for", ratio=1)
    table.add_column("busy", no_wrap=True, justify="right")
    table.add_column("throughput", no_wrap=True)
    for status in statuses.values():
        mark, style = MARKS[status.state]
        since = duration(now - status.since_s)
        busy, rates = throughput(status, trends)
        table.add_row(status.stage, Text(f"{mark} {status.state}", style), since, detail_of(status, now), busy, rates)
    if not statuses:
        table.add_row("-", Text("◌ starting", "cyan"), "", NO_STAGE, "", "")
    return table


def detail_of(status: StageStatus, now: float) -> Text:
    silent_s = now - status.written_s
    if status.state in ("working", "waiting") and silent_s > SILENT_S:
        return Text(f"no report for {duration(silent_s)}; {status.detail}", "bold red")
    return Text(status.detail, "" if status.state == "working" else MARKS[status.state][1])


def _facts(statuses: Mapping[str, StageStatus], now: float) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    engine, actor, trainer = (
        engine_total(statuses),
        actor_total(statuses),
        trainer_progress(statuses) or TrainerProgress(),
    )
    if statuses:
        table.add_row("wait", Text(wait_line(statuses, now)))
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


def _narrow_progress(version: int, target: int, trends: Trends, elapsed_s: float | None) -> RenderableType:
    """The step, a bar, and the times in a line each."""
    lines = Table.grid(expand=True)
    lines.add_row(Text(f"step {version}/{target}", "bold"))
    lines.add_row(ProgressBar(max(1, target), version))
    left, share = trends.remaining_s(max(0, target - version)), version / target if target else 0.0
    lines.add_row(f"{share:.0%}   {duration(elapsed_s)} elapsed, {duration(left)} left")
    return lines


def _narrow_stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float) -> RenderableType:
    """Two lines for each stage: what it is, and what it does or waits for."""
    lines = Table.grid()
    for status in statuses.values():
        mark, style = MARKS[status.state]
        line = Text.assemble((mark, style), f" {status.stage} ", (f"{status.state} {duration(now - status.since_s)}", style))
        for shown in throughput(status, trends):
            line.append(f"  {shown}" if shown else "", "dim")
        lines.add_row(line)
        if status.detail:
            lines.add_row(Padding(detail_of(status, now), (0, 0, 0, 2)))
    if not statuses:
        lines.add_row(NO_STAGE)
    return lines

"""The parts of the terminal view that need another layout on a narrow terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.status.screen import MARKS, NO_STAGE, Trends, detail_of, duration, throughput
from pipelinerl.types import StageStatus


def progress(version: int, target: int, trends: Trends, elapsed_s: float | None) -> RenderableType:
    """The step, a bar, and the times in a line each."""
    lines = Table.grid(expand=True)
    lines.add_row(Text(f"step {version}/{target}", "bold"))
    lines.add_row(ProgressBar(max(1, target), version))
    left, share = trends.remaining_s(max(0, target - version)), version / target if target else 0.0
    lines.add_row(f"{share:.0%}   {duration(elapsed_s)} elapsed, {duration(left)} left")
    return lines


def stages(statuses: Mapping[str, StageStatus], trends: Trends, now: float) -> RenderableType:
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

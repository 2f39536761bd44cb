"""The terminal table of an evaluation: one row per model, with intervals below the estimates."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelinerl.experiments.evaluate.records import EvaluationSummary, ModelResult
from pipelinerl.experiments.statistics import Interval, powers_of_two

_WIDTH = 400
"""Wide enough that no column is wrapped or cut."""


def evaluation_table(summary: EvaluationSummary) -> str:
    settings = summary.settings
    ks = powers_of_two(settings.attempts)
    compared = len(summary.models) > 1
    title = f"{settings.environment}: {settings.attempts} attempts at each problem, temperature {settings.temperature:g}"
    caption = f"in brackets: {settings.level:.0%} intervals over problems"
    if summary.status == "interrupted":
        caption += "; INTERRUPTED: short answers end first, so the counted problems are not typical"
    table = Table(
        # `Text`, so that a path in the title is not read as markup.
        title=Text(title + (", training problems" if settings.training_problems else "")),
        caption=caption + ("; differences are paired" if compared else ""),
        title_justify="left",
        caption_justify="left",
        border_style="dim",
    )
    table.add_column("model", no_wrap=True)
    names = ["problems", f"mean@{settings.attempts}", *(f"pass@{k}" for k in ks)]
    names += [f"{name} - first" for name in (names[1], names[2])] if compared else []
    for name in (*names, "tokens", "cut", "failed"):
        table.add_column(name, no_wrap=True, justify="right")
    for model in summary.models:
        table.add_row(Text(model.name), *_numbers(model, ks, compared), *_counts(model))
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH)
    console.print(table)
    names = sorted({name for model in summary.models for name in model.metrics})
    if names:
        console.print(_metrics_table(names, summary.models))
    return text.getvalue()


def _metrics_table(names: Sequence[str], models: Sequence[ModelResult]) -> Table:
    """One row per metric of the environment, one column per model."""
    table = Table(caption="means over the attempts that have the metric", caption_justify="left", border_style="dim")
    table.add_column("metric", no_wrap=True)
    for model in models:
        table.add_column(Text(model.name), no_wrap=True, justify="right")
    for name in names:
        table.add_row(Text(name), *(f"{model.metrics[name]:.4g}" if name in model.metrics else "-" for model in models))
    return table


def _numbers(model: ModelResult, ks: tuple[int, ...], compared: bool) -> list[str]:
    found, difference = model.estimates, model.minus_first
    cells = [str(model.problems), *(["-"] * (1 + len(ks)))]
    if found is not None:
        cells[1:] = [_cell(found.reward, ".3f"), *(_cell(found.passes[k], ".3f") for k in ks)]
    if not compared:
        return cells
    if difference is None:
        return [*cells, "", ""]
    return [*cells, _cell(difference.reward, "+.3f"), _cell(difference.passes[1], "+.3f")]


def _counts(model: ModelResult) -> tuple[str, str, str]:
    length = "-" if model.length_mean is None else f"{model.length_mean:.1f}"
    cut = "-" if model.cut is None else f"{model.cut:.1%}"
    failed = "\n".join(f"{count} {reason}" for reason, count in model.failed.items())
    return length, cut, failed or "0"


def _cell(interval: Interval, pattern: str) -> str:
    return f"{interval.mean:{pattern}}\n({interval.low:{pattern}}, {interval.high:{pattern}})"

"""The figures that compare runs, as PNGs.

They show learning (the paper's Figure 5), on-policyness (Figure 6), batch size and throughput. Runs with the same
label are repetitions: they share a colour and one entry of the legend. Each run has its own line, so that the spread
between runs is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle, zip_longest
from typing import Any, NamedTuple

from pipelinerl.metrics.statistics import REWARD
from pipelinerl.report import series
from pipelinerl.report.curves import (
    Curves,
    draw_environment,
    draw_metric,
    finish_axes,
    line,
    new_figure,
    png_of,
    points,
    prepare,
)
from pipelinerl.report.series import WINDOW, BatchSize, LagByPosition, RunRecords

COLOURS = ("#1f5fbf", "#d1600a", "#2a8c4a", "#a03070", "#8a6d00", "#4b4b9f", "#00868b", "#7a3b10")
MOST_PANELS = 12
"""Metrics that are drawn; the table has all."""
SHOWN_S = 20.0
"""Batch sizes are drawn over at most this time, in the middle of a run. A round takes about a second."""


class DrawnRun(NamedTuple):
    """The numbers of one run to compare with others; times are seconds since `RunRecords.begin_s`.

    `slots` is H over all engines. If `lag` or `batch` is None, the run is missing from those panels.
    """

    label: str
    curves: Curves
    slots: int
    lag: LagByPosition | None = None
    batch: BatchSize | None = None


def drawn_run(records: RunRecords, label: str) -> DrawnRun:
    """The numbers of a run's figures, with rewards averaged over a window of steps in all but short runs.

    `records` must have at least one step.
    """
    steps, begin_s = records.steps, records.begin_s
    curves = prepare(steps, records.evaluations, begin_s)
    if len(steps) >= 2 * WINDOW:
        latest = [series.pooled(steps[max(0, end - WINDOW) : end]) for end in range(1, len(steps) + 1)]
        curves = curves._replace(
            reward=series.windowed(curves.reward),
            by_environment={name: [m.get(name + REWARD, math.nan) for m in latest] for name in curves.by_environment},
            by_metric={name: [m.get(name, math.nan) for m in latest] for name in curves.by_metric},
        )
    batch = series.batch_size_over_time(records.timeline, begin_s) if records.timeline else None
    return DrawnRun(label, curves, records.slots, records.lag, batch)


class Panel(NamedTuple):
    """Axes on which every run has one line: the x and y of a run, and the limits of y. `held_out`: and its evaluations."""

    title: str
    x_label: str
    y_label: str
    line: Callable[[DrawnRun], tuple[Sequence[float], Sequence[float]]]
    bottom: float | None = None
    top: float | None = None
    held_out: bool = False


def _styled(runs: Sequence[DrawnRun]) -> list[tuple[DrawnRun, dict[str, Any]]]:
    """Each run with the style of its line: one colour per label, and the label only for its first run."""
    colours = dict(zip(dict.fromkeys(run.label for run in runs), cycle(COLOURS)))
    labelled: set[str] = set()
    styled: list[tuple[DrawnRun, dict[str, Any]]] = []
    for run in runs:
        styled.append((run, {"color": colours[run.label], "label": None if run.label in labelled else run.label}))
        labelled.add(run.label)
    return styled


def _panels(runs: Sequence[DrawnRun], *panels: Panel, target: float | None = None) -> bytes:
    """Panels side by side; the target reward as a dashed line in the panels of rewards."""
    figure = new_figure(15, 4.4)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for run, style in _styled(runs):
            line(axes, *panel.line(run), **style)
            if panel.held_out:
                points(axes, [(one.time_s, one) for one in run.curves.held_out], **style | {"label": None, "fmt": "D"})
        if target is not None and "reward" in panel.y_label:
            _dash(axes, target)
        finish_axes(axes, panel.title, panel.x_label, panel.y_label)
        axes.set_ylim(panel.bottom, panel.top)
    return png_of(figure)


def _dash(axes: Any, height: float) -> None:
    axes.axhline(height, color="0.35", linestyle="--", linewidth=1, zorder=1)


def learning(runs: Sequence[DrawnRun], target: float | None = None) -> bytes:
    """Reward over time, reward over samples, samples over time; the target reward as a dashed line."""
    reward, samples = "mean training reward", "rollouts trained"
    return _panels(
        runs,
        Panel("Reward over time", "seconds", reward, lambda run: (run.curves.time_s, run.curves.reward), held_out=True),
        Panel("Reward over samples", samples, reward, lambda run: (run.curves.samples, run.curves.reward)),
        Panel("Samples over time", "seconds", samples, lambda r: ([0.0, *r.curves.time_s], [0, *r.curves.samples])),
        target=target,
    )


def on_policyness(runs: Sequence[DrawnRun]) -> bytes:
    """Largest lag and ESS over samples, and mean lag of a token by its position in the completion."""

    def by_position(run: DrawnRun) -> tuple[list[float], list[float]]:
        return (run.lag.position, run.lag.mean) if run.lag else ([], [])

    lag, ess, samples = "optimizer steps", "effective sample size (1 = on-policy)", "rollouts trained"
    position = "position of the token in the completion"
    return _panels(
        runs,
        Panel("Largest lag of a trained token", samples, lag, lambda r: (r.curves.samples, r.curves.lag_max), bottom=0),
        Panel("On-policyness", samples, ess, lambda run: (run.curves.samples, run.curves.ess), bottom=0, top=1.05),
        Panel("Lag by position", position, f"mean lag, {lag}", by_position, bottom=0),
    )


def throughput(runs: Sequence[DrawnRun]) -> bytes:
    """Tokens generated and trained per second over time, and the length of trained completions over samples."""
    length = "mean sampled tokens"
    return _panels(
        runs,
        Panel("Tokens generated", "seconds", "tokens/s", lambda r: (r.curves.time_s, r.curves.generated_tokens_per_s)),
        Panel(
            "Tokens trained on, with gradient",
            "seconds",
            "tokens/s",
            lambda r: (r.curves.time_s, r.curves.trained_tokens_per_s),
        ),
        Panel("Completion length", "rollouts trained", length, lambda r: (r.curves.samples, r.curves.trained_length_mean)),
    )


def held_out(runs: Sequence[DrawnRun], target: float | None = None) -> bytes | None:
    """Held-out reward over versions, with version ranges, and over time; the target reward as a dashed line.

    None if no run has evaluations between its first and its last version.
    """
    if not any(run.curves.online or len(run.curves.held_out) > 2 for run in runs):
        return None
    figure = new_figure(15, 4.4)
    by_version, by_time = figure.subplots(1, 2)
    for run, style in _styled(runs):
        points(by_version, [(one.version, one) for one in run.curves.held_out], spans=True, **style)
        points(by_time, [(one.time_s, one) for one in run.curves.held_out], **style)
    for axes, over, x_label in ((by_version, "versions", "optimizer step"), (by_time, "time", "seconds")):
        if target is not None:
            _dash(axes, target)
        finish_axes(axes, f"Held-out reward over {over}", x_label, "mean held-out reward")
    return png_of(figure)


def environments(runs: Sequence[DrawnRun]) -> bytes | None:
    """Training and held-out reward in one panel per environment of a mixture; None if no run has several environments."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves.by_environment))
    return _panel_each(runs, names, draw_environment, "mean reward")


def metrics(runs: Sequence[DrawnRun]) -> bytes | None:
    """Means of the rollouts' metrics, one panel per metric; None if no run has any."""
    names = sorted({name for run in runs for name in run.curves.by_metric})
    return _panel_each(runs, names[:MOST_PANELS], draw_metric, "mean")


def _panel_each(runs: Sequence[DrawnRun], names: Sequence[str], draw: Callable[..., None], y_label: str) -> bytes | None:
    if not names:
        return None
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(15, 4.4 * rows)
    panels: Any = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip_longest(panels.flat, names):
        if name is None:
            axes.set_visible(False)
            continue
        for run, style in _styled(runs):
            draw(axes, run.curves, name, "D--", **style)
        finish_axes(axes, name, "optimizer step", y_label)
    return png_of(figure)


def batch_sizes(runs: Sequence[DrawnRun]) -> bytes | None:
    """Sequences in progress for some seconds in the middle of a run; one panel for the first run of each label; dashed: H.

    None if no run has a timeline.
    """
    first: dict[str, tuple[DrawnRun, BatchSize, str]] = {}
    for run, style in _styled(runs):
        if run.batch is not None:
            first.setdefault(run.label, (run, run.batch, style["color"]))
    if not first:
        return None
    figure = new_figure(15, 0.8 + 1.5 * len(first))
    panels = figure.subplots(len(first), 1, squeeze=False)[:, 0]
    for axes, (run, batch, color) in zip(panels, first.values(), strict=True):
        end_s = run.curves.time_s[-1]
        middle_s, shown_s = end_s / 2, min(SHOWN_S, end_s)
        axes.step(batch.time_s, batch.in_progress, where="post", color=color, linewidth=1.2)
        _dash(axes, run.slots)
        axes.set_xlim(middle_s - shown_s / 2, middle_s + shown_s / 2)
        finish_axes(axes, run.label, "", "in progress")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds")
    return png_of(figure)

"""The figure of one run, `curves.png`: six plots. The page of a report has more."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.report import write_file
from pipelinerl.report.series import StepColumns
from pipelinerl.run_directory import RunDirectory

MANY_POINTS = 40
"""Lines with more points than this are drawn without markers."""

SMOOTHED = 5


def draw_curves(run_dir: Path, path: Path) -> None:
    """Draw the curves of the run in `run_dir` to a PNG file at `path`.

    Raises RunDirectoryError if there is no step to draw, the records are damaged, or `path` can't be written.
    """
    run = RunDirectory(run_dir)
    steps = read_records(run.metrics, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run.metrics} holds no optimizer step")
    found = read_records(run.evaluations, EvaluationRecord)
    evaluations = [one for one in found if one.reward_mean is not None]
    columns = StepColumns()
    for step in steps:
        columns.add(step, evaluations)
    figure = _draw(columns, evaluations)
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    write_file(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _draw(columns: StepColumns, evaluations: Sequence[EvaluationRecord]) -> Figure:
    figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
    panels: Any = figure.subplots(2, 3)
    (by_time, by_samples, ess), (lag, tokens, length) = panels
    steps, seconds = columns["version"], [60 * minutes for minutes in columns["minutes"]]
    # Of all rollouts read, or in records of older versions of those trained on.
    reward = columns["reward_read_mean" if "reward_read_mean" in columns.names else "reward_mean"]
    _line(by_time, seconds, reward, "training, all rollouts read")
    online = [one for one in evaluations if one.when == "online"]
    _points(by_time, columns, online, "held out, during training", color="0.45")
    for one, face in zip((one for one in evaluations if one.when != "online"), cycle(("white", "black"))):
        label = f"held out, {one.when} training: {one.reward_mean:.3f}"
        _points(by_time, columns, [one], label, fmt="D", color="black", markerfacecolor=face, capsize=4)
    _finish(by_time, "Reward over time", "seconds of training", "mean reward")
    _line(by_samples, columns["rollouts"], reward, "training, all rollouts read")
    _finish(by_samples, "Reward over samples", "rollouts trained", "mean reward")
    _line(ess, steps, columns["ess"], "ESS")
    _finish(ess, "On-policyness", "optimizer step", "effective sample size (1 = on-policy)")
    ess.set_ylim(0, 1.05)
    _line(lag, steps, columns["lag_max"], "max")
    _line(lag, steps, columns["lag_mean"], "mean")
    _finish(lag, "Lag of the trained tokens", "optimizer step", "optimizer steps")
    lag.set_ylim(bottom=0)
    _line(tokens, seconds, smoothed(columns["engine/tokens_per_s"]), "generated")
    _line(tokens, seconds, smoothed(columns["trained_per_s"]), "trained on, with gradient")
    _finish(tokens, f"Throughput, mean of {SMOOTHED} steps", "seconds of training", "tokens/s")
    _line(length, steps, columns["completion_length_mean"], "trained")
    _line(length, steps, columns["sampled_length_mean"], "sampled")
    _line(length, steps, columns["started_length_mean"], "sampled, by order of start")
    _finish(length, "Completion length", "optimizer step", "mean tokens")
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the `SMOOTHED` - 1 before it, without NaN; NaN where all of these are."""
    windows = [[y for y in values[max(0, i + 1 - SMOOTHED) : i + 1] if not math.isnan(y)] for i in range(len(values))]
    return [fmean(window) if window else math.nan for window in windows]


def _line(axes: Any, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Draw a line; NaN leaves a gap. Draws nothing if all values are NaN."""
    if not all(math.isnan(value) for value in y):
        axes.plot(x, y, label=label, linewidth=1.5, marker="o" if len(x) <= MANY_POINTS else None, markersize=3)


def _points(axes: Any, columns: StepColumns, evaluations: Sequence[EvaluationRecord], label: str, **style: Any) -> None:
    """Draw the rewards of evaluations over time, with their standard errors."""
    if evaluations:
        seconds = [one.time_s - columns.begin_s for one in evaluations]
        rewards = [one.reward_mean for one in evaluations]
        errors = [one.reward_standard_error or 0.0 for one in evaluations]
        defaults = {"label": label, "fmt": "D--", "markersize": 4, "linewidth": 1, "capsize": 3, "zorder": 3}
        axes.errorbar(seconds, rewards, yerr=errors, **defaults | style)


def _finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """Set titles and grid, and a legend if there is more than one label."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)

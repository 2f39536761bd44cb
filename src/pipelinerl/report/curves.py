"""`curves.png`: how a run went, six plots from its `metrics.jsonl`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically
from pipelinerl.metrics.records import EVALUATIONS_FILE, METRICS_FILE, EvaluationRecord, StepRecord, read_records

MANY_POINTS = 40
"""Above this, lines are drawn without a mark at each step."""


class Mark(NamedTuple):
    """An evaluation on the axis of time: mean held-out reward, and half the height of its error bar."""

    label: str
    time_s: float
    reward: float
    standard_error: float


class Curves(NamedTuple):
    """What is drawn, one entry per optimizer step in every list; NaN where nothing was measured.

    `samples` counts rollouts trained so far. Rates are tokens per second since the step before.
    """

    version: list[int]
    time_s: list[float]
    samples: list[int]
    reward: list[float]
    ess: list[float]
    lag_mean: list[float]
    lag_max: list[float]
    generated_tokens_per_s: list[float]
    trained_tokens_per_s: list[float]
    trained_length_mean: list[float]
    sampled_length_mean: list[float]
    evaluations: list[Mark]


def prepare(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Curves:
    """The numbers of the plots. Pure. The first step has no rate: the time before it is mostly start-up."""

    def column(value: Callable[[StepRecord], float | None]) -> list[float]:
        return [math.nan if (number := value(step)) is None else number for step in steps]

    times_s = [step.time_s for step in steps]
    elapsed_s = [0.0, *(end - start for start, end in pairwise(times_s))]
    return Curves(
        version=[step.version for step in steps],
        time_s=times_s,
        samples=list(accumulate(step.samples for step in steps)),
        reward=column(lambda step: step.reward_mean),
        ess=column(lambda step: step.ess),
        lag_mean=column(lambda step: step.lag_mean),
        lag_max=column(lambda step: step.lag_max),
        generated_tokens_per_s=column(lambda step: step.engine.tokens_per_s if step.engine else None),
        trained_tokens_per_s=[
            step.tokens_trained / passed_s if passed_s > 0 else math.nan
            for step, passed_s in zip(steps, elapsed_s, strict=True)
        ],
        trained_length_mean=column(lambda step: step.completion_length_mean),
        sampled_length_mean=column(lambda step: step.sampled_length_mean),
        evaluations=[
            Mark(f"held out, {e.when} training", e.time_s, e.reward_mean, e.reward_standard_error or 0.0)
            for e in evaluations
            if e.reward_mean is not None
        ],
    )


def draw_curves(run_dir: Path, path: Path) -> None:
    """Draw the run in `run_dir` to a PNG at `path`.

    Raises RunDirectoryError when there is no step to draw, or the records are damaged, or `path` can't be written.
    """
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run_dir / METRICS_FILE} holds no optimizer step")
    figure = _draw(prepare(steps, read_records(run_dir / EVALUATIONS_FILE, EvaluationRecord)))
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    try:
        write_atomically(path, png.getvalue())
    except OSError as error:
        raise RunDirectoryError(f"can't write {path}: {error.strerror}") from error


def _draw(curves: Curves) -> Figure:
    figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
    (by_time, by_samples, ess), (lag, tokens, length) = figure.subplots(2, 3)
    steps = curves.version

    _line(by_time, curves.time_s, curves.reward, "training")
    for mark, face in zip(curves.evaluations, cycle(("white", "black"))):
        label = f"{mark.label}: {mark.reward:.3f}"
        style = {"fmt": "D", "color": "black", "markerfacecolor": face, "capsize": 4, "zorder": 3}
        by_time.errorbar(mark.time_s, mark.reward, mark.standard_error, label=label, **style)
    _axes(by_time, "Reward over time", "seconds", "mean reward")
    _line(by_samples, curves.samples, curves.reward, "training")
    _axes(by_samples, "Reward over samples", "rollouts trained", "mean reward")
    _line(ess, steps, curves.ess, "ESS")
    _axes(ess, "On-policyness", "optimizer step", "effective sample size (1 = on-policy)")
    ess.set_ylim(top=1.005)
    _line(lag, steps, curves.lag_max, "max")
    _line(lag, steps, curves.lag_mean, "mean")
    _axes(lag, "Lag of the trained tokens", "optimizer step", "optimizer steps")
    lag.set_ylim(bottom=0)
    _line(tokens, curves.time_s, curves.generated_tokens_per_s, "generated")
    _line(tokens, curves.time_s, curves.trained_tokens_per_s, "trained")
    _axes(tokens, "Throughput", "seconds", "tokens/s")
    _line(length, steps, curves.trained_length_mean, "trained")
    _line(length, steps, curves.sampled_length_mean, "sampled")
    _axes(length, "Completion length", "optimizer step", "mean tokens")
    return figure


def _line(axes: Any, x: Sequence[float], y: Sequence[float], label: str) -> None:
    if not all(math.isnan(value) for value in y):
        axes.plot(x, y, label=label, linewidth=1.5, marker="o" if len(x) <= MANY_POINTS else None, markersize=3)


def _axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)

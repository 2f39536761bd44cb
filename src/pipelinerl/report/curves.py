"""The figure of one run, `curves.png`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, cycle, pairwise, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord, When
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import EVALUATIONS_FILE, METRICS_FILE
from pipelinerl.metrics.statistics import REWARD
from pipelinerl.report import write_file

MANY_POINTS = 40
"""Lines with more points than this are drawn without markers."""

SMOOTHED = 5
MOST_METRICS = 6
"""Metrics in one panel."""

# ---- lines, points and axes


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches, at 110 dots per inch."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def png_of(figure: Figure) -> bytes:
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def line(axes: Any, x: Sequence[float], y: Sequence[float], label: str | None = None, **style: Any) -> None:
    """Draw a line; NaN leaves a gap. Draws nothing if all values are NaN."""
    if not all(math.isnan(value) for value in y):
        marker = "o" if len(x) <= MANY_POINTS else None
        axes.plot(x, y, **{"label": label, "linewidth": 1.5, "marker": marker, "markersize": 3} | style)


def points(
    axes: Any, found: Sequence[tuple[float, HeldOut]], label: str | None = None, *, spans: bool = False, **style: Any
) -> None:
    """Draw evaluations, given as (x, evaluation), with standard errors and, if `spans`, their ranges of versions."""
    if found:
        ranges = [[x - one.oldest for x, one in found], [one.newest - x for x, one in found]]
        axes.errorbar(
            [x for x, _ in found],
            [one.reward for _, one in found],
            yerr=[one.standard_error for _, one in found],
            xerr=ranges if spans else None,
            **{"label": label, "fmt": "D--", "markersize": 4, "linewidth": 1, "capsize": 3, "zorder": 3} | style,
        )


def finish_axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """Set titles and grid, and a legend if there is more than one label."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the `SMOOTHED` - 1 before it, without NaN; NaN where all of these are."""
    windows = [[y for y in values[max(0, i + 1 - SMOOTHED) : i + 1] if not math.isnan(y)] for i in range(len(values))]
    return [fmean(window) if window else math.nan for window in windows]


# ---- the numbers of a run


class HeldOut(NamedTuple):
    """One evaluation. `version` is the mean version of its tokens, `oldest` and `newest` the range; `time_s` is its end."""

    when: When
    version: float
    oldest: int
    newest: int
    time_s: float
    reward: float
    standard_error: float
    metrics: Mapping[str, float]


class Curves(NamedTuple):
    """The numbers to draw; the lists of numbers have one entry per optimizer step, NaN if nothing was measured.

    `samples` counts rollouts trained so far. Rates are tokens per second since the previous step. `by_environment` has the
    mean reward of each environment of a mixture, `by_metric` the means of all other metrics of the rollouts. `held_out` has
    all evaluations, by version.
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
    started_length_mean: list[float]
    by_environment: dict[str, list[float]]
    by_metric: dict[str, list[float]]
    held_out: list[HeldOut]

    @property
    def online(self) -> list[HeldOut]:
        """Evaluations during training."""
        return [one for one in self.held_out if one.when == "online"]


def prepare(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord], begin_s: float = 0.0) -> Curves:
    """The numbers of the plots, with times since `begin_s`. The first step has no rate: the time before it is start-up."""

    def column(value: Callable[[StepRecord], float | None]) -> list[float]:
        return [math.nan if (number := value(step)) is None else number for step in steps]

    names = environments(steps)
    others = sorted({name for step in steps for name in step.metrics} - {name + REWARD for name in names})
    elapsed_s = [0.0, *(after.time_s - before.time_s for before, after in pairwise(steps))]
    trained = zip(steps, elapsed_s, strict=True)
    return Curves(
        version=[step.version for step in steps],
        time_s=[step.time_s - begin_s for step in steps],
        samples=list(accumulate(step.samples for step in steps)),
        reward=column(lambda step: step.reward),
        ess=column(lambda step: step.ess),
        lag_mean=column(lambda step: step.lag_mean),
        lag_max=column(lambda step: step.lag_max),
        generated_tokens_per_s=column(lambda step: step.engine.tokens_per_s if step.engine else None),
        trained_tokens_per_s=[step.tokens_trained / passed_s if passed_s > 0 else math.nan for step, passed_s in trained],
        trained_length_mean=column(lambda step: step.completion_length_mean),
        sampled_length_mean=column(lambda step: step.sampled_length_mean),
        started_length_mean=column(lambda step: step.started_length_mean),
        by_environment={name: [step.metrics.get(name + REWARD, math.nan) for step in steps] for name in names},
        by_metric={name: [step.metrics.get(name, math.nan) for step in steps] for name in others},
        held_out=[one._replace(time_s=one.time_s - begin_s) for one in held_out(evaluations)],
    )


def held_out(evaluations: Iterable[EvaluationRecord]) -> list[HeldOut]:
    """The evaluations that have a reward, by version."""
    found = [
        HeldOut(
            when=one.when,
            version=one.version if one.version_mean is None else one.version_mean,
            oldest=one.version if one.version_min is None else one.version_min,
            newest=one.version if one.version_max is None else one.version_max,
            time_s=one.time_s,
            reward=one.reward_mean,
            standard_error=one.reward_standard_error or 0.0,
            metrics=one.metrics,
        )
        for one in evaluations
        if one.reward_mean is not None
    ]
    return sorted(found, key=lambda one: one.version)


def environments(steps: Iterable[StepRecord]) -> list[str]:
    """Names of a mixture's environments, from the metrics called `NAME/reward`; empty if there are fewer than two."""
    names = {name.removesuffix(REWARD): None for step in steps for name in step.metrics if name.endswith(REWARD)}
    return sorted(names) if len(names) > 1 else []


# ---- one run: `curves.png` has six plots, and more for online evaluations, mixtures of environments, and metrics


def draw_curves(run_dir: Path, path: Path) -> None:
    """Draw the curves of the run in `run_dir` to a PNG file at `path`.

    Raises RunDirectoryError if there is no step to draw, the records are damaged, or `path` can't be written.
    """
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run_dir / METRICS_FILE} holds no optimizer step")
    evaluations = read_records(run_dir / EVALUATIONS_FILE, EvaluationRecord)
    figure = _draw(prepare(steps, evaluations, min(steps[0].time_s, max(0.0, _ready_s(steps[0], evaluations)))))
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    write_file(path, png_of(figure))


def _ready_s(first: StepRecord, evaluations: Sequence[EvaluationRecord]) -> float:
    """When the trainer was ready and an evaluation before training had ended: what came before is start-up."""
    return max([first.time_s - first.train_s - first.wait_s, *(one.time_s for one in evaluations if one.when == "before")])


def _draw(curves: Curves) -> Figure:
    extras: list[Callable[[Any, Curves], None]] = []
    if curves.online or curves.by_environment or curves.by_metric:
        wanted = (
            (draw_held_out, curves.online),
            (draw_environments, curves.by_environment),
            (draw_metrics, curves.by_metric),
        )
        extras = [draw for draw, data in wanted if data]
    columns = 3 + -(-len(extras) // 2)
    figure = new_figure(5 * columns, 8)
    panels: Any = figure.subplots(2, columns)
    (by_time, by_samples, ess), (lag, tokens, length) = panels[:, :3]
    for axes, draw in zip_longest(panels[:, 3:].flat, extras):
        draw(axes, curves) if draw else axes.set_visible(False)
    steps = curves.version

    line(by_time, curves.time_s, curves.reward, "training, all rollouts read")
    points(by_time, [(one.time_s, one) for one in curves.online], "held out, during training", color="0.45")
    ends = [one for one in curves.held_out if one.when != "online"]
    for one, face in zip(ends, cycle(("white", "black"))):
        label = f"held out, {one.when} training: {one.reward:.3f}"
        style = {"fmt": "D", "color": "black", "markerfacecolor": face, "capsize": 4, "zorder": 3}
        by_time.errorbar(one.time_s, one.reward, one.standard_error, label=label, **style)
    finish_axes(by_time, "Reward over time", "seconds of training", "mean reward")
    line(by_samples, curves.samples, curves.reward, "training, all rollouts read")
    finish_axes(by_samples, "Reward over samples", "rollouts trained", "mean reward")
    line(ess, steps, curves.ess, "ESS")
    finish_axes(ess, "On-policyness", "optimizer step", "effective sample size (1 = on-policy)")
    ess.set_ylim(0, 1.05)
    line(lag, steps, curves.lag_max, "max")
    line(lag, steps, curves.lag_mean, "mean")
    finish_axes(lag, "Lag of the trained tokens", "optimizer step", "optimizer steps")
    lag.set_ylim(bottom=0)
    line(tokens, curves.time_s, smoothed(curves.generated_tokens_per_s), "generated")
    line(tokens, curves.time_s, smoothed(curves.trained_tokens_per_s), "trained on, with gradient")
    finish_axes(tokens, f"Throughput, mean of {SMOOTHED} steps", "seconds of training", "tokens/s")
    line(length, steps, curves.trained_length_mean, "trained")
    line(length, steps, curves.sampled_length_mean, "sampled")
    line(length, steps, curves.started_length_mean, "sampled, by order of start")
    finish_axes(length, "Completion length", "optimizer step", "mean tokens")
    return figure


# ---- panels that only some runs have


def draw_held_out(axes: Any, curves: Curves) -> None:
    """Held-out reward over versions, with version ranges and standard errors, drawn over the training reward."""
    line(axes, curves.version, curves.reward, "training", alpha=0.35)
    points(axes, [(one.version, one) for one in curves.held_out], "held out", spans=True, color="black")
    of_sets = {name for one in curves.held_out for name in one.metrics if name.endswith(REWARD)}
    for number, name in enumerate(sorted(of_sets - {one + REWARD for one in curves.by_environment})):
        label = name.removesuffix(REWARD)
        _draw_held_out_metric(axes, curves, name, "D--", color=f"C{number + 1}", markersize=4, label=label)
    finish_axes(axes, "Held-out reward", "optimizer step", "mean reward")


def draw_environments(axes: Any, curves: Curves) -> None:
    """Training reward of each environment over optimizer steps; diamonds are held-out rewards."""
    for number, (name, rewards) in enumerate(curves.by_environment.items()):
        line(axes, curves.version, rewards, name, color=f"C{number}")
        _draw_held_out_metric(axes, curves, name + REWARD, "D", color=f"C{number}")
    finish_axes(axes, "Reward by environment (diamonds: held out)", "optimizer step", "mean reward")


def draw_metrics(axes: Any, curves: Curves) -> None:
    """The metrics of the rollouts, those of several reward functions among them."""
    for number, (name, means) in enumerate(list(curves.by_metric.items())[:MOST_METRICS]):
        line(axes, curves.version, means, name, color=f"C{number}")
        _draw_held_out_metric(axes, curves, name, "D", color=f"C{number}")
    left = len(curves.by_metric) - MOST_METRICS
    finish_axes(axes, "Metrics of the rollouts" + (f" ({left} more: report)" if left > 0 else ""), "optimizer step", "mean")


def _draw_held_out_metric(axes: Any, curves: Curves, name: str, diamonds: str, **style: Any) -> None:
    known = [one for one in curves.held_out if name in one.metrics]
    axes.plot([one.version for one in known], [one.metrics[name] for one in known], diamonds, linewidth=1, **style)

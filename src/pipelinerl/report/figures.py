"""All figures of runs as PNGs: `curves.png` of one run, and the figures that compare runs.

The comparison has learning (the paper's Figure 5), on-policyness (Figure 6), batch size and throughput. Runs with the same
label are repetitions: they share a colour and one entry of the legend. Each run has its own line, so that the spread
between runs is visible.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.records import EVALUATIONS_FILE, METRICS_FILE, REWARD, EvaluationRecord, StepRecord, read_records
from pipelinerl.report import series, write_file
from pipelinerl.report.series import WINDOW, BatchSize, HeldOut, LagByPosition, RunRecords

COLOURS = ("#1f5fbf", "#d1600a", "#2a8c4a", "#a03070", "#8a6d00", "#4b4b9f", "#00868b", "#7a3b10")
MANY_POINTS = 40
"""Lines with more points than this are drawn without markers."""
SHOWN_S = 20.0
"""Batch sizes are drawn over at most this time, in the middle of a run. A round takes about a second."""


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


# ---- the numbers of a run


class Curves(NamedTuple):
    """The numbers to draw; the lists of numbers have one entry per optimizer step, NaN if nothing was measured.

    `samples` counts rollouts trained so far. Rates are tokens per second since the previous step. `by_environment` has the
    mean reward of each environment of a mixture. `held_out` has all evaluations, by version.
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
    held_out: list[HeldOut]

    @property
    def online(self) -> list[HeldOut]:
        """Evaluations during training."""
        return [one for one in self.held_out if one.when == "online"]


def prepare(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord], begin_s: float = 0.0) -> Curves:
    """The numbers of the plots, with times since `begin_s`. The first step has no rate: the time before it is start-up."""

    def column(value: Callable[[StepRecord], float | None]) -> list[float]:
        return [math.nan if (number := value(step)) is None else number for step in steps]

    names = series.environments(steps)
    elapsed_s = [0.0, *(after.time_s - before.time_s for before, after in pairwise(steps))]
    trained = zip(steps, elapsed_s, strict=True)
    return Curves(
        version=[step.version for step in steps],
        time_s=[step.time_s - begin_s for step in steps],
        samples=list(accumulate(step.samples for step in steps)),
        reward=column(lambda step: step.reward_mean),
        ess=column(lambda step: step.ess),
        lag_mean=column(lambda step: step.lag_mean),
        lag_max=column(lambda step: step.lag_max),
        generated_tokens_per_s=column(lambda step: step.engine.tokens_per_s if step.engine else None),
        trained_tokens_per_s=[step.tokens_trained / passed_s if passed_s > 0 else math.nan for step, passed_s in trained],
        trained_length_mean=column(lambda step: step.completion_length_mean),
        sampled_length_mean=column(lambda step: step.sampled_length_mean),
        started_length_mean=column(lambda step: step.started_length_mean),
        by_environment={name: [step.metrics.get(name + REWARD, math.nan) for step in steps] for name in names},
        held_out=[one._replace(time_s=one.time_s - begin_s) for one in series.held_out(evaluations)],
    )


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
        )
    batch = series.batch_size_over_time(records.timeline, begin_s) if records.timeline else None
    return DrawnRun(label, curves, records.slots, records.lag, batch)


# ---- one run: `curves.png` has six plots, and more for online evaluations and mixtures of environments


def draw_curves(run_dir: Path, path: Path) -> None:
    """Draw the curves of the run in `run_dir` to a PNG file at `path`.

    Raises RunDirectoryError if there is no step to draw, the records are damaged, or `path` can't be written.
    """
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run_dir / METRICS_FILE} holds no optimizer step")
    figure = _draw(prepare(steps, read_records(run_dir / EVALUATIONS_FILE, EvaluationRecord)))
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    write_file(path, png_of(figure))


def _draw(curves: Curves) -> Figure:
    wanted = ((_draw_held_out, curves.online), (_draw_environments, curves.by_environment))
    extras = [draw for draw, data in wanted if data]
    columns = 4 if extras else 3
    figure = new_figure(5 * columns, 8)
    panels: Any = figure.subplots(2, columns)
    (by_time, by_samples, ess), (lag, tokens, length) = panels[:, :3]
    for axes, draw in zip_longest(panels[:, 3:].flat, extras):
        draw(axes, curves) if draw else axes.set_visible(False)
    steps = curves.version

    line(by_time, curves.time_s, curves.reward, "training")
    points(by_time, [(one.time_s, one) for one in curves.online], "held out, during training", color="0.45")
    ends = [one for one in curves.held_out if one.when != "online"]
    for one, face in zip(ends, cycle(("white", "black"))):
        label = f"held out, {one.when} training: {one.reward:.3f}"
        style = {"fmt": "D", "color": "black", "markerfacecolor": face, "capsize": 4, "zorder": 3}
        by_time.errorbar(one.time_s, one.reward, one.standard_error, label=label, **style)
    finish_axes(by_time, "Reward over time", "seconds", "mean reward")
    line(by_samples, curves.samples, curves.reward, "training")
    finish_axes(by_samples, "Reward over samples", "rollouts trained", "mean reward")
    line(ess, steps, curves.ess, "ESS")
    finish_axes(ess, "On-policyness", "optimizer step", "effective sample size (1 = on-policy)")
    ess.set_ylim(top=1.005)
    line(lag, steps, curves.lag_max, "max")
    line(lag, steps, curves.lag_mean, "mean")
    finish_axes(lag, "Lag of the trained tokens", "optimizer step", "optimizer steps")
    lag.set_ylim(bottom=0)
    line(tokens, curves.time_s, curves.generated_tokens_per_s, "generated")
    line(tokens, curves.time_s, curves.trained_tokens_per_s, "trained")
    finish_axes(tokens, "Throughput", "seconds", "tokens/s")
    line(length, steps, curves.trained_length_mean, "trained")
    line(length, steps, curves.sampled_length_mean, "sampled")
    line(length, steps, curves.started_length_mean, "sampled, by order of start")
    finish_axes(length, "Completion length", "optimizer step", "mean tokens")
    return figure


def _draw_held_out(axes: Any, curves: Curves) -> None:
    """Held-out reward over versions, with version ranges and standard errors, drawn over the training reward."""
    line(axes, curves.version, curves.reward, "training", alpha=0.35)
    points(axes, [(one.version, one) for one in curves.held_out], "held out", spans=True, color="black")
    finish_axes(axes, "Held-out reward", "optimizer step", "mean reward")


def _draw_environments(axes: Any, curves: Curves) -> None:
    """Training reward of each environment over optimizer steps; diamonds are held-out rewards."""
    for number, name in enumerate(curves.by_environment):
        _draw_environment(axes, curves, name, "D", color=f"C{number}", label=name)
    finish_axes(axes, "Reward by environment (diamonds: held out)", "optimizer step", "mean reward")


def _draw_environment(axes: Any, curves: Curves, name: str, diamonds: str, *, label: str | None, **style: Any) -> None:
    if name in curves.by_environment:
        line(axes, curves.version, curves.by_environment[name], label, **style)
    known = [one for one in curves.held_out if name + REWARD in one.metrics]
    rewards = [one.metrics[name + REWARD] for one in known]
    axes.plot([one.version for one in known], rewards, diamonds, linewidth=1, **style)


# ---- several runs


class Panel(NamedTuple):
    """Axes on which every run has one line: the x and y of a run, and the limits of y."""

    title: str
    x_label: str
    y_label: str
    line: Callable[[DrawnRun], tuple[Sequence[float], Sequence[float]]]
    bottom: float | None = None
    top: float | None = None


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
        Panel("Reward over time", "seconds", reward, lambda run: (run.curves.time_s, run.curves.reward)),
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
        Panel("On-policyness", samples, ess, lambda run: (run.curves.samples, run.curves.ess), top=1.002),
        Panel("Lag by position", position, f"mean lag, {lag}", by_position, bottom=0),
    )


def throughput(runs: Sequence[DrawnRun]) -> bytes:
    """Tokens generated and trained per second over time, and the length of trained completions over samples."""
    length = "mean sampled tokens"
    return _panels(
        runs,
        Panel("Tokens generated", "seconds", "tokens/s", lambda r: (r.curves.time_s, r.curves.generated_tokens_per_s)),
        Panel("Tokens trained", "seconds", "tokens/s", lambda r: (r.curves.time_s, r.curves.trained_tokens_per_s)),
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
            _draw_environment(axes, run.curves, name, "D--", **style)
        finish_axes(axes, name, "optimizer step", "mean reward")
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

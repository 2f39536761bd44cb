"""The figures that compare runs: learning (the paper's Figure 5), on-policyness (Figure 6), batch size, throughput.

Runs with the same label are repetitions: they share a colour and one entry of the legend. Each run has its own line, so
that the spread between runs is visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, zip_longest
from typing import Any, NamedTuple

from pipelinerl.report.curves import Curves, prepare
from pipelinerl.report.drawing import finish_axes, line, new_figure, png_of, points
from pipelinerl.report.run_records import RunRecords
from pipelinerl.report.series import REWARD, WINDOW, BatchSize, LagByPosition, batch_size_over_time, pooled, windowed

COLOURS = ("#1f5fbf", "#d1600a", "#2a8c4a", "#a03070", "#8a6d00", "#4b4b9f", "#00868b", "#7a3b10")
SHOWN_S = 20.0
"""Batch sizes are drawn over at most this time, in the middle of a run. A round takes about a second."""


class DrawnRun(NamedTuple):
    """The numbers of one run to draw; times are seconds since `RunRecords.begin_s`.

    `slots` is H over all engines. If `lag` or `batch` is None, the run is missing from those panels.
    """

    label: str
    curves: Curves
    slots: int
    lag: LagByPosition | None = None
    batch: BatchSize | None = None


def drawn_run(records: RunRecords, label: str) -> DrawnRun:
    """The numbers of a run's figures. `records` must have at least one step."""
    begin = records.begin_s
    curves = prepare(records.steps, records.evaluations)
    if len(records.steps) >= 2 * WINDOW:
        latest = [pooled(records.steps[max(0, end - WINDOW) : end]) for end in range(1, len(records.steps) + 1)]
        curves = curves._replace(
            reward=windowed(curves.reward),
            by_environment={name: [m.get(name + REWARD, math.nan) for m in latest] for name in curves.by_environment},
        )
    return DrawnRun(
        label=label,
        curves=curves._replace(
            time_s=[time_s - begin for time_s in curves.time_s],
            held_out=[one._replace(time_s=one.time_s - begin) for one in curves.held_out],
        ),
        slots=records.slots,
        lag=records.lag,
        batch=batch_size_over_time(records.timeline, begin) if records.timeline else None,
    )


def learning(runs: Sequence[DrawnRun], target: float | None = None) -> bytes:
    """Reward over time, reward over samples, samples over time; the target reward as a dashed line."""
    figure = new_figure(15, 4.4)
    by_time, by_samples, samples = figure.subplots(1, 3)
    for run, style in _styled(runs):
        curves = run.curves
        line(by_time, curves.time_s, curves.reward, **style)
        line(by_samples, curves.samples, curves.reward, **style)
        line(samples, [0.0, *curves.time_s], [0, *curves.samples], **style)
    if target is not None:
        for axes in (by_time, by_samples):
            axes.axhline(target, color="0.35", linestyle="--", linewidth=1, zorder=1)
    finish_axes(by_time, "Reward over time", "seconds", "mean training reward")
    finish_axes(by_samples, "Reward over samples", "rollouts trained", "mean training reward")
    finish_axes(samples, "Samples over time", "seconds", "rollouts trained")
    return png_of(figure)


def held_out(runs: Sequence[DrawnRun], target: float | None = None) -> bytes | None:
    """Held-out reward over versions, with version ranges, and over time; the target reward as a dashed line.

    None if no run has evaluations between its first and its last version.
    """
    if not any(run.curves.online or len(run.curves.held_out) > 2 for run in runs):
        return None
    figure = new_figure(15, 4.4)
    by_version, by_time = figure.subplots(1, 2)
    for run, style in _styled(runs):
        found = run.curves.held_out
        points(by_version, [(one.version, one) for one in found], spans=True, **style)
        points(by_time, [(one.time_s, one) for one in found], **style)
    if target is not None:
        for axes in (by_version, by_time):
            axes.axhline(target, color="0.35", linestyle="--", linewidth=1, zorder=1)
    finish_axes(by_version, "Held-out reward over versions", "optimizer step", "mean held-out reward")
    finish_axes(by_time, "Held-out reward over time", "seconds", "mean held-out reward")
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
            if name in run.curves.by_environment:
                line(axes, run.curves.version, run.curves.by_environment[name], **style)
            known = [one for one in run.curves.held_out if name + REWARD in one.metrics]
            rewards = [one.metrics[name + REWARD] for one in known]
            axes.plot([one.version for one in known], rewards, "D--", **(style | {"label": None, "linewidth": 1}))
        finish_axes(axes, name, "optimizer step", "mean reward")
    return png_of(figure)


def on_policyness(runs: Sequence[DrawnRun]) -> bytes:
    """Largest lag and ESS over samples, and mean lag of a token by its position in the completion."""
    figure = new_figure(15, 4.4)
    lag, ess, position = figure.subplots(1, 3)
    for run, style in _styled(runs):
        line(lag, run.curves.samples, run.curves.lag_max, **style)
        line(ess, run.curves.samples, run.curves.ess, **style)
        if run.lag is not None:
            line(position, run.lag.position, run.lag.mean, **style)
    finish_axes(lag, "Largest lag of a trained token", "rollouts trained", "optimizer steps")
    lag.set_ylim(bottom=0)
    finish_axes(ess, "On-policyness", "rollouts trained", "effective sample size (1 = on-policy)")
    ess.set_ylim(top=1.002)
    finish_axes(position, "Lag by position", "position of the token in the completion", "mean lag, optimizer steps")
    position.set_ylim(bottom=0)
    return png_of(figure)


def batch_sizes(runs: Sequence[DrawnRun]) -> bytes | None:
    """Sequences in progress for some seconds in the middle of a run; one panel for the first run of each label; dashed: H.

    None if no run has a timeline.
    """
    first = {run.label: (run, style) for run, style in reversed(_styled(runs)) if run.batch is not None}
    if not first:
        return None
    chosen = list(first.values())[::-1]
    figure = new_figure(15, 0.8 + 1.5 * len(chosen))
    panels = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    for axes, (run, style) in zip(panels, chosen, strict=True):
        batch, end_s = run.batch or BatchSize([], []), run.curves.time_s[-1]
        middle_s, shown_s = end_s / 2, min(SHOWN_S, end_s)
        axes.step(batch.time_s, batch.in_progress, where="post", color=style["color"], linewidth=1.2)
        axes.axhline(run.slots, color="0.35", linestyle="--", linewidth=1)
        axes.set_xlim(middle_s - shown_s / 2, middle_s + shown_s / 2)
        finish_axes(axes, run.label, "", "in progress")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds")
    return png_of(figure)


def throughput(runs: Sequence[DrawnRun]) -> bytes:
    """Tokens generated and trained per second over time, and the length of trained completions over samples."""
    figure = new_figure(15, 4.4)
    generated, trained, length = figure.subplots(1, 3)
    for run, style in _styled(runs):
        curves = run.curves
        line(generated, curves.time_s, curves.generated_tokens_per_s, **style)
        line(trained, curves.time_s, curves.trained_tokens_per_s, **style)
        line(length, curves.samples, curves.trained_length_mean, **style)
    finish_axes(generated, "Tokens generated", "seconds", "tokens/s")
    finish_axes(trained, "Tokens trained", "seconds", "tokens/s")
    finish_axes(length, "Completion length", "rollouts trained", "mean sampled tokens")
    return png_of(figure)


def _styled(runs: Sequence[DrawnRun]) -> list[tuple[DrawnRun, dict[str, Any]]]:
    """Each run with the style of its line: one colour per label, and the label only for its first run."""
    colours = dict(zip(dict.fromkeys(run.label for run in runs), cycle(COLOURS)))
    labelled: set[str] = set()
    styled: list[tuple[DrawnRun, dict[str, Any]]] = []
    for run in runs:
        styled.append((run, {"color": colours[run.label], "label": None if run.label in labelled else run.label}))
        labelled.add(run.label)
    return styled

"""Draws `curves.png` from a run's records: six plots, and more for online evaluations and mixtures of environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.records import EVALUATIONS_FILE, METRICS_FILE, EvaluationRecord, StepRecord, read_records
from pipelinerl.report.drawing import finish_axes, line, new_figure, png_of, points
from pipelinerl.report.files import write_file
from pipelinerl.report.series import REWARD, HeldOut, environments, held_out


class Mark(NamedTuple):
    """An evaluation before or after training, drawn over time: its mean reward, and half the height of its error bar."""

    label: str
    time_s: float
    reward: float
    standard_error: float


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
    evaluations: list[Mark]
    by_environment: dict[str, list[float]]
    held_out: list[HeldOut]

    @property
    def online(self) -> list[HeldOut]:
        """Evaluations during training."""
        return [one for one in self.held_out if one.when == "online"]


def prepare(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Curves:
    """The numbers of the plots. The first step has no rate, because the time before it is mostly start-up."""

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
        started_length_mean=column(lambda step: step.started_length_mean),
        evaluations=[
            Mark(f"held out, {e.when} training", e.time_s, e.reward_mean, e.reward_standard_error or 0.0)
            for e in evaluations
            if e.reward_mean is not None and e.when != "online"
        ],
        by_environment={name: [step.metrics.get(name + REWARD, math.nan) for step in steps] for name in environments(steps)},
        held_out=held_out(evaluations),
    )


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
    extras = [
        draw for draw, wanted in ((draw_held_out, curves.online), (draw_environments, curves.by_environment)) if wanted
    ]
    columns = 4 if extras else 3
    figure = new_figure(5 * columns, 8)
    panels: Any = figure.subplots(2, columns)
    (by_time, by_samples, ess), (lag, tokens, length) = panels[:, :3]
    for axes, draw in zip_longest(panels[:, 3:].flat, extras):
        draw(axes, curves) if draw else axes.set_visible(False)
    steps = curves.version

    line(by_time, curves.time_s, curves.reward, "training")
    points(by_time, [(one.time_s, one) for one in curves.online], "held out, during training", color="0.45")
    for mark, face in zip(curves.evaluations, cycle(("white", "black"))):
        label = f"{mark.label}: {mark.reward:.3f}"
        style = {"fmt": "D", "color": "black", "markerfacecolor": face, "capsize": 4, "zorder": 3}
        by_time.errorbar(mark.time_s, mark.reward, mark.standard_error, label=label, **style)
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


def draw_held_out(axes: Any, curves: Curves) -> None:
    """Held-out reward over versions, with version ranges and standard errors, drawn over the training reward."""
    line(axes, curves.version, curves.reward, "training", alpha=0.35)
    points(axes, [(one.version, one) for one in curves.held_out], "held out", spans=True, color="black")
    finish_axes(axes, "Held-out reward", "optimizer step", "mean reward")


def draw_environments(axes: Any, curves: Curves) -> None:
    """Training reward of each environment over optimizer steps; diamonds are held-out rewards."""
    for number, (name, rewards) in enumerate(curves.by_environment.items()):
        colour = f"C{number}"
        line(axes, curves.version, rewards, name, color=colour)
        known = [one for one in curves.held_out if name + REWARD in one.metrics]
        axes.plot([one.version for one in known], [one.metrics[name + REWARD] for one in known], "D", color=colour)
    finish_axes(axes, "Reward by environment (diamonds: held out)", "optimizer step", "mean reward")

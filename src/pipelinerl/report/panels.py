"""Panels that only some runs have: held-out reward during training, environments of a mixture, metrics of the rollouts."""

from __future__ import annotations

from typing import Any

from pipelinerl.metrics.statistics import REWARD
from pipelinerl.report.curves import Curves, finish_axes, line, points

MOST_METRICS = 6
"""Metrics in one panel."""


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
    for number, name in enumerate(curves.by_environment):
        draw_environment(axes, curves, name, "D", color=f"C{number}", label=name)
    finish_axes(axes, "Reward by environment (diamonds: held out)", "optimizer step", "mean reward")


def draw_metrics(axes: Any, curves: Curves) -> None:
    """The metrics of the rollouts, those of several reward functions among them."""
    for number, name in enumerate(list(curves.by_metric)[:MOST_METRICS]):
        draw_metric(axes, curves, name, "D", color=f"C{number}", label=name)
    left = len(curves.by_metric) - MOST_METRICS
    finish_axes(axes, "Metrics of the rollouts" + (f" ({left} more: report)" if left > 0 else ""), "optimizer step", "mean")


def draw_environment(axes: Any, curves: Curves, name: str, diamonds: str, *, label: str | None, **style: Any) -> None:
    if name in curves.by_environment:
        line(axes, curves.version, curves.by_environment[name], label, **style)
    _draw_held_out_metric(axes, curves, name + REWARD, diamonds, **style)


def draw_metric(axes: Any, curves: Curves, name: str, diamonds: str, *, label: str | None, **style: Any) -> None:
    if name in curves.by_metric:
        line(axes, curves.version, curves.by_metric[name], label, **style)
    _draw_held_out_metric(axes, curves, name, diamonds, **style)


def _draw_held_out_metric(axes: Any, curves: Curves, name: str, diamonds: str, **style: Any) -> None:
    known = [one for one in curves.held_out if name in one.metrics]
    axes.plot([one.version for one in known], [one.metrics[name] for one in known], diamonds, linewidth=1, **style)

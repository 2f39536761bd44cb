"""Throughput against lag, both methods at their best: the paper's Figure 9, for any workload."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from pipelinerl.planner.plan import Plan
from pipelinerl.report.drawing import png_of
from pipelinerl.report.files import write_file


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw a PNG at `path`. Raises RunDirectoryError if it can't be written."""
    write_file(path, png_of(_draw(plan)))


def _draw(plan: Plan) -> Figure:
    figure = Figure(figsize=(7.5, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    workload, chosen = plan.question.workload, plan.chosen
    pipelines = [(c.max_lag, c.pipeline.rate) for c in plan.curve if c.pipeline]
    lags, rates = [c.max_lag for c in plan.curve], [c.conventional.rate for c in plan.curve]
    (line,) = axes.plot(*zip(*pipelines, strict=True), label="PipelineRL, best (H, I)", linewidth=1.8)
    (other,) = axes.plot(lags, rates, label="conventional RL, best G", linewidth=1.8)
    if chosen.pipeline:
        label = f"H = {chosen.pipeline.slots}, I = {chosen.pipeline.generating}: {chosen.pipeline.rate:.3g}"
        axes.plot(chosen.max_lag, chosen.pipeline.rate, "o", color=line.get_color(), label=label)
    label = f"G = {chosen.conventional.steps_per_round}: {chosen.conventional.rate:.3g}"
    axes.plot(chosen.max_lag, chosen.conventional.rate, "o", color=other.get_color(), label=label)
    unit = "second" if workload.utilisation.unit == "s" else "flash"
    axes.set_title(
        f"N = {workload.accelerators}, B = {workload.batch_size}, lengths up to {workload.lengths.longest}", fontsize=11
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("largest lag $g_{max}$, optimizer steps")
    axes.set_ylabel(f"sampled tokens per {unit}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)
    return figure

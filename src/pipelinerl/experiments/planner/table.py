"""Text tables of a plan, a calibration and a prediction, and the figure of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipelinerl.config.schema import RunConfig
from pipelinerl.experiments.planner.analytic import Pipeline
from pipelinerl.experiments.planner.calibration import Calibration
from pipelinerl.experiments.planner.plan import Plan, tabulated
from pipelinerl.experiments.planner.simulation.run import Prediction
from pipelinerl.experiments.planner.simulation.scenario import Measured
from pipelinerl.report import count, new_table, number, rendered, write_file
from pipelinerl.report.curves import finish_axes, new_figure, png_of


def plan_text(plan: Plan, config: RunConfig | None = None) -> str:
    """The inputs, the best of both methods, throughput by lag, and the settings for the run file."""
    parts: list[RenderableType] = [_facts(plan), _best(plan), _curve(plan)]
    if plan.chosen.pipeline:
        parts.append(_advice(plan, plan.chosen.pipeline, config))
    return rendered(*parts)


def _facts(plan: Plan) -> Table:
    caption = (
        None if _unit(plan) == "s" else "A flash is the time of one token's forward pass at the accelerator's peak FLOPs."
    )
    table = new_table("Inputs of this plan", "", "", "source", caption=caption)
    for name, value, source in plan.question.facts:
        table.add_row(name, value, Text(source, "dim"))
    return table


def _best(plan: Plan) -> Table:
    unit = _unit(plan)
    table = new_table(f"Best of both methods, lag at most {plan.chosen.max_lag}", "", "PipelineRL", "conventional RL")
    pipeline, conventional = plan.chosen.pipeline, plan.chosen.conventional
    accelerators, baseline = plan.question.workload.accelerators, plan.question.baseline
    if pipeline is None:
        return table
    everything = f"all {accelerators}" if baseline is None else "the whole machine"
    table.add_row(
        "configuration",
        f"H = {pipeline.slots} slots; {pipeline.generating} generate, {accelerators - pipeline.generating} train",
        f"G = {conventional.steps_per_round} steps a round; {everything} to generate, then to train",
    )
    table.add_row("largest lag (g_max), steps", f"{pipeline.max_lag}", f"{conventional.max_lag}")
    table.add_row(f"generation, tokens/{unit}", _short(pipeline.generation_rate), _short(conventional.generation_rate))
    table.add_row(f"training, tokens/{unit}", _short(pipeline.training_rate), _short(conventional.training_rate))
    table.add_row(f"throughput, tokens/{unit}", _short(pipeline.rate), _short(conventional.rate), style="bold")
    scale, length = plan.question.tokens_per_s, plan.question.workload.lengths.mean
    if scale != 1:
        table.add_row("tokens/s", _short(pipeline.rate * scale), _short(conventional.rate * scale))
    table.add_row("rollouts/s", *(_short(rate * scale / length) for rate in (pipeline.rate, conventional.rate)))
    table.add_row("speed-up", f"{plan.chosen.speed_up:.2f}x", "1", style="bold")
    return table


def _curve(plan: Plan) -> Table:
    table = new_table(
        f"Throughput by lag, tokens/{_unit(plan)}", "largest lag", "PipelineRL", "H", "I", "conventional", "G", "speed-up"
    )
    for comparison in tabulated(plan):
        pipeline, conventional = comparison.pipeline, comparison.conventional
        cells = (_short(pipeline.rate), f"{pipeline.slots}", f"{pipeline.generating}") if pipeline else ("-", "-", "-")
        table.add_row(
            f"{comparison.max_lag}",
            *cells,
            _short(conventional.rate),
            f"{conventional.steps_per_round}",
            f"{comparison.speed_up:.2f}x" if comparison.speed_up is not None else "-",
            style="bold" if comparison.max_lag == plan.chosen.max_lag else "",
        )
    return table


def _advice(plan: Plan, pipeline: Pipeline, config: RunConfig | None) -> Text:
    workload = plan.question.workload
    slower = "generation" if pipeline.generation_rate < pipeline.training_rate else "training"
    text = Text()
    text.append("To run it: ", "bold")
    text.append(
        f"schedule.kind pipeline, engine.slots {pipeline.slots}, engine.processes {pipeline.generating} (of "
        f"{workload.accelerators} accelerators, or cores). {slower.capitalize()} is the slower phase.\n"
    )
    if config is not None and config.engine.slots != pipeline.slots:
        text.append(f"The run file has engine.slots {config.engine.slots}.\n")
    if (most := int(workload.utilisation.largest)) <= pipeline.slots:
        text.append(f"U is known only up to {most} slots, and more may be faster: calibrate with a larger engine.slots.\n")
    return text


def calibration_text(calibration: Calibration) -> str:
    """The measured costs, with a warning if other programs kept the machine busy."""
    generation, training, machine = calibration.generation, calibration.training, calibration.machine
    table = new_table(f"{machine.processor}, {machine.cores} cores, model {calibration.model}", "", "")
    for cost in generation.decode:
        spread = f"{1e3 * cost.step_s_p25:.3g} to {1e3 * cost.step_s_p75:.3g}"
        rate = f"{cost.active / cost.step_s:.0f} tokens/s"
        table.add_row(f"decode step, {count(cost.active, 'sequence')}", f"{1e3 * cost.step_s:.3g} ms ({spread}), {rate}")
    table.add_row("prefill", f"{1e3 * generation.prefill_s:.3g} ms + {1e6 * generation.prefill_s_per_token:.3g} us a token")
    table.add_row("rollout, besides its decode steps", f"{1e3 * generation.rollout_overhead_s:.3g} ms")
    table.add_row("weight update", f"{1e3 * generation.update_pause_s:.3g} ms")
    table.add_row("generation, all slots in use", f"{generation.tokens_per_s:.0f} tokens/s")
    table.add_row("optimizer step", f"{1e3 * training.step_s:.3g} ms + {1e6 * training.token_s:.3g} us a token")
    lengths = calibration.length_distribution()
    table.add_row("tokens that have a gradient", f"{training.used_share:.0%}, initial model")
    table.add_row("lengths, initial model", f"mean {lengths.mean:.1f}, longest {lengths.longest} tokens")
    in_turn = calibration.generation_yields or not calibration.side_by_side
    how = "one after the other" if in_turn else "at the same time, as in a run"
    table.add_row("measured", f"generation ({count(generation.threads, 'thread')}) and training ({training.threads}) {how}")
    text = rendered(table)
    if machine.busy:
        text += f"the machine was busy (load average {machine.load_average:g}): measure again when it is not\n"
    return text


def _unit(plan: Plan) -> str:
    return plan.question.workload.utilisation.unit


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


# ---- figure: throughput against lag, both methods at their best (the paper's Figure 9 for any workload)


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw a PNG at `path`. Raises RunDirectoryError if it can't be written."""
    figure = new_figure(8.2, 5.0)
    axes: Any = figure.subplots()
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
    title = f"N = {workload.accelerators}, B = {workload.batch_size}, lengths up to {workload.lengths.longest}"
    finish_axes(axes, title, "largest lag $g_{max}$, optimizer steps", f"sampled tokens per {unit}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    write_file(path, png_of(figure))


# ---- predictions


_ROWS = (
    ("samples/s", "samples_per_s", ".4g"),
    ("samples/s, after a fifth of the steps", "samples_per_s_later", ".4g"),
    ("trained tokens/s, after a fifth", "trained_tokens_per_s_later", ".4g"),
    ("lag, mean over tokens", "lag_mean", ".3g"),
    ("lag, largest", "lag_max", "d"),
    ("engine busy", "engine_busy_fraction", ".1%"),
    ("trainer busy", "trainer_busy_fraction", ".1%"),
)


def comparison_text(prediction: Prediction, measured: Measured, run_dir: str) -> str:
    """Predicted and measured side by side."""
    table = new_table(f"{count(prediction.steps, 'step')} of {run_dir}", "", "predicted", "measured", "off by")
    for name, field, pattern in _ROWS:
        predicted, found = getattr(prediction, field), getattr(measured, field)
        off = f"{predicted / found - 1:+.1%}" if predicted is not None and found else "-"
        table.add_row(name, number(predicted, pattern), number(found, pattern), off)
    return rendered(table)


def prediction_text(prediction: Prediction) -> str:
    """The prediction of a run as a table."""
    engines = count(prediction.engines, "engine")
    title = f"{prediction.schedule}, {engines} of {prediction.slots} slots, {count(prediction.steps, 'step')}"
    table = new_table(title, "", "predicted")
    for name, field, pattern in _ROWS:
        table.add_row(name, number(getattr(prediction, field), pattern))
    table.add_row("lag, median and 99%", f"{prediction.lag_p50} and {prediction.lag_p99}")
    table.add_row("lag by place in the completion", _by_position(prediction))
    table.add_row("slots in use while decoding", f"{prediction.slots_used:.1%}")
    table.add_row("engine starved or draining", f"{prediction.starved_fraction:.1%}")
    table.add_row(
        "trainer waits before a step", f"mean {prediction.wait_s_mean:.3g} s, longest {prediction.wait_s_max:.3g} s"
    )
    table.add_row("duration", f"{prediction.time_s:.4g} s")
    if prediction.rollouts_dropped:
        dropped = ", ".join(f"{reason} {rollouts}" for reason, rollouts in prediction.rollouts_dropped.items())
        table.add_row("rollouts dropped", f"{dropped}, of {prediction.rollouts_started} started")
    return rendered(table)


def _by_position(prediction: Prediction) -> str:
    """Mean lag in the first, middle and last bin."""
    bins = prediction.lag_by_position
    chosen = [bins[i] for i in sorted({0, len(bins) // 2, len(bins) - 1})] if bins else []
    return ", ".join(f"{bin_.lag_mean:.3g} at tokens {bin_.start} to {bin_.end - 1}" for bin_ in chosen) or "-"

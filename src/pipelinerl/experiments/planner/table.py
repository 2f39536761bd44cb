"""Text tables of a calibration and of a prediction."""

from __future__ import annotations

from pipelinerl.experiments.planner.calibration import Calibration
from pipelinerl.experiments.planner.simulation.run import Prediction
from pipelinerl.experiments.planner.simulation.scenario import Measured
from pipelinerl.report import count, new_table, number, rendered


def calibration_text(calibration: Calibration) -> str:
    """The measured costs, with a warning if other programs kept the machine busy."""
    generation, training, machine = calibration.generation, calibration.training, calibration.machine
    table = new_table(f"{machine.cpu}, {machine.cores} cores, model {calibration.model}", "", "")
    for cost in generation.decode:
        rate = f"{cost.active / cost.step_s:.0f} tokens/s"
        table.add_row(f"decode step, {count(cost.active, 'sequence')}", f"{1e3 * cost.step_s:.3g} ms, {rate}")
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
    if calibration.disturbed:
        text += f"the machine was busy (load average {calibration.load_average:g}): measure again when it is not\n"
    return text


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

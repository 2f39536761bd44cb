"""Text tables of a prediction, alone or next to what a run measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelinerl.experiments.planner.simulation.recorded import Measured
from pipelinerl.experiments.planner.simulation.result import Prediction

_ROWS = (
    ("samples/s", "samples_per_s", "{:.4g}"),
    ("samples/s, after a fifth of the steps", "samples_per_s_later", "{:.4g}"),
    ("trained tokens/s, after a fifth", "trained_tokens_per_s_later", "{:.4g}"),
    ("lag, mean over tokens", "lag_mean", "{:.3g}"),
    ("lag, largest", "lag_max", "{:d}"),
    ("engine busy", "engine_busy_fraction", "{:.1%}"),
    ("trainer busy", "trainer_busy_fraction", "{:.1%}"),
)


def comparison_text(prediction: Prediction, measured: Measured, run_dir: str) -> str:
    """Predicted and measured side by side."""
    table = _table(f"{prediction.steps} steps of {run_dir}", "", "predicted", "measured", "off by")
    for name, field, pattern in _ROWS:
        predicted, found = getattr(prediction, field), getattr(measured, field)
        off = f"{predicted / found - 1:+.1%}" if predicted is not None and found else "-"
        table.add_row(name, _cell(predicted, pattern), _cell(found, pattern), off)
    return _rendered(table)


def prediction_text(prediction: Prediction) -> str:
    """The prediction of a run as a table."""
    title = f"{prediction.schedule}, {prediction.engines} engines of {prediction.slots} slots, {prediction.steps} steps"
    table = _table(title, "", "predicted")
    for name, field, pattern in _ROWS:
        table.add_row(name, _cell(getattr(prediction, field), pattern))
    table.add_row("lag, median and 99%", f"{prediction.lag_p50} and {prediction.lag_p99}")
    table.add_row("lag by position", _by_position(prediction))
    table.add_row("slots in use while decoding", f"{prediction.slots_used:.1%}")
    table.add_row("engine starved or draining", f"{prediction.starved_fraction:.1%}")
    table.add_row(
        "trainer waits before a step", f"mean {prediction.wait_s_mean:.3g} s, longest {prediction.wait_s_max:.3g} s"
    )
    table.add_row("duration", f"{prediction.time_s:.4g} s")
    if prediction.rollouts_dropped:
        dropped = ", ".join(f"{reason} {count}" for reason, count in prediction.rollouts_dropped.items())
        table.add_row("rollouts dropped", f"{dropped}, of {prediction.rollouts_started} started")
    return _rendered(table)


def _by_position(prediction: Prediction) -> str:
    """Mean lag in the first, middle and last bin."""
    bins = prediction.lag_by_position
    chosen = [bins[i] for i in sorted({0, len(bins) // 2, len(bins) - 1})] if bins else []
    return ", ".join(f"{bin_.lag_mean:.3g} at {bin_.start} to {bin_.end - 1}" for bin_ in chosen) or "-"


def _cell(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", border_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _rendered(table: Table) -> str:
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get()

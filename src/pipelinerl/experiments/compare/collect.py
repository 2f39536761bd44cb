"""Computes the results of one run from its records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelinerl.experiments.compare.contenders import Contender
from pipelinerl.experiments.compare.folder import Execution
from pipelinerl.experiments.compare.held_out import Answered
from pipelinerl.experiments.compare.results import RunResult
from pipelinerl.experiments.compare.settings import Settings
from pipelinerl.report.figures import DrawnRun, drawn_run
from pipelinerl.report.run_records import RunRecords
from pipelinerl.report.series import HeldOut, measure, reached, reached_held_out, slots_in_use, windowed


class Collected(NamedTuple):
    """A run's results, and the data of its figures."""

    result: RunResult
    drawn: DrawnRun


def collect(
    records: RunRecords,
    contender: Contender,
    settings: Settings,
    execution: Execution,
    *,
    target: float | None,
    answered: Sequence[Answered] | None,
) -> Collected:
    """The results of one run. Pure. Without a target, `reached` is None.

    `answered` are the run's held-out rewards, which decide when the target is reached. None: the training rewards decide.
    """
    steps = records.steps
    begin = records.begin_s
    measured = measure(steps, begin)
    drawn = drawn_run(records, contender.label)
    training = [reward for reward in windowed([step.reward_mean for step in steps]) if not math.isnan(reward)]
    if answered is not None:
        times_s = {0: 0.0} | dict(zip(drawn.curves.version, drawn.curves.time_s, strict=True))
        points = [_point(one, times_s[one.version]) for one in answered]
        drawn = drawn._replace(curves=drawn.curves._replace(held_out=points))
    summary: Mapping[str, Any] = records.summary or {}
    by_training = None if target is None else reached(steps, begin, target)
    by_held_out = None
    if answered is not None and target is not None:
        by_held_out = reached_held_out([(one.version, one.reward) for one in answered], steps, begin, target)
    in_use = slots_in_use(drawn.batch, drawn.slots, measured.training_s) if drawn.batch else None
    result = RunResult(
        schedule=contender.label,
        kind=contender.kind,
        seed=records.config.seed,
        settings=settings,
        status=execution.status,
        began=execution.began,
        load_before=execution.load_before,
        run_dir=execution.run,
        measured=measured,
        reached=by_training if answered is None else by_held_out,
        reached_training=by_training,
        rewards=training if answered is None else [one.reward for one in answered],
        held_out=list(answered or ()),
        saving_s=math.fsum(step.saving_s for step in steps),
        slots_used_fraction=in_use,
        **{key: summary.get(key) for key in _FROM_SUMMARY},
    )
    return Collected(result, drawn)


_FROM_SUMMARY = (
    *("ess_mean", "ess_min", "lag_mean", "lag_max"),
    *("engine_busy_fraction", "trainer_busy_fraction"),
)


def _point(one: Answered, time_s: float) -> HeldOut:
    error = (one.high - one.low) / (2 * 1.96)  # standard error from a 95% interval
    return HeldOut("after", one.version, one.version, one.version, time_s, one.reward, error, {})


def series_of(drawn: DrawnRun) -> dict[str, Any]:
    """The data of a run's curves, for `compare.json`."""
    curves = drawn.curves
    names = ("version", "time_s", "samples", "reward", "ess", "lag_mean", "lag_max", "trained_length_mean")
    return {
        **{name: getattr(curves, name) for name in names},
        "lag_by_position": drawn.lag,
        "batch_size": drawn.batch,
        "slots": drawn.slots,
    }


def rounded(value: Any) -> Any:
    """A JSON-like document with floats rounded to six significant digits; NaN and infinities become None."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case dict():
            return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value]

"""The numbers of a comparison: of each run from its records, then the target, medians, ratios and their spread over seeds.

A run that did not reach the target, or did not finish, has None for a quantity. When the best conventional schedule is
chosen, None counts as worse than any value. A spread or ratio over seeds is None if one seed lacks it, so that failed runs
never improve a result. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from pipelinerl.experiments.compare.held_out import Answered
from pipelinerl.experiments.compare.request import CONVENTIONAL, Contender
from pipelinerl.experiments.compare.tuning import Settings
from pipelinerl.experiments.runs import Execution
from pipelinerl.launch.summary import FINISHED
from pipelinerl.report.series import (
    Measured,
    Reached,
    RunRecords,
    measure,
    reached,
    reached_held_out,
    slots_in_use,
    windowed,
)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    rewards    the rewards that the target refers to: held-out rewards by version; or, in a comparison without them,
               means of training rewards over a window of steps, starting with the first full window
    reached    when these reached the target; None for a run that did not, or did not finish
    saving_s   the part of the measured time that was spent writing weights
    summary    numbers of the run's summary; None: not recorded
    """

    schedule: str
    kind: str
    seed: int
    settings: Settings
    status: str
    began: str
    load_before: float | None
    run_dir: str
    measured: Measured
    reached: Reached | None
    rewards: list[float]
    held_out: list[Answered] = []
    saving_s: float = 0.0
    slots_used_fraction: float | None
    summary: dict[str, float | None] = {}

    @property
    def finished(self) -> bool:
        return self.status == FINISHED


class Quantity(NamedTuple):
    """What is measured of a run: the heading of its column, the format of its value, and its value in a run."""

    heading: str
    pattern: str
    of: Callable[[RunResult], float | None]


QUANTITIES: Mapping[str, Quantity] = {
    "time_to_reward_s": Quantity("time to target, s", ".1f", lambda run: run.reached.time_s if run.reached else None),
    "samples_to_reward": Quantity("samples to target", ".0f", lambda run: run.reached.samples if run.reached else None),
    "samples_per_s": Quantity("samples/s", ".1f", lambda run: run.measured.samples_per_s if run.finished else None),
    "samples_per_s_later": Quantity("in the last 4/5", ".1f", lambda run: run.measured.samples_per_s_later),
    "tokens_per_s": Quantity("tokens/s", ".0f", lambda run: run.measured.tokens_per_s),
    "length_mean": Quantity("mean length", ".1f", lambda run: run.measured.length_mean),
    "ess_mean": Quantity("ESS mean", ".4f", lambda run: run.summary.get("ess_mean")),
    "ess_min": Quantity("ESS min", ".3f", lambda run: run.summary.get("ess_min")),
    "lag_mean": Quantity("lag mean", ".2f", lambda run: run.summary.get("lag_mean")),
    "lag_max": Quantity("lag max", ".0f", lambda run: run.summary.get("lag_max")),
    "engine_busy_fraction": Quantity("engine busy", ".0%", lambda run: run.summary.get("engine_busy_fraction")),
    "trainer_busy_fraction": Quantity("trainer busy", ".0%", lambda run: run.summary.get("trainer_busy_fraction")),
    "slots_used_fraction": Quantity("slots in use", ".0%", lambda run: run.slots_used_fraction),
    "reward_last": Quantity("last reward", ".3f", lambda run: run.rewards[-1] if run.rewards else None),
}
"""By name. `reached` is None, and samples/s count for nothing, in a run that did not finish."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over seeds. The statistics are None if one seed lacks it. `per_seed` is in the order of the seeds."""

    median: float | None
    min: float | None
    max: float | None
    per_seed: list[float | None]


def spread(values: Sequence[float | None]) -> Spread:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Spread(median=None, min=None, max=None, per_seed=list(values))
    return Spread(median=median(known), min=min(known), max=max(known), per_seed=list(values))


class Ratio(Spread, frozen=True, kw_only=True):
    """Ratio to `baseline`, the best conventional schedule for this quantity. Above 1: better than the baseline."""

    baseline: str | None


def target_reward(runs: Iterable[RunResult]) -> float | None:
    """The default target: nine tenths of the way from the first reward to a reward that every kind of schedule reaches.

    The range starts at the mean of all runs' first rewards. Its end is a minimum over the kinds of schedules: the reward
    that the kind's best schedule reaches in its worst seed. So every kind has a schedule that reaches the target, and a
    schedule that diverges does not lower it for the others. The target is rounded down to two digits of the range. None if
    the reward did not rise.
    """
    learnt = [run for run in runs if run.rewards]
    if not learnt:
        return None
    by_schedule: dict[tuple[str, str], float] = {}
    for run in learnt:
        key = (run.kind, run.schedule)
        by_schedule[key] = min(by_schedule.get(key, math.inf), max(run.rewards))
    kinds = {kind for kind, _ in by_schedule}
    end = min(max(reach for (kind, _), reach in by_schedule.items() if kind == wanted) for wanted in kinds)
    start = math.fsum(run.rewards[0] for run in learnt) / len(learnt)
    if end <= start:
        return None
    digit = 10.0 ** (math.floor(math.log10(end - start)) - 1)
    return round(math.floor((start + 0.9 * (end - start)) / digit + 1e-9) * digit, 12)


def over_seeds(runs: Sequence[RunResult], schedule: str, quantity: str) -> list[float | None]:
    """The quantity of one schedule's runs, in the order of their seeds."""
    chosen = sorted((run for run in runs if run.schedule == schedule), key=lambda run: run.seed)
    return [QUANTITIES[quantity].of(run) for run in chosen]


def ratio(runs: Sequence[RunResult], schedule: str, quantity: str, *, low_is_good: bool) -> Ratio:
    """How many times better `schedule` is than the best conventional schedule, seed by seed.

    The best has the best median over seeds; there is none if no conventional schedule has a finite median.
    """
    sign = 1 if low_is_good else -1
    costs = {
        one: median(math.inf if value is None else sign * value for value in over_seeds(runs, one, quantity))
        for one in dict.fromkeys(run.schedule for run in runs if run.kind == CONVENTIONAL)
    }
    baseline = min((one for one in costs if costs[one] < math.inf), key=costs.__getitem__, default=None)
    own = over_seeds(runs, schedule, quantity)
    others: Sequence[float | None] = [None] * len(own) if baseline is None else over_seeds(runs, baseline, quantity)
    pairs = zip(others, own, strict=True) if low_is_good else zip(own, others, strict=True)
    found = spread([above / below if above is not None and below else None for above, below in pairs])
    return Ratio(baseline=baseline, **msgspec.structs.asdict(found))


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule over its seeds. `quantities`: by name, as in `QUANTITIES`."""

    schedule: str
    settings: Settings
    runs: int
    reached: int
    diverged: int
    quantities: dict[str, Spread]
    ratio_time_to_reward: Ratio
    ratio_samples_per_s: Ratio


def row(runs: Sequence[RunResult], schedule: str) -> ScheduleRow:
    """The table row of one schedule."""
    own = [run for run in runs if run.schedule == schedule]
    return ScheduleRow(
        schedule=schedule,
        settings=own[0].settings,
        runs=len(own),
        reached=sum(run.reached is not None for run in own),
        diverged=sum(not run.finished for run in own),
        quantities={name: spread(over_seeds(runs, schedule, name)) for name in QUANTITIES},
        ratio_time_to_reward=ratio(runs, schedule, "time_to_reward_s", low_is_good=True),
        ratio_samples_per_s=ratio(runs, schedule, "samples_per_s", low_is_good=False),
    )


def run_result(
    records: RunRecords,
    contender: Contender,
    settings: Settings,
    execution: Execution,
    *,
    target: float | None,
    answered: Sequence[Answered] | None,
) -> RunResult:
    """The results of one run. Without a target, `reached` is None.

    `answered` are the run's held-out rewards, which decide when the target is reached. None: the training rewards decide.
    """
    steps, begin = records.steps, records.begin_s
    measured, summary = measure(steps, begin), records.summary or {}
    when = None
    if answered is None:
        rewards = [reward for reward in windowed([step.reward for step in steps]) if not math.isnan(reward)]
    else:
        rewards = [one.reward for one in answered]
    if target is not None and execution.finished:
        points = [(one.version, one.reward) for one in answered or ()]
        when = reached(steps, begin, target) if answered is None else reached_held_out(points, steps, begin, target)
    return RunResult(
        schedule=contender.label,
        kind=contender.kind,
        seed=records.config.seed,
        settings=settings,
        status=execution.status,
        began=execution.began,
        load_before=execution.load_before,
        run_dir=execution.run,
        measured=measured,
        reached=when,
        rewards=rewards,
        held_out=list(answered or ()),
        saving_s=math.fsum(step.saving_s for step in steps),
        slots_used_fraction=slots_in_use(records.timeline, begin, measured.training_s, records.slots),
        summary={key: summary.get(key) for key in QUANTITIES if key in summary},
    )

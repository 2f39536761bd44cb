"""The numbers of a comparison, and what its page says of them.

Of each run from its records, then the target, medians, ratios and their spread over seeds. A run that did not reach the
target, or did not finish, has None for a quantity. When the best conventional schedule is chosen, None counts as worse than
any value. A spread or ratio over seeds is None if one seed lacks it, so that failed runs never improve a result. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from pipelinerl.experiments.compare.limit import LIMIT, WorkCosts, core_seconds, costs_of, limit_s
from pipelinerl.experiments.runs import Execution
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.report import PageSection, number, table
from pipelinerl.report.series import RunRecords, measure, reached_held_out, slots_in_use

PIPELINE, CONVENTIONAL = "pipeline", "conventional"
QUANTITIES = {
    "time_to_reward_s": ("time to target, s", ".1f"),
    "samples_to_reward": ("samples to target", ".0f"),
    "samples_per_s": ("samples/s", ".1f"),
    "samples_per_s_later": ("in the last 4/5", ".1f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "length_mean": ("mean length", ".1f"),
    "ess_mean": ("ESS mean", ".4f"),
    "ess_min": ("ESS min", ".3f"),
    "lag_mean": ("lag mean", ".2f"),
    "lag_max": ("lag max", ".0f"),
    "engine_busy_fraction": ("engine busy", ".0%"),
    "trainer_busy_fraction": ("trainer busy", ".0%"),
    "slots_used_fraction": ("slots in use", ".0%"),
    "limit_share": ("share of limit", ".0%"),
    "reward_last": ("last reward", ".3f"),
}
"""What is measured of a run: the heading of its column, and the format of its values. `RunResult.quantities` has them."""


class Settings(msgspec.Struct, frozen=True):
    """`processes` engines of `slots` slots each, and the trainer's ranks. Threads: see `shares_of`."""

    processes: int
    slots: int
    ranks: int = 1

    @property
    def label(self) -> str:
        return f"{self.processes} x H {self.slots}" + (f", {self.ranks} ranks" if self.ranks > 1 else "")


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `held_out` are its evaluations by held-out problems, if there are any.

    `quantities`: those in `QUANTITIES` and `Measured`, and `saving_s`, the part of the time that was spent writing weights.
    `limit_share` is the time of a perfect pipeline (`limit.py`) over the run's, `token_cpu_s` and `trained_cpu_s` are the
    run's own `WorkCosts`, and `core_s` is where a pipeline's seconds went.
    """

    schedule: str
    seed: int
    settings: Settings
    execution: Execution
    held_out: list[EvaluationRecord]
    quantities: dict[str, float | None]
    core_s: dict[str, float] | None = None


def run_result(
    records: RunRecords,
    schedule: str,
    settings: Settings,
    execution: Execution,
    target: float | None,
    *,
    costs: WorkCosts | None,
    cores: int,
) -> RunResult:
    """The results of one run; without a target, it is not reached. `costs`: of the pipeline with its seed, if measured."""
    steps, begin, summary = records.steps, records.begin_s, records.summary or {}
    measured, when, engine = measure(steps, begin), None, records.config.engine
    own = costs_of(records)
    points = [(one.version, one.reward_mean or 0.0) for one in records.evaluations]
    if target is not None and execution.finished:
        when = reached_held_out(points, steps, begin, target)
    found = {name: summary.get(name) for name in QUANTITIES}
    found |= measured._asdict() | {
        "time_to_reward_s": when[0] if when else None,
        "samples_to_reward": when[1] if when else None,
        "samples_per_s": measured.samples_per_s if execution.finished else None,
        "slots_used_fraction": slots_in_use(records.timeline, begin, measured.training_s, engine.slots * engine.processes),
        "reward_last": points[-1][1] if points else None,
        "saving_s": math.fsum(step.saving_s for step in steps),
        "token_cpu_s": own.token_s if own else None,
        "trained_cpu_s": own.trained_s if own else None,
        "limit_share": limit_s(steps, costs, cores) / measured.training_s if costs and execution.finished else None,
    }
    return RunResult(
        schedule=schedule,
        seed=records.config.seed,
        settings=settings,
        execution=execution,
        held_out=records.evaluations,
        quantities=found,
        core_s=core_seconds(records, costs, cores) if costs and execution.finished and schedule == PIPELINE else None,
    )


def target_reward(runs: Iterable[tuple[str, Sequence[EvaluationRecord]]]) -> float | None:
    """The default target: nine tenths of the way from the first reward to a reward that every kind of schedule reaches.

    `runs`: the schedule and the evaluations of each. The range starts at the mean of all runs' first rewards. Its end is a
    minimum over the kinds of schedules: the reward that the kind's best schedule reaches in its worst seed. So every kind
    has a schedule that reaches the target, and a schedule that diverges does not lower it for the others. The target is
    rounded down to two digits of the range. None if the reward did not rise.
    """
    learnt: dict[tuple[str, str], list[list[float]]] = {}
    for schedule, evaluations in runs:
        if evaluations:
            rewards = [one.reward_mean or 0.0 for one in evaluations]
            learnt.setdefault((schedule.partition(":")[0], schedule), []).append(rewards)
    if not learnt:
        return None
    reached: dict[str, float] = {}
    for (kind, _), of_seeds in learnt.items():
        worst = min(map(max, of_seeds))
        reached[kind] = max(reached.get(kind, worst), worst)
    end, start = min(reached.values()), fmean(rewards[0] for of_seeds in learnt.values() for rewards in of_seeds)
    if end <= start:
        return None
    digit = 10.0 ** (math.floor(math.log10(end - start)) - 1)
    return round(math.floor((start + 0.9 * (end - start)) / digit + 1e-9) * digit, 12)


# ---- over seeds


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over seeds. The statistics are None if one seed lacks it. `per_seed` is in the order of the seeds.

    baseline   of a ratio: the best conventional schedule for this quantity. Above 1: better than the baseline
    """

    median: float | None = None
    min: float | None = None
    max: float | None = None
    per_seed: list[float | None]
    baseline: str | None = None

    def text(self, pattern: str) -> str:
        """The median, with the smallest and largest value if they differ."""
        if self.median is None or self.min is None or self.max is None:
            return "-"
        middle, low, high = (format(value, pattern) for value in (self.median, self.min, self.max))
        return middle if low == high else f"{middle} ({low} to {high})"


def spread(values: Sequence[float | None], baseline: str | None = None) -> Spread:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Spread(per_seed=list(values), baseline=baseline)
    return Spread(median=median(known), min=min(known), max=max(known), per_seed=list(values), baseline=baseline)


def over_seeds(runs: Sequence[RunResult], schedule: str, quantity: str) -> list[float | None]:
    """The quantity of one schedule's runs, in the order of their seeds."""
    chosen = sorted((run for run in runs if run.schedule == schedule), key=lambda run: run.seed)
    return [run.quantities[quantity] for run in chosen]


def ratio(runs: Sequence[RunResult], schedule: str, quantity: str, *, low_is_good: bool) -> Spread:
    """How many times better `schedule` is than the best conventional schedule, seed by seed.

    The best has the best median over seeds; there is none if no conventional schedule has a finite median.
    """
    sign = 1 if low_is_good else -1
    costs = {
        one: median(math.inf if value is None else sign * value for value in over_seeds(runs, one, quantity))
        for one in dict.fromkeys(run.schedule for run in runs if run.schedule.startswith(CONVENTIONAL))
    }
    baseline = min((one for one in costs if costs[one] < math.inf), key=costs.__getitem__, default=None)
    own = over_seeds(runs, schedule, quantity)
    others: Sequence[float | None] = [None] * len(own) if baseline is None else over_seeds(runs, baseline, quantity)
    pairs = zip(others, own, strict=True) if low_is_good else zip(own, others, strict=True)
    return spread([above / below if above is not None and below else None for above, below in pairs], baseline)


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule over its seeds. `quantities`: by name, as in `QUANTITIES`."""

    schedule: str
    settings: Settings
    runs: int
    reached: int
    diverged: int
    quantities: dict[str, Spread]
    ratio_time_to_reward: Spread
    ratio_samples_per_s: Spread


def row(runs: Sequence[RunResult], schedule: str) -> ScheduleRow:
    """The table row of one schedule."""
    own = [run for run in runs if run.schedule == schedule]
    return ScheduleRow(
        schedule=schedule,
        settings=own[0].settings,
        runs=len(own),
        reached=sum(run.quantities["time_to_reward_s"] is not None for run in own),
        diverged=sum(not run.execution.finished for run in own),
        quantities={name: spread(over_seeds(runs, schedule, name)) for name in QUANTITIES},
        ratio_time_to_reward=ratio(runs, schedule, "time_to_reward_s", low_is_good=True),
        ratio_samples_per_s=ratio(runs, schedule, "samples_per_s", low_is_good=False),
    )


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How near the pipeline came to a perfect one.

    s_max       how many times faster a perfect pipeline is than `s_max.baseline`, the best conventional schedule by time per
                work
    share       of this that the pipeline reached
    core_share  the parts of `core_seconds` as shares of the cores' time
    """

    s_max: Spread
    share: Spread
    core_share: dict[str, Spread]


def limit_of(runs: Sequence[RunResult]) -> Limit | None:
    """None unless all pipelines of the comparison have it."""
    pipelines = sorted((run for run in runs if run.schedule == PIPELINE), key=lambda run: run.seed)
    parts = [run.core_s for run in pipelines if run.core_s is not None]
    if not parts or len(parts) < len(pipelines):
        return None
    speed_up = ratio(runs, PIPELINE, "limit_share", low_is_good=False)
    share = spread(over_seeds(runs, PIPELINE, "limit_share"))
    pairs = zip(speed_up.per_seed, share.per_seed, strict=True)
    return Limit(
        s_max=spread([up / reached if up and reached else None for up, reached in pairs], speed_up.baseline),
        share=share,
        core_share={name: spread([one[name] / math.fsum(one.values()) for one in parts]) for name in parts[0]},
    )


# ---- in words and tables


def findings(rows: Sequence[ScheduleRow], target: float | None, limit: Limit | None = None) -> list[str]:
    """Sentences that compare pipeline with the best conventional schedule and with the limit, and count failed runs."""
    pipeline = next((row for row in rows if row.schedule == PIPELINE), None)
    sentences: list[str] = []
    if pipeline is not None:
        if target is None:
            sentences.append("No schedule's held-out reward rose, or none was measured: there is no target.")
        elif pipeline.quantities["samples_to_reward"].median == 0:
            sentences.append(f"The initial weights already have a held-out reward of {target:g}: no time to compare.")
        else:
            did = f"reached a held-out reward of {target:g}"
            sentences.append(_in_words(pipeline.ratio_time_to_reward, did, "sooner", "later"))
        sentences.append(_in_words(pipeline.ratio_samples_per_s, "made samples", "faster", "slower"))
    if limit is not None and limit.s_max.median is not None:
        rest = {name: part.median or 0.0 for name, part in limit.core_share.items() if name not in LIMIT}
        lost = ", ".join(f"{name} {rest[name]:.1%}" for name in sorted(rest, key=rest.__getitem__, reverse=True))
        sentences.append(
            f"A perfect pipeline would be {limit.s_max.text('.2f')} times as fast as {limit.s_max.baseline} (S_max). "
            f"pipeline reached {limit.share.text('.0%')} of that. The rest of the cores' time: {lost}."
        )
    for row in rows:
        if row.diverged:
            sentences.append(f"{row.schedule}: {row.diverged} of {row.runs} runs diverged.")
        missed = row.runs - row.reached - row.diverged
        if target is not None and missed:
            sentences.append(f"{row.schedule}: {missed} of {row.runs} runs did not reach {target:g}.")
    return sentences


def _in_words(ratio: Spread, did: str, better: str, worse: str) -> str:
    if ratio.baseline is None:
        return f"There is no conventional run that {did}, so there is no ratio."
    if ratio.median is None or ratio.min is None or ratio.max is None:
        return f"There is no ratio to {ratio.baseline}: at least one run of the two schedules never {did}."
    seeds = len(ratio.per_seed)
    over = f"between {ratio.min:.2f} and {ratio.max:.2f} over {seeds} seeds" if seeds > 1 else "one seed, so no spread"
    comparison, times = (better, ratio.median) if ratio.median >= 1 else (worse, 1 / ratio.median)
    other = f"the best conventional schedule, {ratio.baseline}"
    sentence = f"pipeline {did} {times:.2f} times {comparison} than {other} (ratio {over})."
    if ratio.median < 1:
        return sentence + " Here it does not help."
    if ratio.min <= 1 and seeds > 1:
        return sentence + " Not in every seed: the difference is within the variation between seeds."
    return sentence


def sections(lead: str, target: float | None, rows: Sequence[ScheduleRow], limit: Limit | None) -> list[PageSection]:
    """What the report says after `lead`, above the runs themselves."""
    best = {ratio.baseline for row in rows for ratio in (row.ratio_time_to_reward, row.ratio_samples_per_s)}
    legend = (
        f"Target: a held-out reward of {number(target, 'g')} (linear between evaluated versions). "
        "Values are medians over seeds, with the smallest and largest if they differ. Times sooner and times faster are "
        "ratios, seed by seed, to the schedule that is the best conventional one by its median; above 1 is better."
    )
    cells = [
        {
            "schedule": row.schedule,
            "times sooner": row.ratio_time_to_reward.text(".2f"),
            "times faster": row.ratio_samples_per_s.text(".2f"),
            "runs": f"{row.runs}, of which {row.reached} reached it and {row.diverged} diverged",
            **{heading: row.quantities[name].text(pattern) for name, (heading, pattern) in QUANTITIES.items()},
            "settings": row.settings.label,
        }
        for row in rows
    ]
    return [
        PageSection(title="Findings", texts=[lead, *findings(rows, target, limit)]),
        table("Schedules", cells, legend, strong=[PIPELINE, *(one for one in best if one)]),
    ]

"""What a comparison's numbers say in words, for and against PipelineRL. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelinerl.compare.contenders import PIPELINE
from pipelinerl.compare.results import Ratio, Row

BALANCED = 0.1
"""Busy fractions that differ by less do not say which phase the other waits for."""

LIMITS = (
    "It does not help where completions have equal lengths: then no long tail runs at small batch sizes, and that tail is "
    "most of what a pipeline saves. `pipelinerl compare examples/compare_equal_lengths.yaml` shows it.",
    "It does not help where one phase dominates: overlapping two phases saves at most the time of the shorter one, and only "
    "if the longer one loses none of the hardware by it. A table row with a trainer that is hardly busy says so.",
    "On one machine both schedules share the same cores. Where each phase alone keeps all of them computing, there is "
    "nothing idle to fill, however the work is arranged.",
    "Its data are older. Where learning suffers from lag, more samples a second buy less than their number says: compare "
    "the samples that each schedule needed.",
)


def findings(rows: Sequence[Row], target: float | None, reward: str) -> list[str]:
    """Sentences on pipeline against the best conventional schedule, and on runs that did not get there. `reward`: whose."""
    by_name = {row.schedule: row for row in rows}
    pipeline = by_name.get(PIPELINE)
    said: list[str] = []
    if pipeline is not None:
        time = pipeline.ratio_time_to_reward
        if target is None:
            said.append(f"No schedule's {reward} reward rose, so there is no target to compare times by.")
        elif pipeline.samples_to_reward.median == 0:
            said.append(f"The first weights have a {reward} reward of {target:g} already, so there is no time to it.")
        else:
            said.append(_in_words(time, f"reached a {reward} reward of {target:g}", "sooner", "later"))
        said.append(_in_words(pipeline.ratio_samples_per_s, "made samples", "faster", "slower"))
        said += _efficiency(pipeline, by_name.get(time.baseline or ""))
        said += _bottleneck(pipeline, by_name)
    for row in rows:
        if row.diverged:
            said.append(f"{row.schedule}: {row.diverged} of {row.runs} runs diverged.")
        missed = row.runs - row.reached - row.diverged
        if target is not None and missed:
            said.append(f"{row.schedule}: {missed} of {row.runs} runs did not reach {target:g}.")
    return said


def _in_words(ratio: Ratio, did: str, better: str, worse: str) -> str:
    if ratio.baseline is None:
        return f"There is no conventional run that {did}, so there is no ratio."
    if ratio.median is None or ratio.min is None or ratio.max is None:
        return f"Against {ratio.baseline} there is no ratio: a run of one or the other never {did}."
    seeds = len(ratio.per_seed)
    over = f"between {ratio.min:.2f} and {ratio.max:.2f} over {seeds} seeds" if seeds > 1 else "one seed, so no spread"
    comparison = better if ratio.median >= 1 else worse
    times = ratio.median if ratio.median >= 1 else 1 / ratio.median
    other = f"the best conventional schedule, {ratio.baseline}"
    sentence = f"pipeline {did} {times:.2f} times {comparison} than {other} (ratio {over})."
    if ratio.median < 1:
        return sentence + " Here it does not help."
    if ratio.min <= 1 and seeds > 1:
        return sentence + " Not in every seed: the difference is within what seeds do."
    return sentence


def _efficiency(pipeline: Row, baseline: Row | None) -> list[str]:
    own = pipeline.samples_to_reward.median
    other = baseline.samples_to_reward.median if baseline else None
    if baseline is None or not own or not other:
        return []
    return [
        f"For it pipeline needed {own:.0f} samples and {baseline.schedule} {other:.0f} ({own / other:.2f} times as many): "
        f"lag {_number(pipeline.lag_mean)} against {_number(baseline.lag_mean)} optimizer steps on average."
    ]


def _bottleneck(pipeline: Row, rows: Mapping[str, Row]) -> list[str]:
    """Which phase the pipeline waited for, and how the fastest conventional schedule's time divides."""
    said = []
    engine, trainer = pipeline.engine_busy_fraction, pipeline.trainer_busy_fraction
    if engine is not None and trainer is not None:
        slower = "generation" if engine > trainer else "training"
        conclusion = (
            "the phases are about balanced" if abs(engine - trainer) < BALANCED else f"{slower} is what it waits for"
        )
        said.append(
            f"In pipeline the engines were busy {engine:.0%} of the time and the trainer {trainer:.0%}: {conclusion}."
        )
    baseline = rows.get(pipeline.ratio_samples_per_s.baseline or "")
    if baseline and baseline.engine_busy_fraction is not None and baseline.trainer_busy_fraction is not None:
        said.append(
            f"In {baseline.schedule}, the fastest conventional one, engines computed {baseline.engine_busy_fraction:.0%} "
            f"of the time and the trainer {baseline.trainer_busy_fraction:.0%}"
            + (
                f"; {baseline.slots_used_fraction:.0%} of the slots were in use while any was."
                if baseline.slots_used_fraction
                else "."
            )
        )
    return said


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

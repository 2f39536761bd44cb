"""The numbers that runs are compared by, against references that say the same slowly."""

from __future__ import annotations

import math
import random
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.schema import RunConfig, ScheduleConfig
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.timeline import TimelineRecord
from pipelinerl.report.series import (
    WINDOW,
    BatchSize,
    Reached,
    batch_size_over_time,
    begin_s,
    measure,
    name_of,
    rate_after,
    reached,
    reached_held_out,
    slots_in_use,
    tokens_rate_after,
    windowed,
)


def step(version: int, time_s: float, reward: float | None = 0.0, **changed: float) -> StepRecord:
    values = {"samples": 10, "train_s": 0.5, "wait_s": 1.5, "completion_length_mean": 20.0} | changed
    return StepRecord(version=version, time_s=time_s, reward_mean=reward, **values)  # type: ignore[arg-type]


def look(worker: int, time_s: float, in_progress: int) -> TimelineRecord:
    return TimelineRecord(worker=worker, time_s=time_s, in_progress=in_progress, queued=0, tokens_generated=0, version=0)


STEPS = [step(n, 5.0 + 2.0 * n, 0.1 * n) for n in range(1, 11)]


def test_time_begins_when_the_trainer_is_ready_and_engines_are() -> None:
    assert begin_s(STEPS) == 5.0  # 7 - 0.5 - 1.5
    engines = [look(0, 4.0, 0), look(1, 5.5, 0), look(0, 5.25, 0), look(0, 6.0, 3)]
    assert begin_s(STEPS, engines) == 5.5
    assert begin_s(STEPS, [look(0, 4.0, 2), look(1, 6.0, 0)]) == 5.0  # it was at work before
    assert begin_s(STEPS, [look(0, 5.75, 2), look(1, 6.0, 0)]) == 5.75  # it came up then, and was at work by its first look
    before = EvaluationRecord(when="before", version=0, time_s=6.0, problems=1)
    after = EvaluationRecord(when="after", version=10, time_s=30.0, problems=1)
    assert begin_s(STEPS, [], [before, after]) == 6.0
    assert begin_s(STEPS, [look(0, 99.0, 0)]) == 6.5  # never after the first step began


def test_rates_are_over_all_of_training() -> None:
    found = measure(STEPS, 5.0)
    assert (found.training_s, found.samples, found.steps) == (20.0, 100, 10)
    assert found.samples_per_s == 5.0
    assert found.tokens_per_s == 100.0
    assert found.length_mean == 20.0
    assert found.trainer_busy_s == 5.0
    uneven = [*STEPS[:2], *(step(n, 5.0 + 4.0 * n) for n in range(3, 11))]
    assert measure(uneven, 5.0).samples_per_s_later == pytest.approx(80 / (45.0 - 9.0))


def test_a_rate_after_the_fill() -> None:
    assert rate_after(STEPS, 4) == pytest.approx(60 / 12.0)
    assert rate_after(STEPS, 10) is None
    assert rate_after(STEPS[:1], 1) is None
    assert rate_after(STEPS, 0) is None


def test_tokens_after_the_fill_count_every_sample_by_its_length() -> None:
    uneven = [msgspec.structs.replace(one, completion_length_mean=float(number)) for number, one in enumerate(STEPS)]
    tokens = sum(one.samples * number for number, one in enumerate(uneven) if number >= 4)
    assert tokens_rate_after(uneven, 4) == pytest.approx(tokens / 12.0)
    assert tokens_rate_after(uneven, 10) is None


def test_rewards_are_averaged_over_whole_windows() -> None:
    rewards = [0.1 * n for n in range(8)]
    found = windowed(rewards)
    assert all(math.isnan(value) for value in found[: WINDOW - 1])
    assert found[WINDOW - 1 :] == pytest.approx([fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, 9)])
    assert math.isnan(windowed([1.0, 1.0, None, 1.0, 1.0])[-1])


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30), st.floats(0, 1))
def test_reaching_a_target(rewards: list[float | None], target: float) -> None:
    steps = [step(n, 5.0 + 2.0 * n, reward) for n, reward in enumerate(rewards, start=1)]
    found = reached(steps, 5.0, target)
    expected = None
    for end in range(WINDOW, len(rewards) + 1):
        window = rewards[end - WINDOW : end]
        if None not in window and math.fsum(window) / WINDOW >= target:  # type: ignore[arg-type]
            expected = end
            break
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.version, found.time_s, found.samples) == (expected, 2.0 * expected, 10 * expected)


def total_at(timeline: list[TimelineRecord], time_s: float) -> int:
    """What all engines had said by then."""
    latest: dict[int, TimelineRecord] = {}
    for sample in timeline:
        known = latest.get(sample.worker)
        if sample.time_s <= time_s and (known is None or sample.time_s >= known.time_s):
            latest[sample.worker] = sample
    return sum(sample.in_progress for sample in latest.values())


@pytest.mark.parametrize("seed", range(5))
def test_batch_size_adds_up_over_engines(seed: int) -> None:
    rng = random.Random(seed)
    times = rng.sample(range(1000), 60)
    timeline = [look(rng.randrange(3), time / 10, rng.randrange(9)) for time in times]
    found = batch_size_over_time(timeline, 30.0)
    assert found.time_s == sorted(found.time_s)
    assert len(set(found.time_s)) == len(found.time_s)
    assert found.time_s[0] == 0.0
    for time_s, total in zip(found.time_s, found.in_progress, strict=True):
        assert total == total_at(timeline, time_s + 30.0)


def test_slots_in_use_while_generating() -> None:
    batch = BatchSize(time_s=[0.0, 1.0, 3.0, 4.0], in_progress=[8, 4, 0, 8])
    assert slots_in_use(batch, 8, 6.0) == pytest.approx((1 * 8 + 2 * 4 + 2 * 8) / (5 * 8))
    assert slots_in_use(batch, 8, 3.5) == pytest.approx((1 * 8 + 2 * 4) / (3 * 8))  # what comes later does not count
    assert slots_in_use(BatchSize([0.0], [0]), 8, 5.0) is None
    assert slots_in_use(BatchSize([], []), 8, 5.0) is None


def slow_reached_held_out(points: list[tuple[int, float]], steps: list[StepRecord], begin: float, target: float) -> object:
    """The definition, version by version."""
    versions, rewards = zip(*points, strict=True)
    for version in range(versions[0], versions[-1] + 1):
        if np.interp(version, versions, rewards) >= target - 1e-9:
            done = [one for one in steps if one.version <= version]
            time_s = done[-1].time_s - begin if done else 0.0
            return Reached(version=version, time_s=time_s, samples=sum(one.samples for one in done))
    return None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_the_step_that_reaches_a_held_out_reward(hundredths: list[int], every: int, target: int) -> None:
    points = [(number * every, reward / 100) for number, reward in enumerate(hundredths)]
    steps = [StepRecord(version=n, time_s=5.0 + n * n, samples=n) for n in range(1, points[-1][0] + 1)]
    assert reached_held_out(points, steps, 5.0, target / 100) == slow_reached_held_out(points, steps, 5.0, target / 100)


def test_schedules_have_the_names_that_comparisons_use() -> None:
    assert name_of(RunConfig(schedule=ScheduleConfig(kind="conventional", steps_per_round=2))) == "conventional:2"
    assert name_of(RunConfig()) == "pipeline"

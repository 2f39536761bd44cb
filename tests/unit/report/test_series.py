"""The numbers that runs are compared by, against references that compute the same slowly."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.metrics.records import StepRecord
from pipelinerl.report.series import measure, rates_after, reached_held_out, slots_in_use
from tests.unit.record_parts import step
from tests.unit.report.test_curves import look

STEPS = [step(n, 5.0 + 2.0 * n, samples=10, train_s=0.5, completion_length_mean=20.0) for n in range(1, 11)]


def test_rates_are_over_all_of_training() -> None:
    found = measure(STEPS, 5.0)
    assert (found.training_s, found.samples_per_s, found.tokens_per_s, found.length_mean) == (20.0, 5.0, 100.0, 20.0)
    uneven = [*STEPS[:2], *(step(n, 5.0 + 4.0 * n, samples=10) for n in range(3, 11))]
    assert measure(uneven, 5.0).samples_per_s_later == pytest.approx(80 / (45.0 - 9.0))


def test_rates_after_the_fill_count_every_sample_and_every_token() -> None:
    uneven = [step(n, 5.0 + 2.0 * n, samples=10, completion_length_mean=float(n)) for n in range(1, 11)]
    assert rates_after(uneven, 4) == pytest.approx((60 / 12.0, 10 * sum(range(5, 11)) / 12.0))
    assert [rates_after(STEPS[:steps], fill) for steps, fill in ((10, 10), (1, 1), (10, 0))] == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_slots_in_use_while_generating(seed: int) -> None:
    rng = random.Random(seed)
    timeline = [look(rng.randrange(3), time / 8, rng.choice((0, 0, 5))) for time in rng.sample(range(800), 60)]
    totals = []  # of all engines, in the middle of each eighth of a second from 30 s to 90 s
    for eighth in range(240, 720):
        so_far = sorted((one for one in timeline if one.time_s <= eighth / 8), key=lambda one: one.time_s)
        totals.append(sum({one.worker: one.in_progress for one in so_far}.values()))
    assert slots_in_use(timeline, 30.0, 60.0, 16) == pytest.approx(fmean(total for total in totals if total) / 16)
    assert [slots_in_use(idle, 0.0, 5.0, 8) for idle in ([look(0, 1.0, 0)], [])] == [None, None]


def slow_reached_held_out(points: list[tuple[int, float]], steps: list[StepRecord], begin: float, target: float) -> object:
    """The definition, version by version."""
    versions, rewards = zip(*points, strict=True)
    for version in range(versions[0], versions[-1] + 1):
        if np.interp(version, versions, rewards) >= target - 1e-9:
            done = [one for one in steps if one.version <= version]
            time_s = done[-1].time_s - begin if done else 0.0
            return time_s, sum(one.samples for one in done)
    return None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_the_step_that_reaches_a_held_out_reward(hundredths: list[int], every: int, target: int) -> None:
    points = [(number * every, reward / 100) for number, reward in enumerate(hundredths)]
    steps = [step(n, 5.0 + n * n, samples=n) for n in range(1, points[-1][0] + 1)]
    assert reached_held_out(points, steps, 5.0, target / 100) == slow_reached_held_out(points, steps, 5.0, target / 100)

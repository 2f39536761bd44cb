from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.preprocess.preprocessor import STD_EPSILON, advantages

Baseline = Literal["group_mean", "leave_one_out"]
BASELINES: list[Baseline] = ["group_mean", "leave_one_out"]
REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


@given(REWARDS)
def test_group_mean_equals_its_formula(rewards: list[float]) -> None:
    expected = [reward - sum(rewards) / len(rewards) for reward in rewards]
    assert advantages(rewards, baseline="group_mean") == pytest.approx(expected, abs=1e-10)
    assert math.fsum(advantages(rewards, baseline="group_mean")) == pytest.approx(0.0, abs=1e-10)


@given(REWARDS)
def test_leave_one_out_equals_its_formula(rewards: list[float]) -> None:
    expected = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected.append(reward - sum(others) / len(others))
    assert advantages(rewards, baseline="leave_one_out") == pytest.approx(expected, abs=1e-10)


@given(REWARDS, st.sampled_from(BASELINES))
def test_normalised_advantages_are_divided_by_the_population_deviation(rewards: list[float], baseline: Baseline) -> None:
    plain = np.array(advantages(rewards, baseline=baseline))
    normalised = advantages(rewards, baseline=baseline, normalize_std=True)
    assert normalised == pytest.approx(list(plain / (np.std(rewards) + STD_EPSILON)), rel=1e-6, abs=1e-6)


@given(st.floats(-1e30, 1e30), st.integers(1, 64), st.sampled_from(BASELINES), st.booleans())
def test_identical_rewards_give_exactly_zero(reward: float, size: int, baseline: Baseline, normalize: bool) -> None:
    assert advantages([reward] * size, baseline=baseline, normalize_std=normalize) == [0.0] * size


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_largest_rewards_allowed_give_finite_advantages(baseline: Baseline) -> None:
    for normalize in (False, True):
        values = advantages([1e30, -1e30], baseline=baseline, normalize_std=normalize)
        assert all(math.isfinite(value) for value in values)
        assert values[0] == -values[1] > 0


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e31, -1e31])
def test_rewards_that_are_not_usable_numbers_are_refused(baseline: Baseline, reward: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        advantages([0.0, reward, 1.0], baseline=baseline)

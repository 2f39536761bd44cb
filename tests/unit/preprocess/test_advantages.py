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
def test_advantages_equal_their_formula(rewards: list[float]) -> None:
    mean = [reward - sum(rewards) / len(rewards) for reward in rewards]
    assert advantages(rewards, baseline="group_mean") == pytest.approx(mean, abs=1e-10)
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    left_out = [reward - sum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]
    assert advantages(rewards, baseline="leave_one_out") == pytest.approx(left_out, abs=1e-10)


@given(REWARDS, st.sampled_from(BASELINES))
def test_normalised_advantages_are_divided_by_the_population_deviation(rewards: list[float], baseline: Baseline) -> None:
    plain = np.array(advantages(rewards, baseline=baseline))
    normalised = advantages(rewards, baseline=baseline, normalize_std=True)
    assert normalised == pytest.approx(list(plain / (np.std(rewards) + STD_EPSILON)), rel=1e-6, abs=1e-6)


@given(st.floats(-1e30, 1e30), st.integers(1, 64), st.sampled_from(BASELINES), st.booleans())
def test_identical_rewards_give_exactly_zero(reward: float, size: int, baseline: Baseline, normalize: bool) -> None:
    assert advantages([reward] * size, baseline=baseline, normalize_std=normalize) == [0.0] * size


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_largest_rewards_allowed_give_finite_advantages_and_others_are_refused(baseline: Baseline) -> None:
    for normalize in (False, True):
        values = advantages([1e30, -1e30], baseline=baseline, normalize_std=normalize)
        assert math.inf > values[0] == -values[1] > 0
    for reward in (math.nan, math.inf, -math.inf, 1e31, -1e31):
        with pytest.raises(ValueError, match="not a finite number"):
            advantages([0.0, reward, 1.0], baseline=baseline)

"""The maths of evaluations against slow references shaped like the definitions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pipelinerl.experiments.statistics import Interval, mean_intervals, pass_at_k


def share_of_choices_with_a_pass(attempts: int, passes: int, k: int) -> float:
    choices = list(combinations(range(attempts), k))
    return sum(any(attempt < passes for attempt in choice) for choice in choices) / len(choices)


def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass() -> None:
    for attempts in range(1, 9):
        for passes in range(attempts + 1):
            for k in range(1, attempts + 1):
                expected = share_of_choices_with_a_pass(attempts, passes, k)
                assert pass_at_k(attempts, passes, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("attempts", "passes", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_of_what_can_not_be(attempts: int, passes: int, k: int) -> None:
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(attempts, passes, k)


def slow_interval(values: list[float], resamples: int, seed: int, level: float) -> Interval:
    generator = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [values[place] for place in generator.integers(0, len(values), len(values))]
        means.append(sum(drawn) / len(drawn))
    return Interval(
        sum(values) / len(values), float(np.quantile(means, (1 - level) / 2)), float(np.quantile(means, (1 + level) / 2))
    )


def test_intervals_are_percentiles_of_resampled_means() -> None:
    values_UQ = np.random.default_rng(1).random((13, 3))
    found = mean_intervals(values_UQ, resamples=200, seed=5, level=0.9)
    for q, interval in enumerate(found):
        expected = slow_interval(values_UQ[:, q].tolist(), 200, 5, 0.9)
        assert (interval.mean, interval.low, interval.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert found == mean_intervals(values_UQ, resamples=200, seed=5, level=0.9)
    assert found != mean_intervals(values_UQ, resamples=200, seed=6, level=0.9)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Problems of different difficulty, 4 attempts at each: resampling attempts as if independent would cover too rarely."""
    generator = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        chances_U = (generator.random(60) < 0.4).astype(float) * 0.9 + 0.05
        values_U = generator.binomial(4, chances_U) / 4
        (interval,) = mean_intervals(values_U[:, None], resamples=200, seed=trial, level=0.95)
        covered += interval.low <= 0.4 * 0.95 + 0.6 * 0.05 <= interval.high
    assert 0.91 < covered / 200 < 0.98

"""The maths of evaluations against slow references shaped like the definitions."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from pipelinerl.experiments.statistics import (
    intervals,
    mean_intervals,
    pass_at_k,
    resampled_means,
    student_quantile,
)


def share_of_choices_with_a_pass(attempts: int, passes: int, k: int) -> float:
    choices = list(combinations(range(attempts), k))
    return sum(any(attempt < passes for attempt in choice) for choice in choices) / len(choices)


def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass() -> None:
    for attempts in range(1, 9):
        for passes in range(attempts + 1):
            for k in range(1, attempts + 1):
                expected = share_of_choices_with_a_pass(attempts, passes, k)
                assert pass_at_k(attempts, passes, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
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


def test_means_over_tokens_are_ratios_in_each_resample() -> None:
    """Each resample is written out. Differences share the resamples, and a resample without tokens counts for nothing."""
    rng = np.random.default_rng(0)
    counts_UQ = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0], [0.0, 0.0]])
    sums_UQ = counts_UQ * rng.normal(3, 2, (4, 2))
    means_RQ = resampled_means(sums_UQ, counts_UQ, resamples=300, seed=5)
    draws = np.random.default_rng(5)
    for row, means in zip([range(4), *(draws.integers(0, 4, 4) for _ in range(300))], means_RQ.tolist(), strict=True):
        expected = [sum(sums_UQ[u, q] for u in row) / (sum(counts_UQ[u, q] for u in row) or math.nan) for q in range(2)]
        assert means == pytest.approx(expected, nan_ok=True)
    one, other, difference = intervals(np.column_stack([means_RQ, means_RQ[:, 0] - means_RQ[:, 1]]), level=0.9)
    assert np.isnan(means_RQ[:, 1]).any()
    assert [other.low, other.high] == pytest.approx(list(np.nanquantile(means_RQ[1:, 1], [0.05, 0.95])))
    assert difference.mean == pytest.approx(one.mean - other.mean)
    assert math.isnan(intervals(np.full((3, 1), math.nan))[0].low)


def test_students_quantiles_are_those_of_the_tables() -> None:
    """Of Abramowitz and Stegun, table 26.10."""
    for freedom, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)):
        assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=5e-4)
    assert student_quantile(0.99, 5) == pytest.approx(4.032, abs=5e-4)

"""The learning rate of a step, and how samples are packed into micro-batches."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.micro_batch import pack
from pipelinerl.trainer.optimizer import FLOOR, learning_rate


def rates(schedule: str, warmup: int, total: int, count: int) -> list[float]:
    config = TrainerConfig(learning_rate=2.0, lr_schedule=schedule, warmup_steps=warmup, steps=total)
    return [learning_rate(config, step) for step in range(count)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "expected"),
    [
        ("constant", 0, 5, [2.0] * 8),
        ("constant", 4, 10, [0.4, 0.8, 1.2, 1.6, 2.0, 2.0]),
        ("cosine", 4, 10, [0.4, 0.8, 1.2, 1.6, 2.0]),
        ("linear", 0, 5, [2.0, 1.55, 1.1, 0.65, 0.2, 0.2, 0.2]),
        ("cosine", 0, 5, [*(0.2 + 1.8 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)), 0.2, 0.2]),
    ],
)
def test_the_rate_rises_to_the_peak_and_falls_to_a_tenth_of_it(
    schedule: str, warmup: int, total: int, expected: list[float]
) -> None:
    assert rates(schedule, warmup, total, len(expected)) == pytest.approx(expected)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 60))
def test_rates_rise_then_never_rise_again_and_stay_within_bounds(schedule: str, warmup: int, total: int) -> None:
    values = rates(schedule, warmup, total, total + 5)
    assert all(a < b for a, b in pairwise(values[: warmup + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[warmup:]))
    assert all(0 < value <= 2.0 + 1e-12 for value in values)
    assert all(value >= 2.0 * FLOOR - 1e-12 for value in values[warmup:])


def slow_best_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = None
        for items in bins:
            free = budget - sum(lengths[i] for i in items)
            if free >= lengths[index] and (best is None or free < budget - sum(lengths[i] for i in best)):
                best = items
        if best is None:
            bins.append([index])
        else:
            best.append(index)
    return sorted(sorted(items) for items in bins)


@given(st.lists(st.integers(1, 150), max_size=80), st.integers(1, 200))
def test_bins_are_those_of_the_slow_reference(lengths: list[int], budget: int) -> None:
    assert pack(lengths, budget) == slow_best_fit_decreasing(lengths, budget)


@pytest.mark.parametrize(("lengths", "budget"), [([1, 0], 5), ([-1], 5), ([1], 0)])
def test_impossible_lengths_and_budgets_are_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="can't pack"):
        pack(lengths, budget)

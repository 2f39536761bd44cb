from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.trainer.optimizer import FLOOR, learning_rate

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: list[Schedule] = ["constant", "linear", "cosine"]


def rates(schedule: Schedule, warmup: int, total: int, count: int | None = None) -> list[float]:
    return [
        learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total)
        for step in range(total if count is None else count)
    ]


def test_constant_without_warmup_is_the_peak() -> None:
    assert rates("constant", 0, 5, 8) == [2.0] * 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_evenly_to_the_peak(schedule: Schedule) -> None:
    assert rates(schedule, 4, 10)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_linear_falls_evenly_to_a_tenth_at_the_last_step_and_stays() -> None:
    assert rates("linear", 0, 5, 7) == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2, 0.2, 0.2])


def test_cosine_is_half_a_wave_down_to_a_tenth() -> None:
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert rates("cosine", 0, 5, 7) == pytest.approx([*expected, 0.2, 0.2])
    assert rates("cosine", 0, 5)[2] == pytest.approx(1.1)


@given(st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(1, 60))
def test_rates_rise_then_never_rise_again_and_stay_within_bounds(schedule: Schedule, warmup: int, total: int) -> None:
    values = rates(schedule, warmup, total, total + 5)
    assert all(a < b for a, b in pairwise(values[: warmup + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[warmup:]))
    assert all(0 < value <= 2.0 + 1e-12 for value in values)
    assert all(value >= 2.0 * FLOOR - 1e-12 for value in values[warmup:])

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.preprocess.packing import pack

LENGTHS = st.lists(st.integers(1, 150), max_size=80)
BUDGETS = st.integers(1, 200)


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


@given(LENGTHS, BUDGETS)
def test_equals_the_slow_reference(lengths: list[int], budget: int) -> None:
    assert pack(lengths, budget) == slow_best_fit_decreasing(lengths, budget)


@given(LENGTHS, BUDGETS)
def test_every_index_once_within_the_budget_and_few_bins(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= budget or len(items) == 1 for items in bins)
    overlong = sum(length > budget for length in lengths)
    assert len(bins) <= 2 * math.ceil(sum(length for length in lengths if length <= budget) / budget) + overlong


@given(LENGTHS, BUDGETS)
def test_no_two_bins_could_have_been_one(lengths: list[int], budget: int) -> None:
    totals = sorted(sum(lengths[i] for i in items) for items in pack(lengths, budget))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


@given(LENGTHS, BUDGETS)
def test_order_is_stable(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert all(items == sorted(items) for items in bins)
    assert [items[0] for items in bins] == sorted(items[0] for items in bins)


def test_known_packings() -> None:
    assert pack([], 10) == []
    assert pack([10], 10) == [[0]]
    assert pack([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert pack([3, 12, 3, 4], 10) == [[0, 2, 3], [1]]
    assert pack([11, 11], 10) == [[0], [1]]


def test_perfect_fits_are_found() -> None:
    lengths = [7, 3, 6, 4, 8, 2] * 50
    assert len(pack(lengths, 10)) == 150


@pytest.mark.parametrize(("lengths", "budget"), [([1, 0], 5), ([-1], 5), ([1], 0)])
def test_nonsense_is_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="can't pack"):
        pack(lengths, budget)

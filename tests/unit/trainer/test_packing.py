from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.trainer.micro_batch import pack

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


@pytest.mark.parametrize(("lengths", "budget"), [([1, 0], 5), ([-1], 5), ([1], 0)])
def test_nonsense_is_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="can't pack"):
        pack(lengths, budget)

"""The plan of a step over several ranks: complete, rectangular, within the budget, and even within a row."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.trainer.micro_batch import pack, padded_bins
from pipelinerl.trainer.sharding.learner import plan, plan_padded

ATTENTION = 0.01
LENGTHS = st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=3), max_size=40)


def cost(lengths: list[int]) -> float:
    return sum(length + ATTENTION * length**2 for length in lengths)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 400), st.booleans())
def test_every_sample_has_one_place_and_rows_are_full_few_and_descend_in_cost(
    lengths: list[list[int]], ranks: int, budget: int, padded: bool
) -> None:
    grid = plan_padded(lengths, ranks, budget) if padded else plan(lengths, ATTENTION, ranks, budget)
    places = [place for row in grid for place in row]
    assert all(len(row) == ranks for row in grid)
    assert sorted(index for place in places for index in place) == list(range(len(lengths)))
    assert all(all(row) for row in grid[:-1]), "only the last row has empty places"
    assert all(any(row) for row in grid)
    if padded:
        longest = [max((max(lengths[index]) for index in place), default=0) for place in places]
        cells = [sum(len(lengths[index]) for index in place) * most for place, most in zip(places, longest, strict=True)]
        assert all(len(place) <= 1 or size <= budget for place, size in zip(places, cells, strict=True))
        assert len(grid) == -(-len(padded_bins(lengths, budget)) // ranks)
        return
    tokens = [sum(of_sample) for of_sample in lengths]
    assert all(len(place) <= 1 or sum(tokens[index] for index in place) <= budget for place in places)
    assert all(places) or all(len(place) <= 1 for place in places), "one is empty only if every other has one sample"
    # Any two bins of `pack` exceed the budget; even bins waste at most about half of it, too.
    assert len(grid) <= 2 * -(-len(pack(tokens, budget)) // ranks) + 1
    rows = [[sum(cost(lengths[index]) for index in place) for place in row] for row in grid]
    assert all(min(above) >= max(below) - 1e-6 for above, below in pairwise(rows))


@given(LENGTHS.filter(bool), st.integers(2, 9))
def test_a_row_is_even(lengths: list[list[int]], ranks: int) -> None:
    """Greedy distribution: two places differ by at most one sample."""
    (row,) = plan(lengths, ATTENTION, ranks, sum(map(sum, lengths)))
    sums = [sum(cost(lengths[index]) for index in place) for place in row]
    assert max(sums) - min(sums) <= max(map(cost, lengths)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (plan([[8], [7], [6], [5]], 0.0, 2, 8), [[[0], [1]], [[3], [2]]]),
        (plan([[50, 50], [100]], 0.01, 2, 100), [[[1], [0]]]),
        (plan_padded([[40], [10], [38], [12]], 2, 200), [[[0, 2], [3, 1]]]),
    ],
    ids=["every other row is reversed", "a long sequence costs more than two short ones", "padded: similar lengths"],
)
def test_examples(grid: list[list[list[int]]], expected: list[list[list[int]]]) -> None:
    assert grid == expected

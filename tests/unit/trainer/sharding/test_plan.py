"""The plan of a step over several ranks: complete, rectangular, within the budget, and even within a row."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.trainer.micro_batch import pack, padded_bins
from pipelinerl.trainer.sharding.plan import plan, plan_padded, token_cost

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


def costs_of(lengths: list[int]) -> list[float]:
    return [token_cost([length], 0.01) for length in lengths]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 400))
def test_every_sample_has_one_place_and_rows_are_full_few_and_descend_in_cost(
    lengths: list[int], ranks: int, budget: int
) -> None:
    costs = costs_of(lengths)
    grid = plan(lengths, costs, ranks, budget)
    assert all(len(row) == ranks for row in grid)
    assert sorted(index for row in grid for place in row for index in place) == list(range(len(lengths)))
    assert all(all(row) for row in grid[:-1]), "only the last row has empty places"
    assert all(any(row) for row in grid)
    places = [place for row in grid for place in row]
    assert all(len(place) <= 1 or sum(lengths[index] for index in place) <= budget for place in places)
    assert all(places) or all(len(place) <= 1 for place in places), "one is empty only if every other has one sample"
    # Any two bins of `pack` exceed the budget; even bins waste at most about half of it, too.
    assert len(grid) <= 2 * -(-len(pack(lengths, budget)) // ranks) + 1
    rows = [[sum(costs[index] for index in place) for place in row] for row in grid]
    assert all(min(above) >= max(below) for above, below in pairwise(rows))


@given(LENGTHS.filter(bool), st.integers(2, 9))
def test_a_row_is_even(lengths: list[int], ranks: int) -> None:
    """Greedy distribution: two places differ by at most one sample."""
    costs = costs_of(lengths)
    (row,) = plan(lengths, costs, ranks, sum(lengths))
    sums = [sum(costs[index] for index in place) for place in row]
    assert max(sums) - min(sums) <= max(costs) * (1 + 1e-9)


def test_reversed_rows_even_out_the_ranks() -> None:
    grid = plan([8, 7, 6, 5], [8.0, 7.0, 6.0, 5.0], 2, 8)
    assert grid == [[[0], [1]], [[3], [2]]]


def test_attention_makes_a_long_sequence_dearer_than_short_ones_with_as_many_tokens() -> None:
    assert token_cost([100], 0.01) == pytest.approx(200)
    assert token_cost([50, 50], 0.01) == pytest.approx(150)


@given(
    lengths=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=30),
    ranks=st.integers(1, 4),
)
def test_padded_bins_hold_every_sample_once_within_the_budget_and_leave_only_last_places_empty(
    lengths: list[list[int]], ranks: int
) -> None:
    budget = 120
    grid = plan_padded(lengths, ranks, budget)
    bins = [place for row in grid for place in row]
    assert sorted(index for place in bins for index in place) == list(range(len(lengths)))
    for place in bins:
        cells = sum(len(lengths[i]) for i in place) * max((max(lengths[i]) for i in place), default=0)
        assert len(place) <= 1 or cells <= budget
    assert all(len(row) == ranks for row in grid)
    used = sum(map(bool, bins))
    assert all(bins[:used])
    assert len(grid) == -(-len(padded_bins(lengths, budget)) // ranks)


def test_padded_bins_are_even_and_of_similar_lengths() -> None:
    assert plan_padded([[40], [10], [38], [12]], ranks=2, budget=200) == [[[0, 2], [3, 1]]]

"""The study's arithmetic: who samples which token, and divergences, against slow references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.experiments.study.policies import Tokens, equivalent_lag, exact_kl, interval_edges, mixed_policy, sums


def slow_versions(first: int, lag: int, length: int) -> list[int]:
    """A clock: a token takes g/L of an optimizer step; the update of a step arrives one step after it began to be made."""
    versions = []
    for token in range(length):
        steps_done = 0
        while (steps_done + 1) * length <= token * lag:  # in whole numbers: token >= (steps_done + 1) L / g
            steps_done += 1
        versions.append(first + max(0, steps_done - 1))
    return versions


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 300))
def test_versions_are_those_of_a_clock(first: int, lag: int, more: int) -> None:
    length = lag + more
    versions = mixed_policy(first, lag, length)
    assert versions == slow_versions(first, lag, length)
    assert versions[0] == first
    assert first + lag - versions[-1] == min(lag, 2)


def test_intervals_cover_all_tokens() -> None:
    assert interval_edges(4, 10) == (0, 3, 5, 8, 10)
    with pytest.raises(ValueError, match="at least one token"):
        mixed_policy(0, 5, 4)


def distributions(count: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def test_exact_kl_is_its_formula() -> None:
    mu, pi = distributions(6, 11, 1), distributions(6, 11, 2)
    mu[2, 3] = -math.inf
    expected = [
        sum(math.exp(m) * (m - p) for m, p in zip(row, other, strict=True) if m > -math.inf)
        for row, other in zip(mu.tolist(), pi.tolist(), strict=True)
    ]
    assert exact_kl(mu, pi).tolist() == pytest.approx(expected, rel=1e-9)
    assert exact_kl(mu, mu).tolist() == [0.0] * 6
    both = torch.tensor([[0.0, -math.inf]])
    assert exact_kl(both, both).tolist() == [0.0]


def test_sums_by_problem_and_position() -> None:
    problem, position = np.array([0, 2, 2, 0, 2, 0]), np.array([0, 1, 2, 0, 0, 1])
    tokens: Tokens = {"problem": problem, "position": position, "exact": np.array([0.0, 1.0, 2.0, 3.0, 0.0, 1.0])}
    found, counts = sums(tokens, "exact", 4)
    assert (found.tolist(), counts.tolist()) == ([4, 0, 3, 0], [3, 0, 3, 0])
    found, counts = sums(tokens, "exact", 4, 1, 2)
    assert (found.tolist(), counts.tolist()) == ([1, 0, 1, 0], [1, 0, 1, 0])


def test_equivalent_lag() -> None:
    by_lag = [0.0, 1.0, 3.0, 2.0, 8.0]
    assert equivalent_lag(0.5, by_lag) == pytest.approx(0.5)
    assert equivalent_lag(2.0, by_lag) == pytest.approx(1.5)
    assert equivalent_lag(5.0, by_lag) == pytest.approx(3.5)
    assert equivalent_lag(9.0, by_lag) is None
    assert equivalent_lag(0.0, by_lag) == 0.0
    assert equivalent_lag(0.0, [0.0, 0.0]) == 0.0

"""On-policyness metrics against NumPy in float64, however the tokens are packed."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.trainer.on_policy import COLUMNS, OnPolicyStats, effective_sample_size


def slow_ess(log_ratios: np.ndarray) -> float:
    total = squares = 0.0
    for log_ratio in log_ratios:
        total += math.exp(log_ratio)
        squares += math.exp(log_ratio) ** 2
    return total**2 / (len(log_ratios) * squares)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=50), st.sampled_from([0.0, 1000.0]))
def test_ess_equals_its_formula_and_is_in_range(log_ratios: list[float], shift: float) -> None:
    """A factor of all weights, also one that is no number, changes nothing."""
    ess = effective_sample_size(torch.tensor(log_ratios, dtype=torch.float64) + shift)
    assert ess == pytest.approx(slow_ess(np.array(log_ratios)), rel=1e-9)
    assert 1 / len(log_ratios) * (1 - 1e-9) <= ess <= 1 + 1e-12


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    lowest_lag=st.integers(0, 1),
    cuts=st.lists(st.integers(0, 120), max_size=6),
)
@settings(max_examples=100)
def test_metrics_equal_numpy_for_any_packing(lengths: list[int], seed: int, lowest_lag: int, cuts: list[int]) -> None:
    """A copy that comes from another process has the same."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logs = rng.normal(0, 0.5, count).astype(np.float32)
    entropies = rng.exponential(1.0, count).astype(np.float32)
    masked, truncated, lags = rng.random(count) < 0.3, rng.random(count) < 0.2, rng.integers(lowest_lag, 6, count)
    products = [part.sum() for part in np.split(logs, np.cumsum(lengths)[:-1])]
    columns = (logs, masked, truncated, entropies, lags, np.repeat(lengths, lengths), np.repeat(products, lengths))
    stats, other = OnPolicyStats(), OnPolicyStats()
    for part in np.split(rng.permutation(count), sorted(cuts)):
        stats.add(*(torch.tensor(column[part]) for column in columns))
    other.add(*stats.tokens())
    exact = logs.astype(np.float64)
    expected = {
        "ess": slow_ess(exact),
        "kl_behaviour_policy": np.mean([-log for log in exact]),
        "kl_behaviour_policy_k3": np.mean([math.exp(log) - 1 - log for log in exact]),
        "lag_mean": lags.mean(),
        "lag_max": lags.max(),
        "lag_p50": np.percentile(lags, 50, method="inverted_cdf"),
        "lag_p99": np.percentile(lags, 99, method="inverted_cdf"),
        "masked_fraction": masked.mean(),
        "truncated_fraction": truncated.mean(),
        "entropy_mean": entropies.astype(np.float64).mean(),
        "weight_mean": np.exp(exact).mean(),
        "weight_max": np.exp(exact).max(),
        "log_product_sd": np.std(np.array(products, dtype=np.float64)),
    }
    for found in (stats.result(), other.result()):
        assert found is not None
        gap = found.pop("on_policy_gap")
        assert gap == pytest.approx(np.abs(exact[lags == 0]).max()) if 0 in lags else gap is None
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_no_tokens_have_no_metrics() -> None:
    stats = OnPolicyStats()
    assert stats.result() is None
    stats.add(*[torch.zeros(0)] * COLUMNS)
    assert stats.result() is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_log_ratios_that_are_not_finite_are_reported_without_their_graph(broken: float) -> None:
    stats = OnPolicyStats()
    stats.add(torch.tensor([0.0, broken], requires_grad=True) * 1, *[torch.ones(2)] * (COLUMNS - 1))
    copy.deepcopy(stats)  # PyTorch copies no tensor that is part of a graph
    with pytest.raises(ValueError, match="1 of 2 tokens"):
        stats.result()

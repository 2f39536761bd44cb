"""On-policyness metrics against NumPy in float64, and independent of packing."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.trainer.on_policy import OnPolicyMetrics, OnPolicyStats, effective_sample_size


def slow_ess(log_ratios: np.ndarray) -> float:
    total = squares = 0.0
    for log_ratio in log_ratios:
        total += math.exp(log_ratio)
        squares += math.exp(log_ratio) ** 2
    return total**2 / (len(log_ratios) * squares)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=50))
def test_ess_equals_its_formula_and_is_in_range(log_ratios: list[float]) -> None:
    ess = effective_sample_size(torch.tensor(log_ratios, dtype=torch.float64))
    assert ess == pytest.approx(slow_ess(np.array(log_ratios)), rel=1e-9)
    assert 1 / len(log_ratios) * (1 - 1e-9) <= ess <= 1 + 1e-12


def test_ess_at_known_points() -> None:
    assert effective_sample_size(torch.zeros(7)) == 1.0
    assert effective_sample_size(torch.full((7,), -3.0)) == pytest.approx(1.0)
    # Two equal weights that dwarf two others: half of the samples count.
    assert effective_sample_size(torch.tensor([40.0, 40.0, -40.0, -40.0])) == pytest.approx(0.5)
    assert effective_sample_size(torch.tensor([1000.0, 0.0])) == pytest.approx(0.5)


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_tokens(count: int, seed: int, highest_lag: int = 5) -> Tokens:
    rng = np.random.default_rng(seed)
    return (
        torch.tensor(rng.normal(0, 0.5, count), dtype=torch.float32),
        torch.tensor(rng.random(count) < 0.3),
        torch.tensor(rng.random(count) < 0.2),
        torch.tensor(rng.exponential(1.0, count), dtype=torch.float32),
        torch.tensor(rng.integers(0, highest_lag + 1, count)),
    )


def metrics_of(tokens: Tokens, chunks: list[np.ndarray]) -> OnPolicyMetrics:
    """Every token is a rollout."""
    stats = OnPolicyStats()
    for chunk in chunks:
        ones_N = torch.ones(len(chunk), dtype=torch.long)
        stats.add(*(tensor[chunk] for tensor in tokens), ones_N, tokens[0][chunk])
    metrics = stats.result()
    assert metrics is not None
    return metrics


def test_metrics_equal_numpy() -> None:
    tokens = make_tokens(257, seed=0)
    metrics = metrics_of(tokens, [np.arange(257)])
    logs = tokens[0].numpy().astype(np.float64)
    lags = tokens[4].numpy()
    weights = np.exp(logs)
    expected = OnPolicyMetrics(
        ess=slow_ess(logs),
        kl_behaviour_policy=np.mean([-log for log in logs]),
        kl_behaviour_policy_k3=np.mean([math.exp(log) - 1 - log for log in logs]),
        lag_mean=lags.mean(),
        lag_max=lags.max(),
        lag_p50=np.percentile(lags, 50, method="inverted_cdf"),
        lag_p99=np.percentile(lags, 99, method="inverted_cdf"),
        masked_fraction=tokens[1].numpy().mean(),
        truncated_fraction=tokens[2].numpy().mean(),
        entropy_mean=tokens[3].numpy().astype(np.float64).mean(),
        weight_mean=weights.mean(),
        weight_max=weights.max(),
        on_policy_gap=np.abs(logs[lags == 0]).max(),
        log_product_sd=logs.std(),
    )
    assert dataclasses.asdict(metrics) == pytest.approx(dataclasses.asdict(expected), rel=1e-10)


@given(st.integers(1, 60), st.integers(0, 1000), st.data())
@settings(max_examples=50)
def test_metrics_do_not_depend_on_packing(count: int, seed: int, data: st.DataObject) -> None:
    tokens = make_tokens(count, seed)
    order = np.array(data.draw(st.permutations(range(count))))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    once = dataclasses.asdict(metrics_of(tokens, [np.arange(count)]))
    packed = dataclasses.asdict(metrics_of(tokens, np.split(order, cuts)))
    exact = ["lag_max", "lag_p50", "lag_p99", "weight_max", "on_policy_gap", "masked_fraction", "truncated_fraction"]
    assert [packed[name] for name in exact] == [once[name] for name in exact]
    sums = [name for name in once if name not in exact]
    assert [packed[name] for name in sums] == pytest.approx([once[name] for name in sums], rel=1e-12, abs=1e-14)


def test_on_policy_gap_looks_at_tokens_of_lag_0_alone() -> None:
    logs, zeros = torch.tensor([0.5, -0.001, 0.0005]), torch.zeros(3)
    some = metrics_of((logs, zeros > 0, zeros > 0, zeros, torch.tensor([3, 0, 0])), [np.arange(3)])
    assert some.on_policy_gap == pytest.approx(0.001)
    none = metrics_of((logs, zeros > 0, zeros > 0, zeros, torch.tensor([3, 1, 2])), [np.arange(3)])
    assert none.on_policy_gap is None


def test_the_sd_of_log_products_counts_every_rollout_once() -> None:
    """Rollouts of different lengths, over two micro-batches; a packed copy from another process has the same result."""
    rng = np.random.default_rng(0)
    rollouts = [torch.tensor(rng.normal(0, 0.1, length), dtype=torch.float32) for length in (1, 40, 7, 300)]
    stats = OnPolicyStats()
    for part in (rollouts[:2], rollouts[2:]):
        logs_N = torch.cat(part)
        zeros_N = torch.zeros(len(logs_N))
        lengths_N = torch.cat([torch.full((len(logs),), len(logs)) for logs in part])
        products_N = torch.cat([logs.sum().expand(len(logs)) for logs in part])
        stats.add(logs_N, zeros_N > 0, zeros_N > 0, zeros_N, zeros_N.long(), lengths_N, products_N)
    expected = np.std([float(logs.sum()) for logs in rollouts])
    other = OnPolicyStats()
    other.add(*stats.tokens())
    for result in (stats.result(), other.result()):
        assert result is not None
        assert result.log_product_sd == pytest.approx(expected, rel=1e-5)


def plain(log_ratios_N: torch.Tensor) -> list[torch.Tensor]:
    """The arguments of `OnPolicyStats.add` for rollouts of one token without lag."""
    zeros_N = torch.zeros(len(log_ratios_N))
    return [log_ratios_N, zeros_N > 0, zeros_N > 0, log_ratios_N, zeros_N.long(), zeros_N.long() + 1, log_ratios_N]


def test_no_tokens_have_no_metrics() -> None:
    stats = OnPolicyStats()
    assert stats.result() is None
    stats.add(*plain(torch.zeros(0)))
    assert stats.result() is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_log_ratios_that_are_not_finite_are_reported(broken: float) -> None:
    stats = OnPolicyStats()
    stats.add(*plain(torch.tensor([0.0, broken])))
    with pytest.raises(ValueError, match="1 of 2 tokens"):
        stats.result()


def test_statistics_hold_no_graph() -> None:
    stats = OnPolicyStats()
    stats.add(*plain(torch.zeros(2, requires_grad=True) * 2))
    copy.deepcopy(stats)  # PyTorch copies no tensor that is part of a graph

"""Parts of a step: the learning rate, micro-batches, and on-policyness metrics against NumPy, however tokens are packed."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.models.packed import PackedRow
from pipelinerl.trainer.micro_batch import pack, pack_shared
from pipelinerl.trainer.on_policy import COLUMNS, OnPolicyStats, effective_sample_size
from pipelinerl.trainer.optimizer import FLOOR, learning_rate
from pipelinerl.types import Segment


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


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.lists(IDS, min_size=1, max_size=2), max_size=14), st.integers(1, 60), st.sampled_from([0.0, 0.3, 1.0]))
def test_bins_of_shared_prefixes_keep_within_the_budget_as_they_are_laid_out(
    drawn: list[list[list[int]]], budget: int, least: float
) -> None:
    samples = [[Segment(token_ids=tuple(ids), sampled=((len(ids) // 2 + 1, len(ids)),)) for ids in one] for one in drawn]
    bins = pack_shared(samples, budget, least)
    assert sorted(index for indices in bins for index in indices) == list(range(len(samples)))
    assert bins == sorted(map(sorted, bins))
    for indices in bins:
        row = PackedRow.of([segment for index in indices for segment in samples[index]], least_shared=least)
        assert row.length <= budget or len(indices) == 1
    if least == 1.0:
        assert bins == pack([sum(len(segment.token_ids) for segment in one) for one in samples], budget)


def test_attempts_of_a_group_share_a_bin() -> None:
    prompts = [tuple(range(start, start + 50)) for start in (0, 100, 200)]
    samples = [[Segment(token_ids=(*prompt, n, n, n), sampled=((50, 53),))] for n in (1, 2, 3) for prompt in prompts]
    assert pack_shared(samples, 70, 0.2) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert pack_shared(samples, 130, 0.2) == [[0, 1, 3, 4, 6, 7], [2, 5, 8]]
    assert pack_shared(samples, 58, 0.2) == [[0, 3], [1, 4], [2, 5], [6], [7], [8]], "part of a group at a time"


@pytest.mark.parametrize(("lengths", "budget"), [([1, 0], 5), ([-1], 5), ([1], 0)])
def test_impossible_lengths_and_budgets_are_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="can't pack"):
        pack(lengths, budget)


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

"""Sampling on a device: the host's random numbers to the bit, the draws of exact arithmetic, the same parameters."""

from __future__ import annotations

import numpy as np
import torch

from pipelinerl.engine.device_sampler import device_uniforms, draw, draw_with
from pipelinerl.engine.sampler import SamplingRows, sample, uniforms


def test_random_numbers_are_those_of_the_host_to_the_bit() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**64, 100_000, dtype=np.uint64)
    keys[:3] = 0, 2**63, 2**64 - 1
    positions = generator.integers(0, 40_000, 100_000)
    found = device_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), uniforms(keys, positions))


def test_draws_are_those_of_float64_for_small_and_large_vocabularies() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, vocabulary in ((300, 97), (64, 9001)):
        logits = torch.randn(rows, vocabulary, generator=generator) * 3
        numbers = torch.rand(rows, generator=generator, dtype=torch.double)
        cumulative = logits.double().softmax(-1).cumsum(-1)
        ids, logprobs = draw(logits, numbers)
        assert torch.equal(ids, torch.searchsorted(cumulative, numbers[:, None], right=True)[:, 0])
        expected = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert (logprobs - expected).abs().max() < 3e-6


def test_a_row_without_a_distribution_has_no_log_probability() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 1], logits[1, 2], logits[2] = float("nan"), float("inf"), float("-inf")
    ids, logprobs = draw(logits, torch.full((4,), 0.5, dtype=torch.double))
    assert logprobs.isfinite().tolist() == [False, False, False, True]
    assert ids.max() < 5


def test_parameters_give_the_tokens_that_the_host_would_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    n, vocabulary = 400, 50
    logits = torch.randn(n, vocabulary, generator=generator) * 2
    rows = SamplingRows(
        temperature_n=torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(n // 4),
        top_p_n=torch.tensor([1.0, 0.3, 0.9]).repeat_interleave(4).repeat(n // 12 + 1)[:n],
        top_k_n=torch.tensor([0, 3, 0, 0, 7]).repeat(n // 5),
    )
    numbers = torch.rand(n, generator=generator, dtype=torch.double)
    ids, logprobs = draw_with(logits, rows, numbers)
    expected_ids, expected = sample(logits, rows, numbers)
    assert torch.equal(ids, expected_ids)
    assert (logprobs - expected).abs().max() < 1e-5

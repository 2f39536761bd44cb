"""Sampling: exact truncated distributions, the right frequencies, one random stream a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.engine.sampler import SamplingRows, invert, request_key, sample, truncate, uniforms


def rows(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingRows | None:
    if (temperature, top_p, top_k) == (1.0, 1.0, 0):
        return None
    return SamplingRows(
        temperature_n=torch.full((n,), temperature),
        top_p_n=torch.full((n,), top_p),
        top_k_n=torch.full((n,), top_k, dtype=torch.long),
    )


def slow_truncated(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Probabilities by the book: temperature, then the k likeliest, then the fewest of those that reach top_p."""
    weights = np.exp(np.array(logits, dtype=np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: top_k or len(order)]
    shares = weights[kept] / weights[kept].sum()
    count, mass = 0, 0.0
    while mass < top_p and count < len(kept):
        mass += shares[count]
        count += 1
    result = np.zeros(len(logits))
    result[kept[:count]] = weights[kept[:count]] / weights[kept[:count]].sum()
    return [float(p) for p in result]


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-4, 4), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.2, 0.63, 0.9, 1.0]),
    top_k=st.integers(0, 5),
)
def test_truncation_is_exact(logits: list[float], temperature: float, top_p: float, top_k: int) -> None:
    expected = slow_truncated(logits, temperature, top_p, top_k)
    logprobs = (torch.tensor([logits], dtype=torch.float64) / temperature).log_softmax(-1)
    top_p_n = torch.tensor([top_p], dtype=torch.float64)
    found = truncate(logprobs, top_p_n, torch.tensor([top_k])).exp()[0].tolist()
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("top_p", "top_k", "temperature"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (0.9, 4, 0.6)])
def test_frequencies_and_log_probabilities_are_those_of_the_distribution(
    top_p: float, top_k: int, temperature: float, waits: bool
) -> None:
    logits = [0.3, 1.9, -1.0, 0.0, 1.0, float("-inf")]
    n = 40_000
    expected = slow_truncated(logits, temperature, top_p, top_k)
    u = torch.from_numpy(np.random.default_rng(0).random(n))
    ids, logprobs = sample(torch.tensor([logits]).expand(n, -1), rows(n, temperature, top_p, top_k), u, waits=waits)
    counts = torch.bincount(ids, minlength=6) / n
    for token, probability in enumerate(expected):
        assert float(counts[token]) == pytest.approx(
            probability, abs=4 * (probability * (1 - probability) / n) ** 0.5 + 1e-9
        )
        if probability:
            assert logprobs[ids == token].exp().mean().item() == pytest.approx(probability, rel=1e-4)


def interval_starts(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The smallest uniform number that each of `ids` [m] or a later token is drawn at, found by bisection; 1 if none is."""
    weights_1V = logits.softmax(-1)[None]
    low, high = torch.zeros(len(ids), dtype=torch.float64), torch.ones(len(ids), dtype=torch.float64)
    for _ in range(53):
        middle = (low + high) / 2
        reached = invert(weights_1V, middle[None])[0][0] >= ids
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


@pytest.mark.parametrize("vocabulary", [50, 151_936 + 77])
def test_tokens_are_drawn_with_their_probabilities_however_large_the_vocabulary(vocabulary: int) -> None:
    """Total variation between the intervals of the uniform number and float64 probabilities, behind a likely token."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 2.5
    logits[7] = 16.5
    exact = logits.double().softmax(-1)
    count = min(vocabulary, 1000)
    distance = 0.0
    # The first part has the likely token. If there are others, three stand for all of them.
    for first in range(0, vocabulary, max(count, vocabulary // 4)):
        ids = torch.arange(first, min(first + count, vocabulary) + 1)
        starts = interval_starts(logits, ids)
        part = float((starts.diff() - exact[ids[:-1]]).abs().sum()) / 2
        distance += part if first == 0 else part * (vocabulary - count) / (3 * count)
    assert distance < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.3])
def test_log_probabilities_of_a_large_vocabulary_are_exact(temperature: float) -> None:
    logits = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(1)) * 2.5
    ids, logprobs = sample(logits, rows(3, temperature), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert float((logprobs.double() - exact).abs().max()) < 2e-6


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("vocabulary", [4, 140_000])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7, 1e-45, 1e38])
@pytest.mark.parametrize(
    ("first", "others", "drawable"),
    [
        ([NAN], 0.0, False),
        ([INF], 0.0, False),
        ([], -INF, False),
        ([], INF, False),
        ([], NAN, False),
        ([3e38], -INF, True),
        ([3e38, -3e38], -3e38, True),
        ([0.0], -INF, True),
        ([-INF], 0.0, True),
    ],
)
def test_an_id_is_always_in_the_vocabulary(
    vocabulary: int, temperature: float, first: list[float], others: float, drawable: bool
) -> None:
    logits = torch.full((4, vocabulary), others)
    logits[:, : len(first)] = torch.tensor(first)
    u = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-52], dtype=torch.float64)
    for flipped in (logits, logits.flip(-1)):
        ids, logprobs = sample(flipped, rows(4, temperature), u)
        assert ((ids >= 0) & (ids < vocabulary)).all()
        assert bool(logprobs.isfinite().all()) == drawable
        if drawable:
            assert flipped.gather(1, ids[:, None]).isfinite().all()


def splitmix64(z: int) -> int:
    """Its output function, in Python's integers."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> bits) * factor % 2**64
    return z ^ z >> 31


def test_random_numbers_are_those_of_their_definition_to_the_bit() -> None:
    generator = np.random.default_rng(0)
    keys = [0, -1, 2**63 - 1, -(2**63), *generator.integers(-(2**63), 2**63, 1000).tolist()]
    positions = generator.integers(0, 40_000, len(keys)).tolist()
    expected = []
    for key, position in zip(keys, positions, strict=True):
        first = splitmix64((key + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64)
        expected.append((splitmix64(first ^ key * 0xBF58476D1CE4E5B9 % 2**64) >> 11) * 2.0**-53)
    assert uniforms(torch.tensor(keys), torch.tensor(positions)).tolist() == expected
    assert uniforms(np.array(keys), np.array(positions)).tolist() == expected


def test_seed_and_id_name_a_stream_of_their_own() -> None:
    assert request_key("a", 3) == request_key("b", 3)
    keys = [request_key("3", None), request_key("a", 3), *(request_key(f"r{i}", None) for i in range(400))]
    table = uniforms(torch.tensor(keys), torch.arange(100)[:, None]).numpy()
    assert len(np.unique(table)) == table.size
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02

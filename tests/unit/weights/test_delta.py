"""A delta restores every bit, is as long as its format says, and a damaged one does no harm beyond its buffer."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights import delta
from pipelinerl.weights.delta import apply, encode

SLICE = 1 << 16


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_SLICE", SLICE)


def noise(count: int, seed: int = 0) -> Tensor:
    """`count` words of random bits, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2 * count,), dtype=torch.uint8, generator=generator)


def changed(base_U8: Tensor, places: Iterable[int]) -> Tensor:
    """A copy of the buffer with other words at `places`."""
    where = torch.tensor(list(places), dtype=torch.int64)
    new = base_U8.clone()
    new.view(torch.int16)[where] ^= torch.randint(1, 1 << 15, where.shape, dtype=torch.int16)
    return new


def encoded(new_U8: Tensor, base_U8: Tensor) -> Tensor:
    """The delta, which restores every bit."""
    delta_U8 = encode(new_U8, base_U8)
    assert delta_U8 is not None
    buffer_U8 = base_U8.clone()
    apply(delta_U8, buffer_U8)
    assert torch.equal(buffer_U8, new_U8)
    return delta_U8


@pytest.mark.parametrize("size", [0, 1, 300, SLICE - 1, SLICE, 3 * SLICE + 7])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.1, 1.0])
def test_every_word_comes_back(size: int, share: float) -> None:
    base_U8 = noise(size)
    new_U8 = changed(base_U8, random.Random(size).sample(range(size), round(share * size)))
    assert encoded(new_U8, base_U8).numel() <= 1.072 * share * 2 * size + 6 * share * size + 17 * (size // SLICE + 1)


@pytest.mark.parametrize("change", [-9000, -1, 1, 2, 100])
def test_a_delta_of_another_length_is_refused(change: int) -> None:
    base_U8 = noise(SLICE + 100)
    delta_U8 = encoded(changed(base_U8, [1, 2, SLICE + 99, *range(5000, 8000)]), base_U8)
    padded_U8 = torch.cat([delta_U8, torch.zeros(100, dtype=torch.uint8)])
    with pytest.raises(WeightUpdateError, match="malformed"):
        apply(padded_U8[: delta_U8.numel() + change], base_U8.clone())


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_stays_within_the_buffer(data: st.DataObject) -> None:
    base_U8 = noise(300)
    delta_U8 = encoded(changed(base_U8, range(0, 300, 7)), base_U8)
    delta_U8[data.draw(st.integers(0, delta_U8.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    around_U8 = torch.cat([base_U8, torch.zeros(4096, dtype=torch.uint8)])
    with suppress(WeightUpdateError):
        apply(delta_U8, around_U8[: base_U8.numel()])
    assert not around_U8[base_U8.numel() :].any()

"""A delta restores every bit, is what its format says, and a damaged one does no harm beyond the buffer it is applied to."""

from __future__ import annotations

import random
import struct
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

BLOCK = 65536
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8]


def words(values: Iterable[int]) -> Tensor:
    """Bytes of 16-bit words."""
    data = b"".join(struct.pack("<H", value) for value in values)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def changed(base_U8: Tensor, places: Iterable[int], seed: int = 0) -> Tensor:
    """A copy of the buffer with other words at `places`."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.tensor(list(places), dtype=torch.int64)
    new = base_U8.clone()
    new.view(torch.int16)[where] ^= torch.randint(1, 1 << 15, where.shape, generator=generator, dtype=torch.int16)
    return new


def noise(count: int, seed: int = 0) -> Tensor:
    """`count` words of random bits, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2 * count,), dtype=torch.uint8, generator=generator)


def restored(delta_U8: Tensor | None, base_U8: Tensor) -> Tensor:
    assert delta_U8 is not None
    buffer_U8 = base_U8.clone()
    apply(delta_U8, buffer_U8)
    return buffer_U8


# A few words, both sides of the border between sparse and dense blocks, and all words; whole blocks and parts of one.
@pytest.mark.parametrize("size", [1, 300, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.0624, 0.0626, 1.0])
def test_every_word_comes_back(size: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_SLICE", 2 * BLOCK)
    base_U8 = noise(size)
    new_U8 = changed(base_U8, random.Random(size).sample(range(size), round(share * size)))
    encoded = encode(new_U8, base_U8)
    assert encoded is not None
    assert torch.equal(restored(encoded, base_U8), new_U8)


def test_blocks_of_all_kinds_in_one_slice_and_what_they_cost() -> None:
    base_U8 = noise(6 * BLOCK)
    sparse, dense = [5, BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 65], range(BLOCK, 2 * BLOCK, 3)
    new_U8 = changed(base_U8, [*sparse, *dense, *range(4 * BLOCK, 5 * BLOCK)])
    encoded = encode(new_U8, base_U8)
    assert encoded is not None
    words = len(sparse) + len(dense) + BLOCK
    header, bitmaps = 24 + 4 * 6, 2 * BLOCK // 8
    assert encoded.numel() == -(-(header + bitmaps + 2 * len(sparse) + 2 * words) // 8) * 8
    assert torch.equal(restored(encoded, base_U8), new_U8)


@settings(deadline=None)
@given(
    base=st.lists(st.integers(0, 65535), min_size=1, max_size=40),
    changes=st.dictionaries(st.integers(0, 39), st.integers(0, 65535)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_bits_of_any_type_come_back(base: list[int], changes: dict[int, int], dtype: torch.dtype) -> None:
    base *= 4  # A multiple of every type's size.
    new = [changes.get(index, word) for index, word in enumerate(base)]
    old_tensor, new_tensor = words(base).view(dtype), words(new).view(dtype)
    encoded = encode(new_tensor.view(torch.uint8), old_tensor.view(torch.uint8))
    buffer = old_tensor.clone()
    apply(encoded, buffer.view(torch.uint8))  # type: ignore[arg-type]
    assert buffer.view(torch.uint8).tolist() == words(new).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_signs_of_zero_and_nan_payloads_are_changes(dtype: torch.dtype) -> None:
    base = torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=dtype)
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.0], dtype=dtype)
    new.view(torch.uint8)[new.element_size()] ^= 1  # the lowest bit of the NaN
    encoded = encode(new.view(torch.uint8), base.view(torch.uint8))
    assert encoded is not None
    assert restored(encoded, base.view(torch.uint8)).tolist() == new.view(torch.uint8).tolist()
    assert encoded.numel() == 24 + 4 + 2 * (2 + 2) + 4, "two words, padded to 8 bytes"


def test_nothing_has_changed() -> None:
    base_U8 = noise(3 * BLOCK)
    encoded = encode(base_U8.clone(), base_U8)
    assert encoded is not None
    assert encoded.numel() == 0
    assert torch.equal(restored(encoded, base_U8), base_U8)
    assert encode(base_U8[:0], base_U8[:0]) is not None


def test_a_delta_that_is_not_shorter_than_asked_is_not_made() -> None:
    base_U8 = noise(2 * BLOCK)
    new_U8 = changed(base_U8, range(1000))
    encoded = encode(new_U8, base_U8)
    assert encoded is not None
    assert encode(new_U8, base_U8, below=encoded.numel()) is None
    again = encode(new_U8, base_U8, below=encoded.numel() + 1)
    assert again is not None
    assert torch.equal(again, encoded)
    assert encode(noise(2 * BLOCK, seed=1), base_U8, below=base_U8.numel()) is None
    assert encode(base_U8, base_U8, below=0) is None


def example() -> tuple[Tensor, Tensor]:
    """A base of two blocks and a bit, and a delta with a sparse and a dense block."""
    base_U8 = noise(2 * BLOCK + 100)
    encoded = encode(changed(base_U8, [1, 2, 2 * BLOCK + 99, *range(BLOCK, BLOCK + 20000)]), base_U8)
    assert encoded is not None
    return encoded, base_U8


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, -2, "a start"),
        (0, 1, "a start"),
        (0, 200, "a start"),
        (1, 1 << 40, "a start"),
        (1, 0, "a size"),
        (1, -4, "a size"),
        (1, 9, "a size"),
        (2, 24, "a length"),
        (2, 1 << 40, "a length"),
        (2, 8 + 24 + 12 + 8192 + 2 * 3 + 2 * 20003, "a length"),
    ],
)
def test_a_header_from_outside_is_checked(at: int, value: int, complaint: str) -> None:
    encoded, base_U8 = example()
    encoded[8 * at : 8 * at + 8].view(torch.int64)[0] = value
    with pytest.raises(WeightUpdateError, match=complaint):
        apply(encoded, base_U8.clone())


def test_contents_from_outside_are_checked() -> None:
    encoded, base_U8 = example()
    bitmap, places = 24 + 12, 24 + 12 + 8192
    for begin, kind, value, complaint in [
        (24, torch.int32, -1, "a count"),
        (24, torch.int32, BLOCK + 1, "a count"),
        (28, torch.int32, 20001, "a length"),
        (bitmap, torch.uint8, 0, "a bitmap"),
        (places + 4, torch.int16, 100, "a place"),
    ]:
        damaged = encoded.clone()
        damaged[begin : begin + kind.itemsize].view(kind)[0] = value
        with pytest.raises(WeightUpdateError, match=complaint):
            apply(damaged, base_U8.clone())
    for length in (8, 23, 40, encoded.numel() - 8):
        with pytest.raises(WeightUpdateError, match="impossible"):
            apply(encoded[:length], base_U8.clone())


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_stays_within_the_buffer(data: st.DataObject) -> None:
    base_U8 = noise(300)
    encoded = encode(changed(base_U8, range(0, 300, 7)), base_U8)
    assert encoded is not None
    encoded[data.draw(st.integers(0, encoded.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    around_U8 = torch.cat([base_U8, torch.zeros(4096, dtype=torch.uint8)])
    with suppress(WeightUpdateError):
        apply(encoded, around_U8[: base_U8.numel()])
    assert not around_U8[base_U8.numel() :].any()

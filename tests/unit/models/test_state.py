"""Sums of words change with every mistake in a copy; files are those of safetensors; transfers off a GPU are copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelinerl.models import device
from pipelinerl.models.device import pin, to_device, to_host
from pipelinerl.models.state import TYPES, checksum, device_checksum, device_digests_of, not_finite, write_safetensors

BLOCK_BYTES = 4 << 16
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def odd_constants(seed: int, count: int) -> list[int]:
    """The first numbers of SplitMix64, made odd."""
    found = []
    for _ in range(count):
        seed = mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        found.append((mixed ^ mixed >> 31) | 1)
    return found


CONSTANTS = odd_constants(0, 2 << 16)


def reference(data: bytes) -> str:
    """The definition, in Python's integers."""
    sums = b""
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        block += bytes(-len(block) % 4)
        words = [int.from_bytes(block[i : i + 4], "little", signed=True) for i in range(0, len(block), 4)]
        for table in (CONSTANTS[: 1 << 16], CONSTANTS[1 << 16 :]):
            total = sum(constant * word for constant, word in zip(table, words, strict=False))
            sums += (total % 2**64).to_bytes(8, "little")
    return xxhash.xxh3_128_hexdigest(sums)


def raw(tensor: Tensor) -> Tensor:
    """The tensor's own bytes."""
    return tensor.view(-1).view(torch.uint8)


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@st.composite
def tensors(draw: st.DrawFn, least: int = 1) -> Tensor:
    """A tensor of any type, shape and bytes."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(least, 5), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    one_byte = st.integers(0, 1) if dtype == torch.bool else st.integers(0, 255)
    data = draw(st.lists(one_byte, min_size=count, max_size=count))
    return torch.tensor(data, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("more", [-1, 0, 1, 6])
def test_the_digest_is_its_definition_whatever_is_multiplied_at_once(blocks: int, more: int) -> None:
    data_U8 = random_bytes(max(0, blocks * BLOCK_BYTES + more))
    expected = {"x": reference(data_U8.numpy().tobytes())}
    assert [device_digests_of({"x": data_U8}, chunk) for chunk in (1, 2, 64)] == [expected] * 3


@given(tensors(least=0), st.integers(0, 7))
def test_the_digest_is_of_bytes_whatever_the_type_the_layout_and_the_place_in_memory(tensor: Tensor, offset: int) -> None:
    expected = reference(raw(tensor.reshape(-1)).numpy().tobytes())
    strided = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim else tensor
    inside = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)[offset:].view(tensor.shape).copy_(tensor)
    assert set(device_digests_of({"a": tensor, "b": strided, "c": inside}).values()) == {expected}


@given(tensors(), st.data())
def test_every_flipped_bit_is_found(tensor: Tensor, data: st.DataObject) -> None:
    before = device_checksum({"x": tensor})
    place = data.draw(st.integers(0, tensor.nbytes - 1))
    raw(tensor)[place] ^= 1 if tensor.dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert device_checksum({"x": tensor}) != before


@pytest.mark.parametrize("digest", [checksum, device_checksum])
def test_checksums_are_of_names_types_shapes_and_bytes_in_any_order_and_memory_layout(
    digest: Callable[[dict[str, Tensor]], str],
) -> None:
    one = torch.arange(6.0).view(2, 3)
    both = {"a": one, "b": one + 1, "tied": one, "none": torch.zeros(0)}
    copied = {name: tensor.clone() for name, tensor in both.items()}
    same = [both, copied, dict(reversed(both.items())), both | {"a": one.t().contiguous().t()}]
    assert len({digest(tensors) for tensors in same}) == 1
    others = [
        {"a": both["b"], "b": one, "tied": one, "none": both["none"]},
        {"c" if name == "b" else name: tensor for name, tensor in both.items()},
        {name: tensor for name, tensor in both.items() if name != "none"},
        both | {"a": one.view(3, 2)},
        both | {"a": one.view(torch.int32)},
        both | {"a": one.bfloat16()},
        both | {"a": one + 1e-6},
    ]
    assert len({digest(tensors) for tensors in [both, *others]}) == 8


def test_values_that_are_not_finite_are_found_and_large_ones_are_not() -> None:
    tensors = {str(dtype): torch.full((9,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES[:4]}
    tensors |= {"integers": torch.arange(3), "empty": torch.empty(0)}
    assert not_finite(tensors) == []
    for value, dtype in product((float("nan"), float("inf"), float("-inf")), DTYPES[:4]):
        broken = torch.ones(7, dtype=dtype)
        broken[2] = value
        assert not_finite({**tensors, "broken": broken, "tied": broken}) == ["broken"]
    assert not_finite({"both": torch.tensor([float("inf"), float("-inf")])}) == ["both"]


# ---- files


def of_all_types() -> dict[str, Tensor]:
    found = {}
    for i, dtype in enumerate(TYPES):
        name = str(dtype).removeprefix("torch.")
        found |= {f"{i % 3}.{name}": torch.arange(5).to(dtype), f"{i % 2}.{name}.one": torch.ones(()).to(dtype)}
    return {"none": torch.empty(0, 4), **found}


def test_the_file_is_the_one_of_safetensors_for_every_type_that_it_has(tmp_path: Path) -> None:
    tensors = of_all_types()
    write_safetensors(tensors, tmp_path / "own", {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "own").keys() == tensors.keys()
    assert (tmp_path / "own").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x is of type torch\.complex128"):
        write_safetensors({"x": torch.ones(1, dtype=torch.complex128)}, tmp_path / "file")
    assert not list(tmp_path.iterdir())


CPU = torch.device("cpu")


def test_what_is_sent_is_as_it_was_then() -> None:
    array = np.arange(3)
    there = to_device(array, CPU)
    back = to_host(there)
    array += 1
    there += 5
    assert there.tolist() == [5, 6, 7]
    assert back().tolist() == [0, 1, 2]


def test_tensors_arrive_under_their_names_in_order_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PART", 2)
    tensors = {name: torch.full((3,), i, dtype=torch.uint8) for i, name in enumerate("ca")}
    found = [(name, array.tolist()) for name, array in device.arriving(tensors.items())]
    assert found == [("c", [0, 0]), ("c", [0]), ("a", [1, 1]), ("a", [1])]


@pytest.mark.parametrize("error", [0, 801])
def test_memory_is_pinned_until_it_is_unpinned_and_a_refusal_is_logged(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_U8, pinned = torch.zeros(100, dtype=torch.uint8), {}

    def register(address: int, size: int, _: int) -> int:
        if not error:
            pinned[address] = size
        return error

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    unpin = pin(memory_U8[7:20], CPU)
    assert pinned == ({} if error else {memory_U8.data_ptr(): 100})
    assert ["can't be pinned (CUDA error 801)" in message for message in caplog.messages] == [True] * bool(error)
    unpin()
    assert not pinned

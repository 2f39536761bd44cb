"""The weights of a model as named tensors: reading all of them, their checksum, and copying them back exactly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from pipelinerl.errors import WeightUpdateError


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer under each of its names, in the order of the model's modules.

    Tied parameters appear under every name, as the same storage. Nothing is copied; the tensors are detached.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():  # adds buffers: state_dict has the persistent ones only
        if isinstance(value, Tensor):
            weights.setdefault(name, value.detach())
    return weights


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that the model computes in. A sharded model may have parameters of a wider type."""
    found = getattr(model, "compute_dtype", None)
    return found if isinstance(found, torch.dtype) else next(model.parameters()).dtype


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a type of floating-point numbers is narrower than float32."""
    return dtype.itemsize < torch.float32.itemsize


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor: the name itself unless it is a tied alias.

    Raises TypeError for sharded tensors.
    """
    owners: dict[tuple[object, ...], str] = {}
    firsts = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):  # a DTensor: all have the same address
            raise TypeError(f"{name} is sharded: gather it first")
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Empty tensors and meta tensors have no address that identifies them.
        firsts[name] = owners.setdefault(where, name) if tensor.numel() and not tensor.is_meta else name
    return firsts


def checksum(tensors: Mapping[str, Tensor], digests: Mapping[str, str] | None = None) -> str:
    """Checksum over name, type, shape and bytes of every tensor: 128 bits as 32 hex digits. Independent of the order.

    `digests`: of these tensors (`digests_of`), if the caller has computed them.
    """
    digests = digests_of(tensors) if digests is None else digests
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n{digests[name]}\n".encode())
    return whole.hexdigest()


def on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are on one GPU."""
    return all(tensor.is_cuda for tensor in tensors.values()) and len({tensor.device for tensor in tensors.values()}) == 1


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor: 128 bits as 32 hex digits. A tied tensor is read once."""
    firsts = first_names(tensors)
    digests = {name: xxhash.xxh3_128() for name in firsts.values()}
    for name, part in host_parts({name: tensors[name] for name in digests}):
        digests[name].update(part)
    return {name: digests[first].hexdigest() for name, first in firsts.items()}


def host_parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """The bytes of each tensor, in order. From other devices one tensor at a time is copied, from a GPU in several parts."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        from pipelinerl.models.device import arriving  # noqa: PLC0415 - only from a GPU

        return arriving((name, bytes_of(tensor)) for name, tensor in tensors.items())
    return ((name, bytes_of(tensor.cpu()).numpy()) for name, tensor in tensors.items())


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat: NumPy has no bfloat16. All ranks must call it for a sharded tensor, which it gathers."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a value that is not finite. A tied tensor has its first name.

    Each tensor is summed, which takes about as long as reading it: the sum is finite only if every value is. Single values
    are checked only if the sum is not finite, since the sum of large finite values may overflow.
    """
    owners = [name for name, first in first_names(tensors).items() if name == first and tensors[name].is_floating_point()]
    if not owners:
        return []
    sums = torch.stack([tensors[name].detach().sum(dtype=torch.float32) for name in owners]).cpu()
    suspects = [owners[index] for index in (~sums.isfinite()).nonzero()[:, 0].tolist()]
    return [name for name in suspects if not bool(tensors[name].isfinite().all())]


def load_weights(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, known_finite: bool = False) -> None:
    """Copy `tensors` into a model's own storage, `named_weights(model)`: all of them, or none.

    Names and shapes must be exactly as there, and all values finite (not checked if `known_finite`); types and devices are
    converted. Raises WeightUpdateError, listing all problems, before anything is copied.
    """
    misshapen = [
        f"{name} {tuple(tensors[name].shape)}, the model has {tuple(weight.shape)}"
        for name, weight in weights.items()
        if name in tensors and tensors[name].shape != weight.shape
    ]
    problems = summary_of("missing", sorted(weights.keys() - tensors.keys()))
    problems += summary_of("unknown", sorted(tensors.keys() - weights.keys()))
    problems += summary_of("of another shape", misshapen)
    if not problems:
        problems = summary_of("tied in the model but not equal", _untied(weights, tensors))
        problems += summary_of("with values that are not finite", [] if known_finite else not_finite(tensors))
    if problems:
        raise WeightUpdateError("the weights do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, first in first_names(weights).items():
            if name == first:
                weights[name].copy_(tensors[name], non_blocking=weights[name].is_cuda)


def _untied(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Pairs of names that share one tensor in the model but have different contents in `tensors`."""
    sources = first_names(tensors)
    return [
        f"{first} and {name}"
        for name, first in first_names(weights).items()
        if sources[name] != sources[first] and not torch.equal(tensors[name], tensors[first])
    ]


def summary_of(what: str, names: Iterable[str], most: int = 8) -> list[str]:
    """A part of a message: how many names there are, and the first ones. Empty without names."""
    names = list(names)
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return [f"{len(names)} {what} ({shown})"] if names else []


# ---- Writes safetensors files part by part: safetensors itself first copies all tensors to the host


TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which safetensors has them in a file: every tensor is then aligned to its type."""


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    order = list(TYPES)
    return dict(sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))


def write_safetensors(tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str] | None = None) -> None:
    """Write every tensor under its name, tied tensors under each of their names. An existing file is overwritten in place.

    The file is the same as by `safetensors.torch.save_file`. Contiguous CPU tensors are not copied, others as
    `host_parts` says; sharded tensors are gathered one after the other. Raises OSError, and ValueError for a tensor of
    another type.
    """
    if odd := [f"{name} is of type {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in TYPES]:
        raise ValueError(f"a safetensors file can't have all tensors: {odd[0]}")
    tensors = in_file_order(tensors)
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb", opener=lambda name, _: os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, part in host_parts(tensors):
            file.write(part.data)
        file.truncate()


# ---- Digests of tensors that are computed where the tensors are, for weights on a GPU: only 16 bytes for 256 KiB leave it
# The bytes of a tensor are little-endian int32 words w, in blocks of 2^16; the last word is filled with zeros. Each block
# has two sums, each with its own table c of odd 64-bit constants:
#
#     sum over j of  c[j] * w[j]   modulo 2^64
#
# Sums of integers are the same in every order and on every device. Because the constants are odd, one changed word always
# changes both sums. Several changes that are not made on purpose cancel in both with a probability of about 2^-64. The
# digest of a tensor is xxh3 of the sums of its blocks. Zeros at the end may not change it: the caller adds the shape.


_BLOCK = 1 << 16  # words
_WORD_BYTES = 4
GOLDEN, MIX_1, MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants as int64: products and sums of int64 wrap, so their bits are the same as with uint64."""
Bits = TypeVar("Bits", Tensor, npt.NDArray[np.int64])
"""64-bit numbers: of a device, or of NumPy, which is three times faster on a few of them."""


def device_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Like `state.checksum`, of names, types, shapes and bytes, but the bytes stay on the device of the tensors."""
    return checksum(tensors, device_digests_of(tensors))


def device_digests_of(tensors: Mapping[str, Tensor], chunk_blocks: int = 64) -> dict[str, str]:
    """A digest of the bytes of each tensor: 128 bits as 32 hex digits. All are on one device; a tied tensor is read once.

    `chunk_blocks`: blocks that are multiplied at once, which takes 512 KiB for each. Does not change the digests.
    """
    firsts = first_names(tensors)
    owners = list(dict.fromkeys(firsts.values()))
    device = next(iter(tensors.values())).device
    # The tables of both sums [2, _BLOCK]: SplitMix64's first numbers of seed 0, made odd.
    constants_2J = (splitmix64(torch.arange(1, 2 * _BLOCK + 1, device=device) * GOLDEN) | 1).view(2, _BLOCK)
    parts = [torch.empty(0, 2, dtype=torch.int64, device=device)]
    blocks = []
    for name in owners:
        bytes_U8 = bytes_of(tensors[name])
        for piece_U8 in torch.split(bytes_U8, chunk_blocks * _BLOCK * _WORD_BYTES) if len(bytes_U8) else ():
            words_KJ = _words(piece_U8)
            sums_2K = [(words_KJ * constants_J[: words_KJ.shape[1]]).sum(1) for constants_J in constants_2J]
            parts.append(torch.stack(sums_2K, 1))
        blocks.append(-(-len(bytes_U8) // (_BLOCK * _WORD_BYTES)))
    sums = torch.split(torch.cat(parts).cpu(), blocks)  # the only transfer
    digests = {name: xxhash.xxh3_128_hexdigest(sums_K2.numpy().data) for name, sums_K2 in zip(owners, sums, strict=True)}
    return {name: digests[first] for name, first in firsts.items()}


def _words(piece_U8: Tensor) -> Tensor:
    """The bytes as int32 words [blocks, _BLOCK], with zeros after the last one; a single block has as many as are needed."""
    wanted = _WORD_BYTES * (_BLOCK if len(piece_U8) > _BLOCK * _WORD_BYTES else 1)
    if missing := -len(piece_U8) % wanted:
        piece_U8 = torch.nn.functional.pad(piece_U8, (0, missing))
    elif piece_U8.storage_offset() % _WORD_BYTES or piece_U8.data_ptr() % _WORD_BYTES:
        piece_U8 = piece_U8.clone()  # a part of another tensor that does not begin at a word
    words = piece_U8.view(torch.int32)
    return words.view(-1, min(_BLOCK, len(words)))


def splitmix64(z: Bits) -> Bits:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) of unsigned numbers, whose bits int64 holds."""
    for bits, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        z = (z ^ ((z >> bits) & (2 ** (64 - bits) - 1))) * factor  # a shift of an int64 copies its sign
    return z

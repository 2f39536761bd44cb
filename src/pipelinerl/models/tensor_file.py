"""Writes safetensors files part by part: safetensors itself first copies all tensors to the host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from pipelinerl.models.state import host_parts

_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {kind: place for place, kind in enumerate(_TYPES)}
"""Wider types come first, as safetensors has it: every tensor is then aligned to its type."""


def write_safetensors(
    tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> None:
    """Write every tensor under its name, tied tensors under each of their names. An existing file is overwritten in place.

    The file is the one that `safetensors.torch.save_file` writes. Contiguous CPU tensors are not copied, others as
    `host_parts` says. Raises OSError, and ValueError for a type that the format does not have.
    """
    if odd := [f"{name} is of type {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in _TYPES]:
        raise ValueError(f"a safetensors file can't have all tensors: {odd[0]}")
    tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _write(fd, len(encoded).to_bytes(8, "little") + encoded)
        for _, part in host_parts(tensors):
            _write(fd, part.data)
        os.ftruncate(fd, 8 + len(encoded) + end)
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def models_written_by_part() -> Iterator[None]:
    """Inside, `save_pretrained` of a model writes its tensors with `write_safetensors`."""
    from transformers import modeling_utils  # noqa: PLC0415 - takes seconds

    before = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = write_safetensors
    try:
        yield
    finally:
        modeling_utils.safe_save_file = before

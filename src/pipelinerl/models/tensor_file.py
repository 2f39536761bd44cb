"""Writes safetensors files part by part: safetensors itself first copies all tensors to the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from pipelinerl.models.state import host_parts

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

"""Files of weights: safetensors files in memory, that the trainer writes in place, and that engines map or read.

An embedded engine has inherited a file without a name (`files.shared_memory`). Engine servers get the path of a file
(`folder`). The metadata of both has the `Layout`, with which tied tensors are written once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import INVALID_DATA, WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.weights.layout import Layout, decode_layout

_LENGTH_BYTES = 8


def make_buffer(fd: int, layout: Layout) -> dict[str, Tensor]:
    """Write the header and make room for the tensors. Returns them, in the file. Raises OSError."""
    from pipelinerl.models.state import TYPES  # noqa: PLC0415 - engines write none

    header: dict[str, object] = {"__metadata__": {"format": "pt", "layout": msgspec.json.encode(layout).decode()}}
    firsts = layout.first_names()
    for place in layout.places:
        if firsts[place.name] == place.name:
            dtype = TYPES.get(getattr(torch, place.dtype), place.dtype)
            ends = [place.start, place.start + place.size]
            header[place.name] = {"dtype": dtype, "shape": place.shape, "data_offsets": ends}
    encoded = msgspec.json.encode(header)
    start = -(-(_LENGTH_BYTES + len(encoded)) // mmap.PAGESIZE) * mmap.PAGESIZE
    encoded = encoded.ljust(start - _LENGTH_BYTES)
    reserve(fd, start + layout.buffer_bytes)
    os.pwrite(fd, len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, 0)
    return _views(fd, layout, start)


def mapped(fd: int) -> dict[str, Tensor]:
    """The tensors of a file that `make_buffer` has made. Raises WeightUpdateError if its header is invalid."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    try:
        layout = msgspec.json.decode(os.pread(fd, length, _LENGTH_BYTES))["__metadata__"]["layout"]
    except (*INVALID_DATA, KeyError, TypeError) as error:
        raise WeightUpdateError(f"the shared file of weights has no layout: {error}") from error
    return _views(fd, decode_layout(layout), _LENGTH_BYTES + length)


def _views(fd: int, layout: Layout, start: int) -> dict[str, Tensor]:
    """The tensors of the buffer, which begins at `start`. They keep the mapping alive."""
    return layout.views(torch.frombuffer(mmap.mmap(fd, start + layout.buffer_bytes), dtype=torch.uint8)[start:])


def pin_all(tensors: dict[str, Tensor], device: torch.device) -> Callable[[], object]:
    """Have a GPU read and write the buffer of these tensors directly, until the result is called."""
    from pipelinerl.models.device import pin  # noqa: PLC0415 - only on a GPU

    return pin(next(iter(tensors.values())), device)

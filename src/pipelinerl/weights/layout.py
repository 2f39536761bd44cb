"""The layout of an update's tensors in a buffer or a file. Tied names stay tied, and are written once.

A file is a safetensors file in memory, which the trainer writes in place, and which engines map or read. An embedded engine
has inherited a file without a name (`files.shared_memory`). Engine servers get its path. Its metadata has the `Layout`.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import INVALID_DATA, WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.models.state import TYPES, first_names


class TensorPlace(msgspec.Struct, frozen=True):
    """The place of one named tensor; `start` is in bytes from the start of the buffer. Tied names have the same place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


class Layout(msgspec.Struct, frozen=True):
    """The places of all tensors of an update, and the size of a buffer that holds them.

    Tensors of larger types come first, without gaps: each is aligned to its type, as in a safetensors file.
    """

    places: tuple[TensorPlace, ...]
    buffer_bytes: int

    def __post_init__(self) -> None:
        """Raises WeightUpdateError if a tensor is not within the buffer."""
        for place in self.places:
            inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= self.buffer_bytes
            if not inside or place.start % _dtype(place.dtype).itemsize:
                raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")

    def views(self, buffer_U8: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer (bytes, at least [buffer_bytes]), without copying."""
        return {
            place.name: buffer_U8[place.start : place.start + place.size].view(_dtype(place.dtype)).view(place.shape)
            for place in self.places
        }

    def first_names(self) -> dict[str, str]:
        """For each name, the first name of the same tensor: the name itself unless it is a tied alias."""
        owners: dict[int, str] = {}
        return {
            place.name: owners.setdefault(place.start, place.name) if place.size else place.name for place in self.places
        }


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of `tensors`; names that share one tensor share one place."""
    firsts = first_names(tensors)
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(dict.fromkeys(firsts.values()), key=lambda name: -tensors[name].element_size()):
        starts[name], end = end, end + tensors[name].nbytes
    places = [
        TensorPlace(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape), starts[first])
        for name, first in firsts.items()
    ]
    return Layout(tuple(places), end)


def require_same(earlier: Layout, later: Layout) -> None:
    """Raises WeightUpdateError, with the names, if `later` has other tensors than `earlier`."""
    before = {place.name: place for place in earlier.places}
    after = {place.name: place for place in later.places}
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if names:
        # A different tensor moves all tensors after it. Name the changed ones, unless only the tying changed.
        changed = [name for name in names if _kind(before.get(name)) != _kind(after.get(name))] or names
        listed = ", ".join(changed[:8]) + (", ..." if len(changed) > 8 else "")
        raise WeightUpdateError(
            f"the weights differ from those of earlier updates in names, types, shapes or tying: {listed}"
        )


def decode_layout(text: str | bytes) -> Layout:
    """Decode the layout. Raises WeightUpdateError if it is invalid or a tensor is not within the buffer."""
    try:
        return msgspec.json.decode(text, type=Layout)
    except INVALID_DATA as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error


def _kind(place: TensorPlace | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"weights of an unknown type: {name!r}")
    return dtype


# ---- files of weights


_LENGTH_BYTES = 8


def make_buffer(fd: int, layout: Layout) -> dict[str, Tensor]:
    """Write the header and make room for the tensors. Returns them, in the file. Raises OSError."""
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

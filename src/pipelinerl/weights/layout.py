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
    """The place of a named tensor; `start` is in bytes from the start of the buffer. Tied names have the same place."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def type(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise WeightUpdateError(f"weights of an unknown type: {self.dtype!r}")
        return found

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.type.itemsize


class Layout(msgspec.Struct, frozen=True):
    """The places of all tensors of an update, by name, and the size of a buffer that holds them.

    Tensors of larger types come first, without gaps: each is aligned to its type, as in a safetensors file.
    """

    places: dict[str, TensorPlace]
    buffer_bytes: int

    def __post_init__(self) -> None:
        """Raises WeightUpdateError if a tensor is not within the buffer."""
        for name, place in self.places.items():
            inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.end <= self.buffer_bytes
            if not inside or place.start % place.type.itemsize:
                raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {name}: {place}")

    def views(self, buffer_U8: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer (bytes, at least [buffer_bytes]), without copying."""
        return {
            name: buffer_U8[place.start : place.end].view(place.type).view(place.shape)
            for name, place in self.places.items()
        }

    def first_names(self) -> dict[str, str]:
        """For each name, the first name of the same tensor: the name itself unless it is a tied alias."""
        owners: dict[int, str] = {}
        return {
            name: owners.setdefault(place.start, name) if place.end > place.start else name
            for name, place in self.places.items()
        }


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of `tensors`; names that share one tensor share one place."""
    firsts = first_names(tensors)
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(dict.fromkeys(firsts.values()), key=lambda name: -tensors[name].element_size()):
        starts[name], end = end, end + tensors[name].nbytes
    places = {
        name: TensorPlace(str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape), starts[first])
        for name, first in firsts.items()
    }
    return Layout(places, end)


def decode_layout(text: str | bytes) -> Layout:
    """Decode the layout. Raises WeightUpdateError if it is invalid or a tensor is not within the buffer."""
    try:
        return msgspec.json.decode(text, type=Layout)
    except INVALID_DATA as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error


# ---- files of weights


_LENGTH_BYTES = 8


def make_buffer(fd: int, layout: Layout) -> dict[str, Tensor]:
    """Write the header and make room for the tensors. Returns them, in the file. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "layout": msgspec.json.encode(layout).decode()}}
    for name in dict.fromkeys(layout.first_names().values()):
        place = layout.places[name]
        dtype = TYPES.get(place.type, place.dtype)
        header[name] = {"dtype": dtype, "shape": place.shape, "data_offsets": [place.start, place.end]}
    encoded = msgspec.json.encode(header)
    start = -(-(_LENGTH_BYTES + len(encoded)) // mmap.PAGESIZE) * mmap.PAGESIZE
    encoded = encoded.ljust(start - _LENGTH_BYTES)
    reserve(fd, start + layout.buffer_bytes)
    os.pwrite(fd, len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, 0)
    return _views(fd, layout, start)


def mapped(fd: int) -> dict[str, Tensor]:
    """The tensors of a file that `make_buffer` has made."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    header = msgspec.json.decode(os.pread(fd, length, _LENGTH_BYTES))
    return _views(fd, decode_layout(header["__metadata__"]["layout"]), _LENGTH_BYTES + length)


def _views(fd: int, layout: Layout, start: int) -> dict[str, Tensor]:
    """The tensors of the buffer, which begins at `start`. They keep the mapping alive."""
    return layout.views(torch.frombuffer(mmap.mmap(fd, start + layout.buffer_bytes), dtype=torch.uint8)[start:])


def pin_all(tensors: dict[str, Tensor], device: torch.device) -> Callable[[], object]:
    """Have a GPU read and write the buffer of these tensors directly, until the result is called."""
    from pipelinerl.models.device import pin  # noqa: PLC0415 - only on a GPU

    return pin(next(iter(tensors.values())), device)

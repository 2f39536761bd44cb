"""The layout of an update's tensors in a buffer."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import INVALID_DATA, WeightUpdateError


class Place(msgspec.Struct, frozen=True):
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
    """The places of all tensors of an update, and the size of a buffer that holds them."""

    places: tuple[Place, ...]
    buffer_bytes: int

    def views(self, buffer_U8: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer (bytes, [buffer_bytes]), without copying."""
        return {
            place.name: buffer_U8[place.start : place.start + place.size].view(_dtype(place.dtype)).view(place.shape)
            for place in self.places
        }


def decode_layout(text: str | bytes) -> Layout:
    """Decode the layout. Raises WeightUpdateError if it is invalid or a tensor is not within the buffer."""
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except INVALID_DATA as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % 8:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")
    return layout


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"weights of an unknown type: {name!r}")
    return dtype

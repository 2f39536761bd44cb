"""The layout of an update's tensors in a buffer. Tied names stay tied."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import INVALID_DATA, WeightUpdateError
from pipelinerl.models.state import first_names


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
    """The places of all tensors of an update, and the size of a buffer that holds them.

    Tensors of larger types come first, without gaps: each is aligned to its type, as in a safetensors file.
    """

    places: tuple[Place, ...]
    buffer_bytes: int

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
        Place(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape), starts[first])
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
        layout = msgspec.json.decode(text, type=Layout)
    except INVALID_DATA as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    check(layout)
    return layout


def check(layout: Layout) -> None:
    """Raises WeightUpdateError if a tensor is not within the buffer."""
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % _dtype(place.dtype).itemsize:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")


def _kind(place: Place | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"weights of an unknown type: {name!r}")
    return dtype

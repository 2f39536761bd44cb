"""The layout of an update's tensors in a buffer, and the check of an engine's receipt."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import first_names
from pipelinerl.types import UpdateReceipt

# ---- Copying named tensors; tied names stay tied


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is sent: `dtype` for floating-point tensors; integers and booleans are not converted."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies on the CPU; names that share one tensor share one copy."""
    copies: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, first in first_names(tensors).items():
            if name == first:
                tensor = tensors[name]
                copies[name] = torch.empty(tensor.shape, dtype=sent_dtype(tensor, dtype)).copy_(tensor)
            else:
                copies[name] = copies[first]
    return copies


_ALIGNMENT = 64


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

    def require_same(self, other: Layout) -> None:
        """Raises WeightUpdateError, with the names, if `other` has different tensors."""
        mine = {place.name: place for place in self.places}
        theirs = {place.name: place for place in other.places}
        names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if names:
            # A different tensor moves all tensors after it. Name the changed ones, unless only the tying changed.
            changed = [name for name in names if _kind(mine.get(name)) != _kind(theirs.get(name))] or names
            raise WeightUpdateError(
                "the weights differ from those of earlier updates in names, types, shapes or tying: "
                + ", ".join(changed[:8])
                + (", ..." if len(changed) > 8 else "")
            )


def _kind(place: Place | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """The layout of `tensors`, sent as `dtype`; names that share one tensor share one place."""
    places: dict[str, Place] = {}
    end = 0
    for name, first in first_names(tensors).items():
        tensor = tensors[name]
        start = places[first].start if first != name else end
        dtype_name = str(sent_dtype(tensor, dtype)).removeprefix("torch.")
        places[name] = Place(name, dtype_name, tuple(tensor.shape), start)
        if first == name:
            end = aligned(end + places[name].size)
    return Layout(tuple(places.values()), end)


def aligned(size: int, alignment: int = _ALIGNMENT) -> int:
    """`size`, rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"weights of an unknown type: {name!r}")
    return dtype


# ---- Checking that an engine holds the weights that were sent


def complaint(receipt: UpdateReceipt, version: int, checksum: str) -> str | None:
    """An error message if the receipt does not prove that the engine holds the update (version, checksum), or None."""
    if receipt.error is not None:
        return f"engine {receipt.engine!r} did not apply weights of version {version}: {receipt.error}"
    if receipt.version != version:
        return f"engine {receipt.engine!r} answered for version {receipt.version}, not {version}"
    if receipt.checksum != checksum:
        return (
            f"engine {receipt.engine!r} says it took weights of version {version}, but holds others: checksum "
            f"{receipt.checksum}, sent {checksum} (are its parameters of the same type as those sent?)"
        )
    return None

"""Where each tensor lies in a buffer of the shared file."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import first_names
from pipelinerl.types import UpdateReceipt

# ------------------------------------------------------------------------------------------------------------------------
# Copying named tensors with the sharing between them kept.


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type a tensor is sent in: floating-point tensors may be converted, integers and booleans stay."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies on the CPU; names that shared one tensor share one copy."""
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
    """One name's tensor: `start` is in bytes from the start of the buffer. Tied names have the same place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


class Layout(msgspec.Struct, frozen=True):
    """All tensors of an update, and how large a buffer for them is."""

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
            # A different tensor moves all behind it: name the changed ones, unless only the tying changed.
            changed = [name for name in names if _kind(mine.get(name)) != _kind(theirs.get(name))] or names
            raise WeightUpdateError(
                "the weights are not those of the updates before (names, types, shapes or tying differ): "
                + ", ".join(changed[:8])
                + (", ..." if len(changed) > 8 else "")
            )


def _kind(place: Place | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """A place for each name; names that share one tensor share the place."""
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
    """`size`, rounded up."""
    return -(-size // alignment) * alignment


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"weights of an unknown type: {name!r}")
    return dtype


# ------------------------------------------------------------------------------------------------------------------------
# When is a receipt proof that the engine holds what was sent?


def complaint(receipt: UpdateReceipt, version: int, checksum: str) -> str | None:
    """What is wrong with the receipt for the update (version, checksum), in words, or None."""
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

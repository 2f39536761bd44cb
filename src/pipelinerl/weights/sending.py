"""What every sender of weights does: copy or lay out named tensors, and check an engine's receipt. Tied names stay tied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import first_names, not_finite, on_gpu
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.layout import Layout, Place, aligned


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is sent: `dtype` for floating-point tensors; integers and booleans are not converted."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def source_checksum(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    """The `device_checksum` of the tensors; "" if they are converted on sending, on the CPU, or have values not finite."""
    converted = any(sent_dtype(tensor, dtype) != tensor.dtype for tensor in tensors.values())
    if converted or not on_gpu(tensors) or not_finite(tensors):
        return ""
    from pipelinerl.models.device_sums import device_checksum  # noqa: PLC0415 - only on a GPU

    return device_checksum(tensors)


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


def require_same(earlier: Layout, later: Layout) -> None:
    """Raises WeightUpdateError, with the names, if `later` has other tensors than `earlier`."""
    before = {place.name: place for place in earlier.places}
    after = {place.name: place for place in later.places}
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if names:
        # A different tensor moves all tensors after it. Name the changed ones, unless only the tying changed.
        changed = [name for name in names if _kind(before.get(name)) != _kind(after.get(name))] or names
        raise WeightUpdateError(
            "the weights differ from those of earlier updates in names, types, shapes or tying: "
            + ", ".join(changed[:8])
            + (", ..." if len(changed) > 8 else "")
        )


def _kind(place: Place | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


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

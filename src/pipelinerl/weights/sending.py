"""What every sender of weights does: lay out and copy named tensors, and check receipts. Tied names stay tied."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum, digests_of, first_names, not_finite, on_gpu
from pipelinerl.types import UpdateReceipt, WeightTransfer
from pipelinerl.weights.layout import Layout, Place
from pipelinerl.weights.messages import Offer

_ALIGNMENT = 64


class Sender(ABC):
    """A `WeightSender`. `transfer` is the latest complete one; `digests` has one for each tensor of the latest update."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """`dtype`: the type of floating-point tensors as sent (None: unchanged)."""
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}
        self._dtype = dtype
        self._layout: Layout | None = None
        self._sent: Offer | None = None
        self._begin_s = self._sent_s = 0.0  # time.monotonic
        self._source: torch.device | None = None  # the GPU of the tensors, if they are on one
        self._inbox: list[UpdateReceipt] = []
        self._problem: str | None = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors and offer the copies. Returns their checksum, or "" if the run is ending.

        Versions must rise, and names, types, shapes and tying must not change; otherwise raises WeightUpdateError. Also
        raises it if an engine did not acknowledge the previous update in time, or holds other weights.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        layout = layout_of(tensors, self._dtype)
        if self._layout is not None:
            require_same(self._layout, layout)
        self._source = next(iter(tensors.values())).device if on_gpu(tensors) else None
        copies = self._buffer(layout)
        if copies is None:
            return ""
        self._begin_s = time.monotonic()
        with torch.no_grad():
            for name, first in first_names(tensors).items():
                if name == first:
                    copies[name].copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.digests = digests_of(copies)
        digest, sums = checksum(copies, self.digests), source_checksum(tensors, self._dtype)
        number = self._sent.number + 1 if self._sent else 1
        offer = Offer(number=number, version=version, checksum=digest, device_checksum=sums)
        self._layout, self._sent, self._sent_s = layout, offer, time.monotonic()
        self._publish(offer, copies)
        return digest

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if an engine does not hold exactly what was sent."""
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    @abstractmethod
    def _buffer(self, layout: Layout) -> Mapping[str, Tensor] | None:
        """Memory for the next update, once nobody reads it any more. None if the run is ending."""

    @abstractmethod
    def _publish(self, offer: Offer, copies: Mapping[str, Tensor]) -> None:
        """Make the update available."""

    def _sent_at_once(self, offer: Offer) -> None:
        """The transfer was complete when the copies were."""
        size = 0 if self._layout is None else self._layout.buffer_bytes
        self.transfer = WeightTransfer(version=offer.version, bytes=size, time_s=time.monotonic() - self._begin_s)

    def _take(self, receipt: UpdateReceipt) -> None:
        """Note an engine's receipt for the last update."""
        if self._sent is not None:
            self._problem = self._problem or complaint(receipt, self._sent)
            self._inbox.append(receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """The layout of `tensors`, sent as `dtype`; names that share one tensor share one place."""
    places: dict[str, Place] = {}
    end = 0
    for name, first in first_names(tensors).items():
        tensor = tensors[name]
        start = places[first].start if first != name else end
        places[name] = Place(name, str(sent_dtype(tensor, dtype)).removeprefix("torch."), tuple(tensor.shape), start)
        if first == name:
            end += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
    return Layout(tuple(places.values()), end)


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


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is sent: `dtype` for floating-point tensors; integers and booleans are not converted."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _kind(place: Place | None) -> tuple[str, tuple[int, ...]] | None:
    return (place.dtype, place.shape) if place is not None else None


def source_checksum(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    """The `device_checksum` of the tensors; "" if they are converted on sending, on the CPU, or have values not finite."""
    converted = any(sent_dtype(tensor, dtype) != tensor.dtype for tensor in tensors.values())
    if converted or not on_gpu(tensors) or not_finite(tensors):
        return ""
    from pipelinerl.models.device_sums import device_checksum  # noqa: PLC0415 - only on a GPU

    return device_checksum(tensors)


def complaint(receipt: UpdateReceipt, sent: Offer) -> str | None:
    """An error message if the receipt does not prove that the engine holds the update, or None."""
    if receipt.error is not None:
        return f"engine {receipt.engine!r} did not apply weights of version {sent.version}: {receipt.error}"
    if receipt.version != sent.version:
        return f"engine {receipt.engine!r} answered for version {receipt.version}, not {sent.version}"
    if receipt.checksum != sent.checksum:
        return (
            f"engine {receipt.engine!r} says it took weights of version {sent.version}, but holds others: checksum "
            f"{receipt.checksum}, sent {sent.checksum} (are its parameters of the same type as those sent?)"
        )
    return None

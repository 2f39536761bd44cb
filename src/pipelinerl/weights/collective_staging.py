"""Where a receiver keeps the update that is coming in, until it is whole and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.weights.collective_control import Form, Offer
from pipelinerl.weights.collective_group import Group, form_group, join_store, staging_device
from pipelinerl.weights.layout import Layout


class Received(NamedTuple):
    """Update `number`, whole. `error`: its bytes are not those that were sent."""

    number: int
    update: WeightUpdate
    error: str | None


class Staging:
    """One buffer, reused by every update: the sender sends none before the one before was answered."""

    def __init__(self, form: Form, *, index: int, sender_host: str, host: str, device: torch.device) -> None:
        """Joins the group, within a bound. `device` is the engine's: a GPU is where nccl receives.

        Raises WeightUpdateError if that fails, and UserError for a wrong backend.
        """
        device = staging_device(form.backend, device)
        self._bucket_bytes = form.bucket_bytes
        self._device = device
        self._buffer_U8 = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] | None = None
        self._offer: Offer | None = None
        bound_s = 2 * form.stall_s
        store = join_store(sender_host, form.store_port, bound_s)
        self.group: Group = form_group(
            form.backend, store, rank=index + 1, size=form.size, host=host, bound_s=bound_s, device=device
        )

    def prepare(self, offer: Offer) -> None:
        """Make room. Raises WeightUpdateError for a layout that makes no sense, or if there is no room."""
        if self._tensors is None:
            layout = decoded(offer.layout)
            self._buffer_U8 = staging_buffer(layout, self._device)
            self._tensors = layout.views(self._buffer_U8)
        self._offer = offer

    def receive(self, number: int, check: Callable[[], None]) -> Received:
        """Take part in the broadcast of the update that was offered, and verify it. `check` may end it by an error."""
        offer, tensors = self._offer, self._tensors
        if offer is None or tensors is None or offer.number != number:
            raise WeightUpdateError(f"the weight sender broadcasts update {number}, which it has not offered")
        self.group.broadcast(self._buffer_U8, self._bucket_bytes, check)
        found = checksum(tensors)
        error = None
        if found != offer.checksum:
            error = f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
        return Received(number, WeightUpdate(offer.version, offer.checksum, tensors), error)


def staging_buffer(layout: Layout, device: torch.device) -> Tensor:
    """Bytes, [buffer_bytes], for all of the tensors. Raises WeightUpdateError if there is no room."""
    try:
        # Zeros: what lies between two tensors is sent too, and should be nobody's memory.
        return torch.zeros(layout.buffer_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no room for a copy of the weights ({layout.buffer_bytes / 1e6:.0f} MB) on {device}. Free memory, or send a "
            "smaller type"
        ) from error


def decoded(text: str) -> Layout:
    """The layout, if every tensor of it lies within the buffer. Raises WeightUpdateError."""
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except msgspec.DecodeError as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % 8:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")
    return layout

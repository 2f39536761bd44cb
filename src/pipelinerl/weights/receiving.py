"""An engine's end of every transfer of weights: it takes what the trainer offers, and sends receipts, through the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages, WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.layout import mapped, pin_all


class Receiver:
    """`taken`: an update that was not acknowledged yet. `meeting`: where receivers of a broadcast meet;
    None until the first call of `offered` is answered.
    """

    def __init__(self, hub: Messages, tensors: Callable[[wire.Offer], Mapping[str, Tensor]] = lambda _: {}) -> None:
        """`tensors`: those of an update that is taken. None for an engine of servers, which read or receive them."""
        self.taken: wire.Offer | None = None
        self.meeting: wire.Meeting | None = None
        self._hub, self._tensors = hub, tensors
        self._asked, self._seen = False, 0
        self._offer: wire.Offer | None = None
        hub.handle(wire.Offer, self._on_offer)
        hub.handle(wire.Meeting, self._on_meeting)

    def offered(self) -> int | None:
        """The version of the newest update if it was not taken yet, or None. Costs some microseconds.

        The first call asks for weights: from then on the trainer waits for this engine, which may replace a dead one.
        """
        if not self._asked:
            self._asked = True
            self._hub.send(wire.EngineAnswer(wire.ASKS))
        self._hub.take()
        return self._offer.version if self._offer else None

    def poll(self) -> WeightUpdate | None:
        """The newest update if it was not taken yet, or None.

        The tensors are views of the transport's memory: do not write to them. They do not change until the update is
        acknowledged. Raises WeightUpdateError if they do not have the sender's checksum.
        """
        if self.offered() is None or (offer := self._offer) is None:
            return None
        self.taken, self._offer = offer, None
        about = (offer.device_checksum, offer.path, bool(offer.adapter))
        return WeightUpdate(offer.version, offer.checksum, self._tensors(offer), *about)

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self.taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._hub.send(wire.EngineAnswer(self.taken.number, receipt))
        self.taken = None

    def close(self) -> None:
        """Release the memory; views returned by `poll` stay valid."""

    def _on_offer(self, offer: wire.Offer) -> None:
        if offer.number > self._seen:  # an engine that asked while it was offered gets it twice
            self._offer, self._seen = offer, offer.number

    def _on_meeting(self, meeting: wire.Meeting) -> None:
        self.meeting = meeting


class SharedWeightReceiver(Receiver):
    """An embedded engine's end of a shared file in memory. The caller owns the descriptor."""

    def __init__(self, fd: int, hub: Messages, device: str = "cpu") -> None:
        """`device`: where the engine computes. A GPU reads the file directly: it is pinned until `close`."""
        super().__init__(hub, self._mapped)
        self._fd, self._device = fd, device
        self._views: dict[str, Tensor] = {}
        self._unpin: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Release the buffer; views returned by `poll` stay valid, and are not pinned any more."""
        self._unpin()
        self._views = {}

    def _mapped(self, offer: wire.Offer) -> Mapping[str, Tensor]:
        if not self._views:
            self._views = mapped(self._fd)
            if self._device != "cpu":
                self._unpin = pin_all(self._views, torch.device(self._device))
        # A GPU verifies the device's checksum, if there is one, on its own parameters. It stands still here.
        if self._device == "cpu" or not offer.device_checksum:
            require_intact(self._views, offer.version, offer.adapter or offer.checksum)
        return self._views


def require_intact(tensors: Mapping[str, Tensor], version: int, digest: str) -> None:
    """Raises WeightUpdateError if the tensors do not have the sender's checksum, `digest`."""
    if (found := checksum(tensors)) != digest:
        raise WeightUpdateError(f"weights of version {version} arrived damaged: checksum {found}, sent {digest}")

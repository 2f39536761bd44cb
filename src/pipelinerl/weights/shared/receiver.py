"""An engine's end of weight transfer through shared memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import MAX_RECEIVERS, UpdateReceipt
from pipelinerl.weights.messages import Answer, Offer
from pipelinerl.weights.shared.file import Control, map_buffers


class SharedWeightReceiver:
    """An engine's end: number `index` of the sender's receivers. The caller owns the descriptor."""

    def __init__(self, fd: int, index: int, device: str = "cpu") -> None:
        """`device`: where the engine computes. A GPU reads the file directly: it is pinned until `close`."""
        if not 0 <= index < MAX_RECEIVERS:
            raise ValueError(f"a receiver's index is 0 to {MAX_RECEIVERS - 1}, not {index}")
        self._fd, self._index, self._device = fd, index, device
        self._control = Control(fd)
        self._buffers: list[dict[str, Tensor]] = []
        self._unpin: Callable[[], object] = lambda: None
        self._seen = 0
        self._taken: Offer | None = None
        self._receipt_due = False

    def offered(self) -> int | None:
        """The version of the newest update if it was not taken yet, or None. Costs about a microsecond if there is none."""
        offer = self._newest()
        return offer.version if offer else None

    def poll(self) -> WeightUpdate | None:
        """The newest update if it was not taken yet, or None.

        The tensors are views of shared memory: do not write to them. They do not change until the next update is
        acknowledged. Raises WeightUpdateError if the bytes do not match the sender's checksum.
        """
        if self._taken is None:  # from now on the sender waits for this process, which may replace one that died
            self._control.write_answer(self._index, Answer(0))
        offer = self._newest()
        if offer is None:
            return None
        if not self._buffers:
            self._buffers = map_buffers(self._fd)
            if self._device != "cpu":
                from pipelinerl.models.transfers import pin  # noqa: PLC0415 - only on a GPU

                self._unpin = pin(next(iter(self._buffers[0].values())), torch.device(self._device))
        tensors = self._buffers[offer.number % 2]
        self._seen, self._taken, self._receipt_due = offer.number, offer, True
        # A GPU verifies the device's checksum, if there is one, on its own parameters. It stands still here.
        if self._device == "cpu" or not offer.device_checksum:
            _require_intact(offer, tensors)
        return WeightUpdate(offer.version, offer.checksum, tensors, offer.device_checksum)

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self._taken is None or not self._receipt_due:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._control.write_answer(self._index, Answer(self._taken.number, receipt))
        self._receipt_due = False

    def close(self) -> None:
        """Release the buffers; views returned by `poll` stay valid, and are not pinned any more."""
        self._unpin()
        self._buffers = []
        self._control.close()

    def _newest(self) -> Offer | None:
        if self._control.offers_made() == self._seen:
            return None
        offer = self._control.read_offer()
        if offer is None or (self._taken is not None and offer.number <= self._taken.number):
            return None  # the offer is being written
        return offer


def _require_intact(offer: Offer, tensors: dict[str, Tensor]) -> None:
    for _ in range(2):  # a CPU that reorders stores (ARM) may show the offer before the last bytes
        if (found := checksum(tensors)) == offer.checksum:
            return
    raise WeightUpdateError(f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}")

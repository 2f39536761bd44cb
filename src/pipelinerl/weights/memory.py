"""Weight transfer within one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.messages import Offer
from pipelinerl.weights.sending import Sender


class MemoryWeightSender(Sender):
    """Sends to `receiver`. A new update replaces one that was not taken yet."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the type to which floating-point tensors are converted on sending; None: they are not converted."""
        super().__init__(dtype)
        self.receiver = MemoryWeightReceiver(self._take)

    def unanswered(self) -> Sequence[str]:
        """The engine, if it has not acknowledged the last update."""
        return ["engine"] if self.receiver.waiting or self.receiver.taken else []

    def close(self) -> None:
        """Nothing to release."""

    def _buffer(self, layout: Layout) -> Mapping[str, Tensor]:
        self._raise_problem()
        if (taken := self.receiver.taken) is not None:
            raise WeightUpdateError(f"the engine took weights of version {taken.version} without a receipt")
        return layout.views(torch.empty(layout.buffer_bytes, dtype=torch.uint8))

    def _publish(self, offer: Offer, copies: Mapping[str, Tensor]) -> None:
        self._sent_at_once(offer)
        self.receiver.waiting = WeightUpdate(offer.version, offer.checksum, copies, offer.device_checksum)


class MemoryWeightReceiver:
    """`waiting`: the newest update, which was not taken yet. `taken`: an update that was not acknowledged yet."""

    def __init__(self, answer: Callable[[UpdateReceipt], None]) -> None:
        self.waiting: WeightUpdate | None = None
        self.taken: WeightUpdate | None = None
        self._answer = answer

    def offered(self) -> int | None:
        """The version of the newest update not yet taken, or None."""
        return self.waiting.version if self.waiting else None

    def poll(self) -> WeightUpdate | None:
        """The newest update not yet taken, or None."""
        update, self.waiting = self.waiting, None
        self.taken = update or self.taken
        return update

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self.taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self.taken = None
        self._answer(receipt)

    def close(self) -> None:
        """Nothing to release."""

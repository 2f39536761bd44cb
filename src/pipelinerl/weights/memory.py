"""Weight transfer within one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, digests_of, first_names
from pipelinerl.types import UpdateReceipt, WeightTransfer
from pipelinerl.weights.sending import complaint, copied, source_checksum


class MemoryChannel:
    """Connects one sender and one receiver. A new update replaces one that the receiver has not taken yet."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the type to which floating-point tensors are converted on sending; None: they are not converted."""
        self.offered: WeightUpdate | None = None
        self.taken: WeightUpdate | None = None
        self.receipts: list[UpdateReceipt] = []
        self.problem: str | None = None
        self.sender = MemoryWeightSender(self, dtype)
        self.receiver = MemoryWeightReceiver(self)


class MemoryWeightSender:
    def __init__(self, channel: MemoryChannel, dtype: torch.dtype | None) -> None:
        self._channel = channel
        self._dtype = dtype
        self._version = -1
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors, make the copies available, return their checksum. Versions must rise.

        Raises WeightUpdateError if the receiver took an update and did not acknowledge it, or acknowledged another one.
        """
        if version <= self._version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._version}")
        self._raise_problem()
        if self._channel.taken is not None:
            raise WeightUpdateError(f"the engine took weights of version {self._channel.taken.version} without a receipt")
        begin_s = time.monotonic()
        copies = copied(tensors, self._dtype)
        self.digests = digests_of(copies)
        update = WeightUpdate(version, checksum(copies, self.digests), copies, source_checksum(tensors, self._dtype))
        size = sum(copies[name].nbytes for name, first in first_names(copies).items() if name == first)
        self.transfer = WeightTransfer(version=version, bytes=size, time_s=time.monotonic() - begin_s)
        self._channel.offered = update
        self._version = version
        return update.checksum

    def unanswered(self) -> Sequence[str]:
        """The engine, if it has not acknowledged the last update."""
        return ["engine"] if self._channel.offered or self._channel.taken else []

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if a receipt does not match the update that was sent."""
        self._raise_problem()
        receipts, self._channel.receipts = self._channel.receipts, []
        return receipts

    def close(self) -> None:
        """Nothing to release."""

    def _raise_problem(self) -> None:
        if self._channel.problem is not None:
            raise WeightUpdateError(self._channel.problem)


class MemoryWeightReceiver:
    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def offered(self) -> int | None:
        """The version of the newest update not yet taken, or None."""
        return self._channel.offered.version if self._channel.offered else None

    def poll(self) -> WeightUpdate | None:
        """The newest update not yet taken, or None."""
        update, self._channel.offered = self._channel.offered, None
        self._channel.taken = update or self._channel.taken
        return update

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        channel = self._channel
        if channel.taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        channel.problem = channel.problem or complaint(receipt, channel.taken.version, channel.taken.checksum)
        channel.receipts.append(receipt)
        channel.taken = None

    def close(self) -> None:
        """Nothing to release."""

"""An engine's end of weight transfer through shared memory, on a GPU. Not imported by runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipelinerl.models.transfers import pin
from pipelinerl.weights.shared.file import Offer
from pipelinerl.weights.shared.receiver import SharedWeightReceiver


class PinnedWeightReceiver(SharedWeightReceiver):
    """Pins the shared file from the first update until `close`, so that the GPU `device` reads it directly."""

    def __init__(self, fd: int, index: int, device: str) -> None:
        super().__init__(fd, index)
        self._device = torch.device(device)
        self._unpin: Callable[[], object] = lambda: None

    def close(self) -> None:
        """As of any receiver: views stay valid. They are not pinned any more."""
        self._unpin()
        super().close()

    def _require_intact(self, offer: Offer, tensors: dict[str, Tensor]) -> None:
        """The engine stands still here. It verifies the device's checksum, if there is one, on its own parameters."""
        if not offer.device_checksum:
            super()._require_intact(offer, tensors)

    def _map_buffers(self, offer: Offer) -> list[dict[str, Tensor]]:
        buffers = super()._map_buffers(offer)
        self._unpin = pin(next(iter(buffers[0].values())), self._device)
        return buffers

"""Weight transfer within one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.receiving import Receiver
from pipelinerl.weights.sending import Sender


class DirectMessages:
    """One end of the messages about weights, in a process that has both: the other end handles at once what is sent."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], Any] = {}
        self._other = self

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        here, there = cls(), cls()
        here._other, there._other = there, here
        return here, there

    def handle(self, kind: type[Any], handler: Any) -> None:
        self._handlers[kind] = handler

    def take(self) -> None:
        """Everything was handled."""

    def send(self, message: Any) -> None:
        self._other._handlers[type(message)](message)


class MemoryWeightSender(Sender):
    """Sends to `receiver`, which takes the copies themselves. A new update replaces one that was not taken yet."""

    def __init__(self) -> None:
        here, there = DirectMessages.pair()
        super().__init__(here, 1)
        self._tensors: Mapping[str, Tensor] = {}
        self.receiver = Receiver(there, lambda _: self._tensors)

    def close(self) -> None:
        """Nothing to release."""

    def _buffer(self, layout: Layout, source: torch.device | None) -> Mapping[str, Tensor]:
        del source
        self._tensors = self._tensors or layout.views(torch.empty(layout.buffer_bytes, dtype=torch.uint8))
        return self._tensors

    def _wait_for_answers(self) -> bool:
        self._raise_problem()
        if (taken := self.receiver.taken) is not None:
            raise WeightUpdateError(f"the engine took weights of version {taken.version} without a receipt")
        return True

"""The trainer's end of weight transfer through shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.types import MAX_RECEIVERS, UpdateReceipt
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.messages import Offer
from pipelinerl.weights.sending import Sender
from pipelinerl.weights.shared.file import AWAY, Control, make_buffers

_POLL_S = 0.0005


class SharedWeightSender(Sender):
    """The trainer's end. The caller owns the descriptor. The file stays mapped as long as views of it exist."""

    def __init__(
        self,
        fd: int,
        receivers: int,
        *,
        timeout_s: float = 120.0,
        dtype: torch.dtype | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `dtype`: the type of floating-point tensors as sent (None: unchanged).

        `give_up` returns True when the run is ending, and engines may be gone: the sender then neither waits nor sends.
        """
        super().__init__(dtype)
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        self._fd = fd
        self._control = Control(fd)
        if self._control.offers_made():
            raise ValueError("the shared file has had a sender: make a new file for each sender")
        self._timeout_s, self._give_up = timeout_s, give_up
        self._buffers: list[dict[str, Tensor]] = []
        self._unpin: Callable[[], object] = lambda: None
        self._answered = [0] * receivers
        self._engines = [f"number {index}" for index in range(receivers)]

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        self._collect()
        sent = self._sent.number if self._sent else 0
        return [name for name, answered in zip(self._engines, self._answered, strict=True) if AWAY < answered < sent]

    def receipts(self) -> Sequence[UpdateReceipt]:
        self._collect()
        return super().receipts()

    def close(self) -> None:
        """Release the buffers. Receivers can still take the last update."""
        self._unpin()
        self._buffers = []
        self._control.close()

    def _buffer(self, layout: Layout) -> Mapping[str, Tensor] | None:
        if not self._buffers:
            try:
                self._buffers = make_buffers(self._fd, layout)
            except OSError as error:
                raise WeightUpdateError(
                    f"no room for two copies of the weights ({2 * layout.buffer_bytes / 1e6:.0f} MB) in shared memory: "
                    f"{error.strerror}. Free memory, or send a smaller type"
                ) from error
            if self._source is not None:
                from pipelinerl.models.transfers import pin  # noqa: PLC0415 - only on a GPU

                self._unpin = pin(next(iter(self._buffers[0].values())), self._source)
        number = self._sent.number + 1 if self._sent else 1
        return self._buffers[number % 2] if self._wait_for_answers() else None

    def _publish(self, offer: Offer, _copies: Mapping[str, Tensor]) -> None:
        self._control.write_offer(offer)
        self._sent_at_once(offer)

    def _wait_for_answers(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if `give_up` returned True meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        while missing := self.unanswered():
            if self._give_up():
                return False
            if time.monotonic() > deadline:
                assert self._sent is not None  # noqa: S101 - nothing can be missing before the first update
                raise WeightUpdateError(
                    f"engine {', '.join(missing)} did not answer weights of version {self._sent.version} in the "
                    f"{time.monotonic() - self._sent_s:.1f} s since they were sent (bound: {self._timeout_s:g} s)"
                )
            time.sleep(_POLL_S)
        self._raise_problem()
        return True

    def _collect(self) -> None:
        """Move new receipts into the inbox. None is missed, because the next update waits for the receipts of this one.

        An engine whose process has died is not waited for. The process that replaces it takes the newest update: its buffer
        is not written before the engine has answered the next one.
        """
        sent = self._sent
        for index, answered in enumerate(self._answered):
            answer = self._control.read_answer(index) if sent and answered < sent.number else None
            if sent is None or answer is None or answer.number == answered:
                continue
            self._answered[index] = answer.number
            if answer.receipt is None or answer.number < sent.number:
                continue  # a process that replaces another one may answer an update that the other engines have had before
            self._engines[index] = f"number {index} ({answer.receipt.engine})"
            self._take(answer.receipt)

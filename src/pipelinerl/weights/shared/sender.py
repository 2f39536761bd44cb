"""The trainer's end of weight transfer through shared memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.models.state import checksum, digests_of, first_names, on_gpu
from pipelinerl.types import MAX_RECEIVERS, UpdateReceipt, WeightTransfer
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.sending import complaint, layout_of, require_same, source_checksum
from pipelinerl.weights.shared.file import AWAY, CONTROL_BYTES, Control, Offer, buffer_views, file_bytes

_POLL_S = 0.0005


class _Sent(NamedTuple):
    number: int
    version: int
    checksum: str
    at_s: float  # time.monotonic


class SharedWeightSender:
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
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        self._fd = fd
        self._control = Control(fd)
        if self._control.offers_made():
            raise ValueError("the shared file has had a sender: make a new file for each sender")
        self._timeout_s, self._dtype, self._give_up = timeout_s, dtype, give_up
        self._layout: Layout | None = None
        self._layout_bytes = 0
        self._buffers: list[dict[str, Tensor]] = []
        self._unpin: Callable[[], object] = lambda: None
        self._sent: _Sent | None = None
        self._answered = [0] * receivers
        self._engines = [f"number {index}" for index in range(receivers)]
        self._inbox: list[UpdateReceipt] = []
        self._problem: str | None = None
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors into shared memory, publish them, return the checksum of the copies ("" if the run is ending).

        Versions must rise, and names, types, shapes and tying must not change; otherwise raises WeightUpdateError. Also
        raises it if an engine did not acknowledge the previous update within `timeout_s`, or holds other weights.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        layout = layout_of(tensors, self._dtype)
        if self._layout is None:
            self._make_buffers(layout)
            if on_gpu(tensors):
                from pipelinerl.models.transfers import pin  # noqa: PLC0415 - only on a GPU

                self._unpin = pin(next(iter(self._buffers[0].values())), next(iter(tensors.values())).device)
        else:
            require_same(self._layout, layout)
        if not self._wait_for_answers():
            return ""

        begin_s = time.monotonic()
        number = self._sent.number + 1 if self._sent else 1
        buffer = self._buffers[number % 2]
        with torch.no_grad():
            for name, first in first_names(tensors).items():
                if name == first:
                    buffer[name].copy_(tensors[name], non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.digests = digests_of(buffer)
        digest = checksum(buffer, self.digests)
        sums = source_checksum(tensors, self._dtype)
        self._control.write_offer(Offer(number, version, digest, number % 2, self._layout_bytes, layout.buffer_bytes, sums))
        self._sent = _Sent(number, version, digest, time.monotonic())
        self.transfer = WeightTransfer(version=version, bytes=layout.buffer_bytes, time_s=self._sent.at_s - begin_s)
        return digest

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        self._collect()
        sent = self._sent.number if self._sent else 0
        return [name for name, answered in zip(self._engines, self._answered, strict=True) if AWAY < answered < sent]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if an engine does not hold exactly what was sent."""
        self._collect()
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    def close(self) -> None:
        """Release the buffers. Receivers can still take the last update."""
        self._unpin()
        self._buffers = []
        self._control.close()

    def _make_buffers(self, layout: Layout) -> None:
        encoded = msgspec.json.encode(layout)
        try:
            reserve(self._fd, file_bytes(len(encoded), layout.buffer_bytes))
        except OSError as error:
            raise WeightUpdateError(
                f"no room for two copies of the weights ({2 * layout.buffer_bytes / 1e6:.0f} MB) in shared memory: "
                f"{error.strerror}. Free memory, or send a smaller type"
            ) from error
        memory = mmap.mmap(self._fd, file_bytes(len(encoded), layout.buffer_bytes))
        memory[CONTROL_BYTES : CONTROL_BYTES + len(encoded)] = encoded
        self._layout, self._layout_bytes = layout, len(encoded)
        self._buffers = buffer_views(memory, layout, len(encoded))

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
                    f"{time.monotonic() - self._sent.at_s:.1f} s since they were sent (bound: {self._timeout_s:g} s)"
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
            self._problem = self._problem or complaint(answer.receipt, sent.version, sent.checksum)
            self._inbox.append(answer.receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)

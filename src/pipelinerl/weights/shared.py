"""Weight hand-over between processes, through a file in shared memory (see `shared_file` for what is where).

    sender:    wait until every receiver answered update n-1, fill buffer n % 2, then offer it in one write
    receiver:  see the offer, verify the buffer's checksum, hand out views of it; later write the answer

So no receiver ever sees half an update, and the views of update n stay as they are until update n+1 was answered.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, first_names
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.layout import Layout, aligned, complaint, layout_of
from pipelinerl.weights.shared_file import CONTROL_BYTES, MAX_RECEIVERS, Answer, Control, Offer

_POLL_S = 0.0005


class _Sent(NamedTuple):
    number: int
    version: int
    checksum: str
    at_s: float  # time.monotonic


class SharedWeightSender:
    """The trainer's end. The descriptor stays the caller's, and the file is mapped for as long as views of it exist."""

    def __init__(
        self,
        fd: int,
        receivers: int,
        *,
        timeout_s: float = 120.0,
        dtype: torch.dtype | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `dtype`: what floating-point tensors are sent as (None: unchanged).

        `give_up` says that the run is ending, and with it perhaps the engines: nothing is waited for, or sent, any more.
        """
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        self._fd = fd
        self._control = Control(fd)
        if self._control.offers_made():
            raise ValueError("the shared file has had a sender: make a new one for each")
        self._timeout_s = timeout_s
        self._dtype = dtype
        self._give_up = give_up
        self._layout: Layout | None = None
        self._layout_bytes = 0
        self._buffers: list[dict[str, Tensor]] = []
        self._sent: _Sent | None = None
        self._answered = [0] * receivers
        self._engines = [f"number {index}" for index in range(receivers)]
        self._inbox: list[UpdateReceipt] = []
        self._problem: str | None = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors into shared memory, offer them, return the checksum of what was copied ("" if it was given up).

        Versions must rise, and names, types, shapes and tying stay. Raises WeightUpdateError if they do not, if an
        engine did not answer the update before within `timeout_s`, or answered that it holds anything else.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        layout = layout_of(tensors, self._dtype)
        if self._layout is None:
            self._make_buffers(layout)
        else:
            self._layout.require_same(layout)
        if not self._answers_came():
            return ""

        number = self._sent.number + 1 if self._sent else 1
        buffer = self._buffers[number % 2]
        with torch.no_grad():
            for name, first in first_names(tensors).items():
                if name == first:
                    buffer[name].copy_(tensors[name])
        digest = checksum(buffer)
        self._control.write_offer(Offer(number, version, digest, number % 2, self._layout_bytes, layout.buffer_bytes))
        self._sent = _Sent(number, version, digest, time.monotonic())
        return digest

    def unanswered(self) -> Sequence[str]:
        """The engines that have not answered the last update yet. While there are any, `send` would wait."""
        self._collect()
        sent = self._sent.number if self._sent else 0
        return [name for name, answered in zip(self._engines, self._answered, strict=True) if answered < sent]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if an engine does not hold exactly what was sent."""
        self._collect()
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    def close(self) -> None:
        """Let go of the buffers. What was offered can still be taken."""
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

    def _answers_came(self) -> bool:
        """Wait for all answers to the update before. False if it was given up."""
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
        """Move new answers into the inbox. Every answer is seen: the next update waits for those to this one."""
        sent = self._sent
        for index, answered in enumerate(self._answered):
            answer = self._control.read_answer(index) if sent and answered < sent.number else None
            if sent is None or answer is None or answer.number <= answered:
                continue
            self._answered[index] = answer.number
            self._engines[index] = f"number {index} ({answer.receipt.engine})"
            self._problem = self._problem or complaint(answer.receipt, sent.version, sent.checksum)
            self._inbox.append(answer.receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)


class SharedWeightReceiver:
    """An engine's end: receiver number `index` of those the sender counts on. The descriptor stays the caller's."""

    def __init__(self, fd: int, index: int) -> None:
        if not 0 <= index < MAX_RECEIVERS:
            raise ValueError(f"a receiver's index is 0 to {MAX_RECEIVERS - 1}, not {index}")
        self._fd = fd
        self._index = index
        self._control = Control(fd)
        self._buffers: list[dict[str, Tensor]] = []
        self._seen = 0
        self._taken: Offer | None = None
        self._owed = False

    def offered(self) -> int | None:
        """The version of the newest update, if it was not taken yet. About a microsecond when there is none."""
        offer = self._newest()
        return offer.version if offer else None

    def poll(self) -> WeightUpdate | None:
        """The newest update, if it was not taken yet.

        The tensors are views of shared memory: read them, do not write. They stay as they are until the update after
        this one is acknowledged. Raises WeightUpdateError if the bytes are not those the sender took the checksum of.
        """
        offer = self._newest()
        if offer is None:
            return None
        if not self._buffers:
            self._buffers = self._map_buffers(offer)
        tensors = self._buffers[offer.buffer]
        self._seen, self._taken, self._owed = offer.number, offer, True
        found = checksum(tensors)
        if found != offer.checksum:
            # A processor that reorders its stores (ARM) may show the offer before the last bytes. They are here by now.
            found = checksum(tensors)
        if found != offer.checksum:
            raise WeightUpdateError(
                f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
            )
        return WeightUpdate(offer.version, offer.checksum, tensors)

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Answer for the update that was taken last. Raises ValueError if there is none to answer for."""
        if self._taken is None or not self._owed:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._control.write_answer(self._index, Answer(self._taken.number, receipt))
        self._owed = False

    def close(self) -> None:
        """Let go of the buffers; views that were handed out stay valid."""
        self._buffers = []
        self._control.close()

    def _newest(self) -> Offer | None:
        if self._control.offers_made() == self._seen:
            return None
        offer = self._control.read_offer()
        if offer is None or (self._taken is not None and offer.number <= self._taken.number):
            return None  # The offer is being written at this moment.
        return offer

    def _map_buffers(self, offer: Offer) -> list[dict[str, Tensor]]:
        size = file_bytes(offer.layout_bytes, offer.buffer_bytes)
        if os.fstat(self._fd).st_size < size:
            raise WeightUpdateError(f"the shared file is shorter than the {size} bytes that its sender announced")
        memory = mmap.mmap(self._fd, size)
        layout = msgspec.json.decode(memory[CONTROL_BYTES : CONTROL_BYTES + offer.layout_bytes], type=Layout)
        return buffer_views(memory, layout, offer.layout_bytes)


def file_bytes(layout_bytes: int, buffer_bytes: int) -> int:
    """Size of the whole file."""
    return _buffer_start(layout_bytes, buffer_bytes, 2)


def buffer_views(memory: mmap.mmap, layout: Layout, layout_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors of both buffers, by name. They keep the mapping alive."""
    whole_U8 = torch.frombuffer(memory, dtype=torch.uint8)
    starts = [_buffer_start(layout_bytes, layout.buffer_bytes, index) for index in (0, 1)]
    return [layout.views(whole_U8[start : start + layout.buffer_bytes]) for start in starts]


def _buffer_start(layout_bytes: int, buffer_bytes: int, index: int) -> int:
    return aligned(CONTROL_BYTES + layout_bytes, mmap.PAGESIZE) + index * aligned(buffer_bytes, mmap.PAGESIZE)

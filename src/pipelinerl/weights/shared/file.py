"""The file for weight transfer through shared memory. Has no name, so no file is left behind. Does not import torch.

control region    the offer: which update is in which buffer (one `SharedRecord`)
                  one receipt per receiver (a `SharedRecord` each)
layout            names, types, shapes and places of the tensors, JSON; written once
buffer 0, 1       the tensors, each at a multiple of 64 bytes; updates alternate between the buffers
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.files import SharedRecord, reserve
from pipelinerl.types import MAX_RECEIVERS, UpdateReceipt

if TYPE_CHECKING:
    from torch import Tensor

    from pipelinerl.weights.layout import Layout

_RECORD_BYTES = 8192
CONTROL_BYTES = (1 + MAX_RECEIVERS) * _RECORD_BYTES
_MAX_ERROR_CHARACTERS = 500


class Offer(msgspec.Struct, frozen=True):
    """The sender's description of the update in a buffer. `number` counts updates from 1."""

    number: int
    version: int
    checksum: str
    buffer: int
    layout_bytes: int
    buffer_bytes: int
    device_checksum: str = ""


AWAY = -1
"""`number` of an answer for a receiver whose process has died: the sender does not wait for it until it answers again."""


class Answer(msgspec.Struct, frozen=True):
    """A receiver's receipt for update `number`; without a receipt, the sender waits for it from now on, or not (`AWAY`)."""

    number: int
    receipt: UpdateReceipt | None = None


def create_shared_file() -> int:
    """An open file descriptor of a new anonymous file in memory, to be inherited by the processes that share it.

    The memory is freed when the last process that has it exits or crashes. The file grows when weights are first sent.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pipelinerl-weights")  # not limited to the 64 MB that containers give /dev/shm
    else:
        memory = Path("/dev/shm")  # noqa: S108 - an unnamed file in it
        with tempfile.TemporaryFile(dir=memory if memory.is_dir() else None) as file:
            fd = os.dup(file.fileno())
    reserve(fd, CONTROL_BYTES)
    return fd


class Control:
    """The control region of the file, mapped: the offer and the answers."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < CONTROL_BYTES:
            raise ValueError("not a file made by create_shared_file")
        self._memory = mmap.mmap(fd, CONTROL_BYTES)
        starts = range(0, CONTROL_BYTES, _RECORD_BYTES)
        self._offer, *self._answers = [SharedRecord(self._memory, start, _RECORD_BYTES) for start in starts]

    def write_offer(self, offer: Offer) -> None:
        self._offer.write(msgspec.json.encode(offer))

    def offers_made(self) -> int:
        """The number of offers written so far. Costs about a microsecond."""
        return self._offer.sequence()

    def read_offer(self) -> Offer | None:
        newest = self._offer.read()
        return msgspec.json.decode(newest[1], type=Offer) if newest else None

    def write_answer(self, index: int, answer: Answer) -> None:
        receipt = answer.receipt
        if receipt is not None and receipt.error is not None:
            receipt = msgspec.structs.replace(receipt, error=receipt.error[:_MAX_ERROR_CHARACTERS])
        self._answers[index].write(msgspec.json.encode(Answer(answer.number, receipt)))

    def read_answer(self, index: int) -> Answer | None:
        newest = self._answers[index].read()
        return msgspec.json.decode(newest[1], type=Answer) if newest else None

    def close(self) -> None:
        self._memory.close()


def file_bytes(layout_bytes: int, buffer_bytes: int) -> int:
    """Size of the whole file, in bytes."""
    return _buffer_start(layout_bytes, buffer_bytes, 2)


def buffer_views(memory: mmap.mmap, layout: Layout, layout_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors of both buffers, by name. They keep the mapping alive."""
    import torch  # noqa: PLC0415 - the launcher makes the file without it

    whole_U8 = torch.frombuffer(memory, dtype=torch.uint8)
    starts = [_buffer_start(layout_bytes, layout.buffer_bytes, index) for index in (0, 1)]
    return [layout.views(whole_U8[start : start + layout.buffer_bytes]) for start in starts]


def _buffer_start(layout_bytes: int, buffer_bytes: int, index: int) -> int:
    return _pages(CONTROL_BYTES + layout_bytes) + index * _pages(buffer_bytes)


def _pages(size: int) -> int:
    """The size in bytes of the whole pages that `size` bytes take."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

"""The file for weight transfer through shared memory. Has no name, so no file is left behind. Does not import torch.

control region    the offer: which update is in the buffers (one `SharedRecord`)
                  one receipt per receiver (a `SharedRecord` each)
layout            names, types, shapes and places of the tensors: its length (64 bits) and JSON; written once
buffer 0, 1       the tensors, each at a multiple of 64 bytes; update n is in buffer n % 2
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.files import SharedRecord, reserve
from pipelinerl.types import MAX_RECEIVERS
from pipelinerl.weights.messages import Answer, Offer

if TYPE_CHECKING:
    from torch import Tensor

    from pipelinerl.weights.layout import Layout

_RECORD_BYTES = 8192
CONTROL_BYTES = (1 + MAX_RECEIVERS) * _RECORD_BYTES
_MAX_ERROR_CHARACTERS = 500
_LENGTH = struct.Struct("=Q")


AWAY = -1
"""`number` of an answer for a receiver whose process has died: the sender does not wait for it until it answers again."""


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
    """The control region of the file, mapped: the offer and the answers.

    A receiver whose answer has no receipt is waited for from now on, or not (`AWAY`).
    """

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


def make_buffers(fd: int, layout: Layout) -> list[dict[str, Tensor]]:
    """Write the layout and make room for both buffers. Returns their tensors, by name. Raises OSError."""
    encoded = msgspec.json.encode(layout)
    contents = _LENGTH.pack(len(encoded)) + encoded
    start = _pages(CONTROL_BYTES + len(contents))
    reserve(fd, start + 2 * _pages(layout.buffer_bytes))
    os.pwrite(fd, contents, CONTROL_BYTES)
    return _views(fd, layout, start)


def map_buffers(fd: int) -> list[dict[str, Tensor]]:
    """The tensors of both buffers that `make_buffers` has made. Raises WeightUpdateError for an invalid layout."""
    from pipelinerl.weights.layout import decode_layout  # noqa: PLC0415 - with torch: the launcher makes the file without it

    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, CONTROL_BYTES))
    encoded = os.pread(fd, length, CONTROL_BYTES + _LENGTH.size)
    return _views(fd, decode_layout(encoded), _pages(CONTROL_BYTES + _LENGTH.size + length))


def _views(fd: int, layout: Layout, start: int) -> list[dict[str, Tensor]]:
    """The tensors of both buffers, which begin at `start`. They keep the mapping alive."""
    import torch  # noqa: PLC0415 - as above

    size = _pages(layout.buffer_bytes)
    whole_U8 = torch.frombuffer(mmap.mmap(fd, start + 2 * size), dtype=torch.uint8)
    return [layout.views(whole_U8[begin : begin + layout.buffer_bytes]) for begin in (start, start + size)]


def _pages(size: int) -> int:
    """The size in bytes of the whole pages that `size` bytes take."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

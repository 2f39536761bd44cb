"""Weight transfer between processes of one machine, through a file in memory that has no name (`files.shared_memory`).

layout     names, types, shapes and places of the tensors: its length (64 bits) and JSON; written once
buffer     the tensors, each at a multiple of 64 bytes

The sender writes only when every engine that it waits for has acknowledged the update before. Offers go through the hub.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages
from pipelinerl.models.state import checksum
from pipelinerl.weights.layout import Layout, decode_layout
from pipelinerl.weights.receiving import Receiver

_LENGTH = struct.Struct("=Q")


class SharedWeightReceiver(Receiver):
    """An engine's end. The caller owns the descriptor."""

    def __init__(self, fd: int, hub: Messages, device: str = "cpu") -> None:
        """`device`: where the engine computes. A GPU reads the file directly: it is pinned until `close`."""
        super().__init__(hub)
        self._fd, self._device = fd, device
        self._views: dict[str, Tensor] = {}
        self._unpin: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Release the buffer; views returned by `poll` stay valid, and are not pinned any more."""
        self._unpin()
        self._views = {}

    def _tensors(self, offer: wire.Offer) -> Mapping[str, Tensor]:
        if not self._views:
            self._views = mapped(self._fd)
            if self._device != "cpu":
                self._unpin = pin_all(self._views, torch.device(self._device))
        # A GPU verifies the device's checksum, if there is one, on its own parameters. It stands still here.
        if self._device == "cpu" or not offer.device_checksum:
            require_intact(offer, self._views)
        return self._views


def require_intact(offer: wire.Offer, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightUpdateError if the tensors are not those that were sent."""
    if (found := checksum(tensors)) != offer.checksum:
        raise WeightUpdateError(
            f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
        )


def make_buffer(fd: int, layout: Layout) -> dict[str, Tensor]:
    """Write the layout and make room for the tensors. Returns them. Raises OSError."""
    encoded = msgspec.json.encode(layout)
    start = _start(len(encoded))
    reserve(fd, start + layout.buffer_bytes)
    os.pwrite(fd, _LENGTH.pack(len(encoded)) + encoded, 0)
    return _views(fd, layout, start)


def mapped(fd: int) -> dict[str, Tensor]:
    """The tensors in the file. Raises WeightUpdateError if its layout is invalid."""
    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
    return _views(fd, decode_layout(os.pread(fd, length, _LENGTH.size)), _start(length))


def _views(fd: int, layout: Layout, start: int) -> dict[str, Tensor]:
    """The tensors of the buffer, which begins at `start`. They keep the mapping alive."""
    whole_U8 = torch.frombuffer(mmap.mmap(fd, start + max(layout.buffer_bytes, 1)), dtype=torch.uint8)
    return layout.views(whole_U8[start : start + layout.buffer_bytes])


def pin_all(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[], object]:
    """Have a GPU read and write the buffer of these tensors directly, until the result is called."""
    from pipelinerl.models.transfers import pin  # noqa: PLC0415 - only on a GPU

    return pin(next(iter(tensors.values())), device)


def _start(length: int) -> int:
    """Where the buffer begins after a layout of `length` bytes: at a page."""
    return -(-(_LENGTH.size + length) // mmap.PAGESIZE) * mmap.PAGESIZE

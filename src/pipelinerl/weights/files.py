"""Files of weights: safetensors files that the trainer writes in place, and that engines map or read.

An embedded engine has inherited a file in memory without a name (`files.shared_memory`). Engine servers get the path of a
file in a private directory. The metadata of both has the `Layout`, with which tied tensors are written once.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelinerl.errors import INVALID_DATA, WeightUpdateError
from pipelinerl.files import reserve
from pipelinerl.models.tensor_file import TYPES
from pipelinerl.weights.layout import Layout, decode_layout

COPIES = 2
"""The previous update stays until the new one is acknowledged, for a server that is started again meanwhile."""
_PREFIX = "pipelinerl-weights-"
_LOCK = "lock"
_LENGTH_BYTES = 8


class WeightFile(NamedTuple):
    """An open file. `path`: "" for one without a name."""

    fd: int
    path: str = ""


def make_buffer(fd: int, layout: Layout) -> dict[str, Tensor]:
    """Write the header and make room for the tensors. Returns them, in the file. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "layout": msgspec.json.encode(layout).decode()}}
    firsts = layout.first_names()
    for place in layout.places:
        if firsts[place.name] == place.name:
            dtype = TYPES.get(getattr(torch, place.dtype), place.dtype)
            ends = [place.start, place.start + place.size]
            header[place.name] = {"dtype": dtype, "shape": place.shape, "data_offsets": ends}
    encoded = msgspec.json.encode(header)
    start = -(-(_LENGTH_BYTES + len(encoded)) // mmap.PAGESIZE) * mmap.PAGESIZE
    encoded = encoded.ljust(start - _LENGTH_BYTES)
    reserve(fd, start + layout.buffer_bytes)
    os.pwrite(fd, len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, 0)
    return _views(fd, layout, start)


def mapped(fd: int) -> dict[str, Tensor]:
    """The tensors of a file that `make_buffer` has made. Raises WeightUpdateError if its header is invalid."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    try:
        layout = msgspec.json.decode(os.pread(fd, length, _LENGTH_BYTES))["__metadata__"]["layout"]
    except (*INVALID_DATA, KeyError, TypeError) as error:
        raise WeightUpdateError(f"the shared file of weights has no layout: {error}") from error
    return _views(fd, decode_layout(layout), _LENGTH_BYTES + length)


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped. Raises WeightUpdateError if it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            layout = (file.metadata() or {}).get("layout")
        if layout is not None:
            tensors = {name: tensors[first] for name, first in decode_layout(layout).first_names().items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise WeightUpdateError(f"the weights in {path} can't be read: {error}") from error
    return tensors


def _views(fd: int, layout: Layout, start: int) -> dict[str, Tensor]:
    """The tensors of the buffer, which begins at `start`. They keep the mapping alive."""
    return layout.views(torch.frombuffer(mmap.mmap(fd, start + layout.buffer_bytes), dtype=torch.uint8)[start:])


def pin_all(tensors: dict[str, Tensor], device: torch.device) -> Callable[[], object]:
    """Have a GPU read and write the buffer of these tensors directly, until the result is called."""
    from pipelinerl.models.transfers import pin  # noqa: PLC0415 - only on a GPU

    return pin(next(iter(tensors.values())), device)


class WeightFolder:
    """A private directory with the files of one sender, removed at the end, or after a crash by the next one beside it.

    `parents`: candidate locations, preferred first; the first with room for all files is used. The directory is locked while
    this process lives.
    """

    def __init__(self, *parents: Path) -> None:
        self._parents = parents
        self._directory: Path | None = None
        self._fds: list[int] = []

    def open(self, size: int) -> list[WeightFile]:
        """Make `COPIES` empty files, each of which will have about `size` bytes. Raises OSError."""
        self._directory = directory = self._make_directory(self._choose(COPIES * size))
        files = [WeightFile(_opened(path), str(path)) for path in (directory / f"{i}.safetensors" for i in range(COPIES))]
        self._fds += [file.fd for file in files]
        return files

    def close(self) -> None:
        """Remove the directory and its files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        while self._fds:
            os.close(self._fds.pop())

    def _choose(self, size: int) -> Path:
        for parent in self._parents:
            if os.access(parent, os.W_OK | os.X_OK) and shutil.disk_usage(parent).free > size:
                return parent
        where = ", ".join(map(str, self._parents))
        raise OSError(errno.ENOSPC, f"no room for {COPIES} copies in any of: {where}")

    def _make_directory(self, parent: Path) -> Path:
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_abandoned(left)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = parent / f".{name}"  # until it is locked: a name that the glob of other processes does not match
        unlocked.mkdir(mode=0o700)
        self._fds.append(_opened(unlocked / _LOCK))
        fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return unlocked.rename(parent / name)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose owner has exited, which frees its lock. A directory that can't be opened is left alone."""
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)

"""Crash-safe files: atomic replacement, append-only logs, and shared memory.

Errors are plain `OSError` and `ValueError`: only the caller can say what the file means to the user.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files here have unique names, or none

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE)
"""A disk, a quota or a limit on files is full, or the file system can only be read."""


def remedy(error: OSError) -> str:
    """What a user can do about an error of a file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files (ulimit -n)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make it writable"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP):
        return "restore it, or move away what is there instead"
    return "make room on that disk"


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the contents of the file at `path`, durably. Readers see the old or the new contents, never a mix.

    `mode`: 0o600 for settings and secrets, which only this user may read. On OSError the old file is intact and no temporary
    file is left.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's entries, durable. Creating or renaming a file changes its directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Lines(ABC):
    """Where records go, one JSON line each: a file (`JsonLines`), or a file of the hub. NaN and infinities become null."""

    @abstractmethod
    def write(self, record: Any) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


OpenLines = Callable[..., Lines]
"""Opens the file of records at a path, to append to it; with `empty=True`, after removing what is there."""


class JsonLines(Lines):
    """Writes records as JSON lines, each with one system call, so that readers only see complete lines.

    One writer per file; `size` is the file's. Opening an existing file appends to it and truncates a partial last line (its
    writer was killed). `empty`: see `OpenLines`.
    """

    def __init__(self, path: Path, *, empty: bool = False) -> None:
        if empty:
            path.unlink(missing_ok=True)
        self._encoder = msgspec.json.Encoder()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._truncate(_end_of_last_line(path))

    def write(self, record: Any) -> None:
        """Raises OSError if the record can't be written (disk full, file too large); no part of it is then in the file."""
        line = self._encoder.encode(record) + b"\n"
        try:
            done = os.write(self._fd, line)
            while done < len(line):  # A nearly full disk accepts a part; the next call raises.
                done += os.write(self._fd, line[done:])
        except BaseException:
            self._truncate(self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self.size = size


def _end_of_last_line(path: Path, block: int = 1 << 16) -> int:
    """Number of bytes up to and including the last newline of the file."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def shared_memory() -> int:
    """An open file descriptor of a new, empty file in memory without a name, to be inherited by the processes that share it.

    The memory is freed when the last process that has it exits or crashes.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pipelinerl-weights")  # not limited to the 64 MB that containers give /dev/shm
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
        return os.dup(file.fileno())


def reserve(fd: int, size: int) -> None:
    """Grow the file to `size` bytes and allocate their storage: without it, a write to mapped memory kills the process.

    Raises OSError if there is no room.
    """
    before = os.fstat(fd).st_size
    os.ftruncate(fd, size)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system can't reserve
            os.ftruncate(fd, before)
            raise

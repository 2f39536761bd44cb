"""Files that are whole or not there: atomic replacement, append-only logs, and records shared between processes.

Errors are plain `OSError` and `ValueError`: who calls knows what the file means to the user.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

T = TypeVar("T")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`, durably. Whoever opens it sees the old or the new contents, never a mix.

    Raises OSError; the old file is then intact and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable: creating, renaming and deleting files change the directory, not the file."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AppendFile:
    """An append-only file with one writer: each append is in the file as a whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._size = os.fstat(self._fd).st_size

    @property
    def size(self) -> int:
        return self._size

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def alone(self) -> bool:
        """Whether the file is as this writer left it."""
        return os.fstat(self._fd).st_size == self._size

    def append(self, data: bytes) -> None:
        """Raises OSError (disk full, file too large); the file is then as it was before."""
        try:
            done = os.write(self._fd, data)
            while done < len(data):  # A nearly full disk takes a part, and says why at the next call.
                done += os.write(self._fd, data[done:])
        except BaseException:
            self.truncate(self._size)
            raise
        self._size += len(data)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._size = size

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JsonLines:
    """Writes records as JSON, one a line, each with one system call, so that a reader at any time sees whole lines.

    One writer per file. Opening an existing file continues it; a torn last line (its writer was killed) is cut off.
    Floats that JSON does not have (NaN, infinities) become null.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._file.truncate(_end_of_last_line(path))
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Any) -> None:
        """Raises OSError when the record can't be written; no part of it is in the file then."""
        self._file.append(self._encoder.encode(record) + b"\n")

    def alone(self) -> bool:
        """Whether nobody else has written since; whoever has must be told apart from a torn line by opening it again."""
        return self._file.alone()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_json_lines(path: Path, record_type: type[T]) -> list[T]:
    """All whole lines of a file of JSON lines. A last line without its newline is being written, or torn: left out.

    Raises OSError, and ValueError naming file and line for one that is not a `record_type`.
    """
    decoder = msgspec.json.Decoder(record_type)
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                records.append(decoder.decode(line))
            except msgspec.DecodeError as error:  # ValidationError is one too
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


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


class SharedRecord:
    """One record in memory that processes share, which is replaced as a whole.

    Two slots, written in turn: the valid one with the higher sequence number counts. So a reader that comes in the middle
    of a write, or after the writer was killed in the middle of one, gets the record before it. One writer at a time
    (several if a lock takes care of that); readers need no lock.
    """

    _HEADER = struct.Struct("=QII")  # sequence (0 = never written), payload bytes, CRC-32 of sequence and payload
    _SEQUENCE = struct.Struct("=Q")
    _ATTEMPTS = 16

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        """`size` bytes at `offset` of `memory` are the record's; they are all zero before the first write."""
        self._memory = memory
        self._slots = (offset, offset + size // 2)
        self.capacity = size // 2 - self._HEADER.size

    def sequence(self) -> int:
        """How many times the record was written. About a microsecond; may run ahead of `read` during a write."""
        (first,) = self._SEQUENCE.unpack_from(self._memory, self._slots[0])
        (second,) = self._SEQUENCE.unpack_from(self._memory, self._slots[1])
        return int(first if first > second else second)

    def read(self) -> tuple[int, bytes] | None:
        """Sequence number and payload, or None if there is none (or writes came too fast to catch one whole)."""
        for _ in range(self._ATTEMPTS):
            headers = [(*self._HEADER.unpack_from(self._memory, slot), slot) for slot in self._slots]
            for sequence, length, checksum, slot in sorted(headers, reverse=True):
                if sequence == 0 or length > self.capacity:
                    continue
                start = slot + self._HEADER.size
                payload = self._memory[start : start + length]
                if _record_checksum(sequence, payload) == checksum:
                    return sequence, payload
            if not any(sequence for sequence, *_ in headers):
                return None
        return None

    def write(self, payload: bytes) -> int:
        """Replace the record; returns its sequence number. Raises ValueError if the payload is over `capacity`."""
        if len(payload) > self.capacity:
            raise ValueError(f"a record of {len(payload)} bytes does not fit into {self.capacity}")
        newest = self.read()
        sequence = (newest[0] if newest else 0) + 1
        slot = self._slots[sequence % 2]
        start = slot + self._HEADER.size
        self._memory[start : start + len(payload)] = payload
        self._HEADER.pack_into(self._memory, slot, sequence, len(payload), _record_checksum(sequence, payload))
        return sequence


def _record_checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, sequence & 0xFFFFFFFF)


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map the first `size` bytes of the file for reading and writing, in memory shared with all who map it.

    The file is created, or grown with zeros, as needed. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(fd).st_size < size:
            reserve(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def reserve(fd: int, size: int) -> None:
    """Grow the file to `size` bytes with storage behind them: writing to mapped memory without any kills the process.

    Raises OSError when there is no room.
    """
    before = os.fstat(fd).st_size
    os.ftruncate(fd, size)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # what file systems say that can't reserve
            os.ftruncate(fd, before)
            raise


# ------------------------------------------------------------------------------------------------------------------------
# A lock between processes that its holder's death releases.


LOCK_TIMEOUT_S = 30.0
"""The lock is held for microseconds. It stays held only if its holder is stopped (killed processes lose it)."""
_POLL_S = 0.0002


class FileLock:
    """An exclusive lock on a file, which is created as needed. Each `FileLock` excludes all others, in this process too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the others out. Raises TimeoutError if another holds it for too long. It can't be held twice."""
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"{self._path} has been locked for {LOCK_TIMEOUT_S:.0f} s: the process that holds it is stopped; "
                        "continue or end it"
                    ) from None
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

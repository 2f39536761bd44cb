"""State shared by the ends of a file stream, besides the items: counts, the log of dropped items, and the role locks."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipelinerl.errors import StreamError
from pipelinerl.files import AppendFile, FileLock, SharedRecord, map_file
from pipelinerl.interfaces import StreamStats


class Counts(NamedTuple):
    """`written`: offset of the next item to be written. `cursor`: offset of the next item to be taken or dropped.

    `taken` counts the items before `cursor` that were taken. All items before the offset `committed` are processed.
    The next item is written to the segment whose first offset is `segment`, after its first `size` bytes.
    """

    written: int = 0
    taken: int = 0
    cursor: int = 0
    committed: int = 0
    segment: int = 0
    size: int = 0


class DropLog:
    """Offsets of dropped items: 20 digits and a newline each, appended by the writers under the lock."""

    _ENTRY_BYTES = 21

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._offsets: set[int] = set()
        self._forgotten = 0
        self._file = AppendFile(path)
        self._fd = os.open(path, os.O_RDONLY)

    def refresh(self) -> None:
        """Read the entries added since the last call. A partial last entry is ignored: its item was not dropped."""
        known = self.count * self._ENTRY_BYTES
        new = os.fstat(self._fd).st_size - known
        if new >= self._ENTRY_BYTES:
            entries = os.pread(self._fd, new - new % self._ENTRY_BYTES, known).split()
            self._offsets.update(int(entry) for entry in entries)
            self.count += len(entries)

    def append(self, offset: int) -> None:
        """Record that an item was dropped. Requires the lock, and a `refresh` since it was acquired."""
        self._file.truncate(self.count * self._ENTRY_BYTES)  # cut a partial entry left by a killed writer
        self._file.append(b"%020d\n" % offset)
        self.refresh()

    def __contains__(self, offset: int) -> bool:
        """Whether the item was dropped. Valid only for offsets that are not forgotten."""
        return offset in self._offsets

    def before(self, offset: int) -> list[int]:
        """The dropped offsets before `offset`, ascending, without forgotten ones."""
        return sorted(dropped for dropped in self._offsets if dropped < offset)

    def count_before(self, offset: int) -> int:
        """How many items before `offset` were dropped, including forgotten ones. No offset >= `offset` may be forgotten."""
        return self.count - sum(1 for dropped in self._offsets if dropped >= offset)

    def forget_before(self, offset: int) -> None:
        """Remove offsets before `offset` from memory. Offsets before the committed one are never looked up."""
        if offset > self._forgotten:
            self._forgotten = offset
            self._offsets = {dropped for dropped in self._offsets if dropped >= offset}

    def close(self) -> None:
        self._file.close()
        os.close(self._fd)


class StreamState:
    """The shared state of one file stream, in `directory`. `load`, `store` and `drops` need the lock (`locked`).

    Taking items is a single write of the counts, dropping an item a single append to the log. So whenever a process is
    killed, each item is either taken, or dropped, or neither.
    """

    _COUNTS = struct.Struct("=6Q")
    _BYTES = 4096

    def __init__(self, directory: Path) -> None:
        self._path = directory / "counts"
        self._memory = map_file(self._path, self._BYTES)
        self._record = SharedRecord(self._memory, 0, self._BYTES)
        self._lock = FileLock(self._path)
        self.drops = DropLog(directory / "dropped")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, with the drop log refreshed. Raises StreamError if another process holds it for too long."""
        try:
            with self._lock.held():
                self.drops.refresh()
                yield
        except TimeoutError as error:
            raise StreamError(str(error)) from error

    def peek(self) -> Counts | None:
        """Recent counts, read without the lock. None if there are none yet, or they change too fast to be read."""
        newest = self._record.read()
        return Counts(*self._COUNTS.unpack(newest[1])) if newest else None

    def load(self) -> Counts:
        return self.peek() or Counts()

    def store(self, counts: Counts) -> None:
        self._record.write(self._COUNTS.pack(*counts))

    def stats(self) -> StreamStats:
        with self.locked():
            counts = self.load()
            return StreamStats(written=counts.written, taken=counts.taken, dropped=self.drops.count)

    def sync(self) -> None:
        """Sync the counts to disk."""
        self._memory.flush()

    def close(self) -> None:
        if not self._memory.closed:
            self._memory.close()
            self.drops.close()
            self._lock.close()


class Role:
    """A lock that makes this process the only writer, or the only reader, until `release` or the end of the process.

    With `shared`, other processes may hold it too, but none exclusively.
    """

    def __init__(self, directory: Path, role: str, *, shared: bool = False) -> None:
        self._fd = os.open(directory / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise StreamError(f"{directory} is open already, by another {role}: end the process that has it open") from None

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def ensure_directory(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    """Turn OSError into a StreamError that says what to do. `path` is named if the OSError names no file."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise StreamError(
            f"{place}: {error.strerror or error}. Make room on that disk (or make it writable), then resume the run"
        ) from error


def generation_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}"


def newest_generation(directory: Path) -> int:
    """The number of the current generation, a numbered folder with the stream's files. 0 if there is none yet.

    Each rewind creates the next generation.
    """
    return max((int(path.name) for path in directory.glob("[0-9]*") if path.name.isdecimal()), default=0)

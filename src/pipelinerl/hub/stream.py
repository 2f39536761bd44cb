"""The stream of encoded groups between stages, of which the hub has both ends: in a file that survives the launcher, or in
memory. `hub.redis` has the same in a Redis server.

The file is an SQLite database, which only this process has open. Groups are in `rollouts.jsonl` anyway, so their stream has
only their places there. The journal is a write-ahead log: an append is one write without a sync. A process that is killed
leaves the last complete transaction.
"""

from __future__ import annotations

import errno
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelinerl.errors import StreamError
from pipelinerl.files import remedy

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS items (number INTEGER PRIMARY KEY AUTOINCREMENT, json BLOB, place INTEGER, size INTEGER)"
)
"""The item of offset n has number n + 1. Numbers are not used again, whatever is deleted.

It is in `json`, or it has `size` bytes at `place` in the file of records.
"""
CACHED_BYTES = 64 << 20
"""Items that were appended and not read are also in memory, up to this size."""

_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


class GroupStream(ABC):
    """An ordered queue of encoded groups, numbered by offsets. It keeps what was read until that is committed.

    `waiting` is the number of groups that were not read, `left` the number of rollouts of each group that are left to train
    on. All methods may raise StreamError.
    """

    waiting = 0
    _cursor = 0  # the offset of the next group to read, or lower

    def __init__(self) -> None:
        self.left: dict[int, int] = {}

    @property
    def rollouts(self) -> int:
        """Rollouts of the groups that are waiting."""
        return sum(left for offset, left in self.left.items() if offset >= self._cursor)

    def count(self, left: Sequence[int]) -> None:
        """Note the rollouts that are `left` of the groups that are waiting already, in order."""
        self.left = dict(zip(self.offsets(), left, strict=True))

    def offsets(self) -> Sequence[int]:
        """The offsets of the waiting groups."""
        return [offset for offset, _ in self._entries(self._cursor)]

    def append(self, item: bytes, rollouts: int = 0, place: int | None = None) -> int:
        """Append a group. Returns its offset. `place`: where it begins in the run's file of records, if it is there."""
        offset = self._append(item, place)
        self.left[offset] = rollouts
        self.waiting += 1
        return offset

    def read(self, limit: int) -> Sequence[tuple[int, bytes]]:
        """Read up to `limit` of the waiting groups, oldest first, each with its offset."""
        if not self.waiting or not limit:
            return []
        found = self._entries(self._cursor, limit)
        if found:
            self._cursor = found[-1][0] + 1
        self.waiting -= len(found)
        return found

    def return_to(self, offset: int) -> None:
        """Groups from `offset` on are waiting again."""
        self._cursor = offset
        self.waiting = len(self.offsets())

    def drop(self) -> int:
        """Remove the oldest waiting group. Returns its number of rollouts."""
        ((offset, _),) = self._entries(self._cursor, 1)
        self._remove([offset])
        self.waiting -= 1
        return self.left.pop(offset)

    def commit(self, offset: int) -> None:
        """Forget everything before `offset`."""
        self.left = {number: left for number, left in self.left.items() if number >= offset}

    def keep(self, from_offset: int, wanted: Callable[[bytes], bool]) -> Sequence[bytes]:
        """For a resume: remove all groups before `from_offset`, and unwanted groups. Returns the others."""
        self.commit(from_offset)
        entries = self._entries(from_offset)
        kept = {offset: item for offset, item in entries if item and wanted(item)}  # a file of records may have lost its end
        self._remove([offset for offset, _ in entries if offset not in kept])
        self.return_to(0)
        return list(kept.values())

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    @abstractmethod
    def _append(self, item: bytes, place: int | None) -> int: ...

    @abstractmethod
    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        """The first groups from the offset `start` on."""

    @abstractmethod
    def _remove(self, offsets: Sequence[int]) -> None:
        """All of them or, if the process is killed meanwhile, none."""


class FileStream(GroupStream):
    """See `GroupStream`. All methods raise StreamError, which says what to do."""

    NAME = "stream.sqlite"

    def __init__(self, directory: Path | None = None, records: Path | None = None) -> None:
        """`directory`: None for a stream in memory. `records`: the file that has the items whose place is given."""
        super().__init__()
        self._path, self._records = directory / self.NAME if directory else Path(":memory:"), records
        self._cache: dict[int, bytes] = {}
        self._cached_bytes = 0
        with self._errors_explained():
            if directory:
                directory.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            with self._errors_explained():
                # Exclusive: no memory is shared through the file system, so that it may be one of a network.
                settings = ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=0")
                for setting in settings:
                    self._database.execute(f"PRAGMA {setting}").fetchall()
                self._database.execute(SCHEMA)
                self._database.execute("DELETE FROM items WHERE 0")  # takes the lock
                ((self.waiting, first),) = self._rows("SELECT count(*), min(number) FROM items")
        except BaseException:
            self._database.close()
            raise
        self._cursor = (first or 1) - 1

    def offsets(self) -> Sequence[int]:
        found = self._rows("SELECT number FROM items WHERE number > ? ORDER BY number", self._cursor)  # without the items
        return [number - 1 for (number,) in found]

    def _append(self, item: bytes, place: int | None) -> int:
        row = (item, None, None) if place is None or self._records is None else (None, place, len(item))
        with self._errors_explained():
            number = self._database.execute("INSERT INTO items (json, place, size) VALUES (?, ?, ?)", row).lastrowid
        assert number is not None  # noqa: S101 - a row was inserted
        if row[0] is None and self._cached_bytes + len(item) <= CACHED_BYTES:
            self._cache[number] = item
            self._cached_bytes += len(item)
        return number - 1

    def commit(self, offset: int) -> None:
        super().commit(offset)
        self._rows("DELETE FROM items WHERE number <= ?", offset)
        self._rows("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """The file is on the disk then."""
        with self._errors_explained():
            self._database.close()

    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        most = -1 if limit is None else limit
        rows = self._rows("SELECT * FROM items WHERE number > ? ORDER BY number LIMIT ?", start, most)
        return [(number - 1, self._item(number, json, place, size)) for number, json, place, size in rows]

    def _remove(self, offsets: Sequence[int]) -> None:
        with self._errors_explained(), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("DELETE FROM items WHERE number = ?", [(offset + 1,) for offset in offsets])

    def _item(self, number: int, json: bytes | None, place: int, size: int) -> bytes:
        if json is not None:
            return json
        if (cached := self._cache.pop(number, None)) is not None:
            self._cached_bytes -= len(cached)
            return cached
        assert self._records is not None  # noqa: S101 - it has the item
        with self._errors_explained(), self._records.open("rb") as file:
            file.seek(place)
            item = file.read(size + 1)
        return item[:-1] if item.endswith(b"\n") and len(item) == size + 1 else b""

    def _rows(self, query: str, *values: int) -> list[Any]:
        with self._errors_explained():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                raise StreamError(f"{self._path} is open already: end the process that has it open") from error
            failed = OSError(_ERRNO.get(code, errno.EIO), str(error), str(self._path))
            raise StreamError(f"{self._path}: {failed.strerror}; {remedy(failed)}, then resume the run") from failed
        except OSError as error:
            where = error.filename or self._path
            raise StreamError(f"{where}: {error.strerror or error}; {remedy(error)}, then resume the run") from error
        except sqlite3.DatabaseError as error:
            advice = "Restore it, or delete the stream's directory to go on without what was in it"
            raise StreamError(f"{self._path}: {error}. {advice}") from error

"""A stream between the processes of one machine, in a file that survives all of them.

    DIRECTORY/stream.sqlite                 items, counts, and the offsets of dropped items (see `SCHEMA`)
    DIRECTORY/writer.lock, reader.lock      held by the processes at each end

There may be several writers; items are stored in the order in which they were written. Every operation is one transaction,
so whenever a process is killed, each item is waiting, taken or dropped, and the counts say so. Processes wait for each
other only during a transaction.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from pipelinerl.database import DamagedDatabaseError, Database
from pipelinerl.errors import INVALID_DATA, StreamError
from pipelinerl.files import remedy
from pipelinerl.interfaces import StreamReader, StreamStats, StreamWriter
from pipelinerl.stream import checked_capacity

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS items (offset INTEGER PRIMARY KEY, json BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS drops (offset INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS counts (written INTEGER, taken INTEGER, dropped INTEGER, cursor INTEGER, committed INTEGER);
INSERT INTO counts SELECT 0, 0, 0, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM counts)
"""


class Counts(NamedTuple):
    """`written`: offset of the next item to be written. `cursor`: lowest offset of an item that may be waiting.

    `taken` and `dropped` count items. All items before the offset `committed` are processed; their JSON is deleted.
    """

    written: int
    taken: int
    dropped: int
    cursor: int
    committed: int

    @property
    def waiting(self) -> int:
        return self.written - self.taken - self.dropped


class StreamFile(Generic[T]):
    """What both ends of a stream use: its database, its counts, and this process's role."""

    NAME = "stream.sqlite"

    def __init__(self, directory: Path, item_type: type[T], role: str | None = None, *, shared: bool = False) -> None:
        self._directory = directory
        self._decoder = msgspec.json.Decoder(item_type)
        with self._errors_explained(), ExitStack() as opened:
            directory.mkdir(parents=True, exist_ok=True)
            if role is not None:
                opened.enter_context(role_held(directory, role, shared=shared))
            self._database = opened.enter_context(closing(Database(directory / self.NAME, SCHEMA)))
            self._opened = opened.pop_all()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self._errors_explained(), self._database.transaction() as connection:
            yield connection

    @contextmanager
    def durable(self) -> Iterator[None]:
        with self._errors_explained(), self._database.durable():
            yield

    def counts(self) -> Counts:
        with self._errors_explained():
            return Counts._make(self._database.rows("SELECT * FROM counts")[0])

    def store(self, stream: Connection, counts: Counts) -> None:
        stream.execute("UPDATE counts SET written = ?, taken = ?, dropped = ?, cursor = ?, committed = ?", counts)

    def waiting(self, cursor: int, limit: int) -> list[tuple[int, bytes]]:
        """Offset and JSON of the first items from `cursor` on; all of them if `limit` is -1."""
        with self._errors_explained():
            return self._database.rows("SELECT * FROM items WHERE offset >= ? ORDER BY offset LIMIT ?", cursor, limit)

    def decode(self, offset: int, json: bytes) -> T:
        """Raises StreamError if the JSON is not one of the stream's items."""
        try:
            return self._decoder.decode(json)
        except INVALID_DATA as error:
            raise StreamError(
                f"{self._directory}, item {offset}: not a record of this stream ({error}). The file was changed: restore "
                "it, or delete the stream's directory to go on without what was in it"
            ) from error

    def stats(self) -> StreamStats:
        counts = self.counts()
        return StreamStats(written=counts.written, taken=counts.taken, dropped=counts.dropped)

    def close(self) -> None:
        """Idempotent. SQLite syncs the database to disk when the last process closes it."""
        self._opened.close()

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn the errors of the disk and of the database into a StreamError that says what to do."""
        try:
            yield
        except TimeoutError as error:
            raise StreamError(str(error)) from error
        except OSError as error:
            where = error.filename or self._directory
            raise StreamError(f"{where}: {error.strerror or error}; {remedy(error)}, then resume the run") from error
        except DamagedDatabaseError as error:
            advice = "Restore it, or delete the stream's directory to go on without what was in it"
            raise StreamError(f"{error}. {advice}") from error


@contextmanager
def role_held(directory: Path, role: str, *, shared: bool = False) -> Iterator[None]:
    """Inside, a lock makes this process the only writer, or the only reader.

    With `shared`, other processes may hold it too, but none exclusively.
    """
    fd = os.open(directory / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise StreamError(f"{directory} is open already, by another {role}: end the process that has it open") from None
        yield
    finally:
        os.close(fd)


class FileStreamWriter(Generic[T]):
    """A writing end. There may be several; a new one continues where earlier ones stopped or were killed."""

    def __init__(
        self,
        directory: Path,
        item_type: type[T],
        *,
        capacity: int | None = None,
        when_full: Literal["block", "drop_oldest"] = "block",
        on_drop: Callable[[T], None] | None = None,
    ) -> None:
        """`capacity` is in items; None: no limit. `on_drop` is called with every item that `drop_oldest` drops.

        Raises StreamError if the stream is being rewound, is damaged, or can't be written.
        """
        self._capacity = checked_capacity(capacity)
        self._when_full = when_full
        self._on_drop = on_drop
        self._encoder = msgspec.json.Encoder()
        self._file = StreamFile(directory, item_type, "writer", shared=True)

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. Returns False, and writes nothing, if the stream is full and configured to block.

        `encoded`: the item as JSON, if the caller has already encoded it. Raises StreamError if the item can't be written;
        then the stream is unchanged, and the caller may try again.
        """
        if self._when_full == "block" and self._file.counts().waiting >= self._capacity:
            return False
        json = self._encoder.encode(item) if encoded is None else encoded
        dropped: list[T] = []
        with self._file.transaction() as stream:
            counts = self._file.counts()
            if self._when_full == "block" and counts.waiting >= self._capacity:
                return False
            while counts.waiting >= self._capacity:
                counts = self._drop_oldest(stream, counts, dropped)
            stream.execute("INSERT INTO items VALUES (?, ?)", (counts.written, json))
            self._file.store(stream, counts._replace(written=counts.written + 1))
        for oldest in dropped:
            if self._on_drop is not None:
                self._on_drop(oldest)
        return True

    def stats(self) -> StreamStats:
        return self._file.stats()

    def close(self) -> None:
        """Release the writer lock. May be called twice."""
        self._file.close()

    def _drop_oldest(self, stream: Connection, counts: Counts, dropped: list[T]) -> Counts:
        """Drop the oldest waiting item, and append it to `dropped` if there is an `on_drop`. Returns the new counts."""
        (offset, json), *_ = self._file.waiting(counts.cursor, 1)
        if self._on_drop is not None:
            dropped.append(self._file.decode(offset, json))
        stream.execute("DELETE FROM items WHERE offset = ?", (offset,))
        stream.execute("INSERT INTO drops VALUES (?)", (offset,))
        return counts._replace(dropped=counts.dropped + 1, cursor=offset + 1)


class FileStore:
    """Streams in subdirectories of `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def writer(
        self,
        name: str,
        item_type: type[T],
        *,
        capacity: int | None,
        when_full: Literal["block", "drop_oldest"],
        on_drop: Callable[[T], None] | None,
    ) -> StreamWriter[T]:
        return FileStreamWriter(self._directory / name, item_type, capacity=capacity, when_full=when_full, on_drop=on_drop)

    def reader(self, name: str, item_type: type[T]) -> StreamReader[T]:
        from pipelinerl.stream.file_reader import FileStreamReader  # noqa: PLC0415 - generation processes only write

        return FileStreamReader(StreamFile(self._directory / name, item_type, "reader"))

    def waiting(self, name: str, item_type: type[T]) -> list[T]:
        """The items that were written and neither taken nor dropped, oldest first. Empty if the stream does not exist.

        Does not take them. Raises StreamError for a damaged item.
        """
        if not (self._directory / name / StreamFile.NAME).exists():
            return []
        with closing(StreamFile(self._directory / name, item_type)) as file:
            return [file.decode(offset, json) for offset, json in file.waiting(file.counts().cursor, -1)]

    def rewind(self, name: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
        """`file_reader.rewind`, before either end is opened. Raises StreamError if one is."""
        from pipelinerl.stream.file_reader import rewind  # noqa: PLC0415 - as above

        directory = self._directory / name
        with closing(StreamFile(directory, item_type, "writer")) as file, role_held(directory, "reader"):
            return rewind(file, from_offset, keep)

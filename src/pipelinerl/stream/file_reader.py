"""The reading end of a stream in a file, and the rewinding of a stream to a checkpoint. See `files`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from pipelinerl.interfaces import StreamStats

if TYPE_CHECKING:
    from pipelinerl.stream.files import StreamFile

T = TypeVar("T")


class FileStreamReader(Generic[T]):
    """The reading end. One process at a time; a new one starts at the committed offset."""

    def __init__(self, file: StreamFile[T]) -> None:
        """`file` is open in the role `reader`. A writer is not required yet."""
        self._file = file
        with self._file.transaction() as stream:
            counts = self._file.counts()
            between = "SELECT count(*) FROM items WHERE offset >= ? AND offset < ?"
            ((again,),) = stream.execute(between, (counts.committed, counts.cursor))
            self._file.store(stream, counts._replace(cursor=counts.committed, taken=counts.taken - again))

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits.

        Raises StreamError for an item that is not of the stream's type.
        """
        if limit < 1 or not self._file.counts().waiting:
            return []
        with self._file.transaction() as stream:
            counts = self._file.counts()
            taken = self._file.waiting(counts.cursor, limit)
            if taken:
                self._file.store(stream, counts._replace(cursor=taken[-1][0] + 1, taken=counts.taken + len(taken)))
        return [(offset, self._file.decode(offset, json)) for offset, json in taken]

    def commit(self, offset: int) -> None:
        """Mark everything before `offset` as processed: a later reader starts there, and its disk space is reused.

        Durable on return. A lower offset than before has no effect. Raises ValueError if an item before `offset` was neither
        taken nor dropped, StreamError if the commit can't be made durable.
        """
        with self._file.durable(), self._file.transaction() as stream:
            counts = self._file.counts()
            waiting = self._file.waiting(counts.cursor, 1)
            reached = waiting[0][0] if waiting else counts.written
            if offset > reached:
                raise ValueError(f"can't commit up to offset {offset}: items from {reached} on were not taken yet")
            if offset > counts.committed:
                stream.execute("DELETE FROM items WHERE offset < ?", (offset,))
                self._file.store(stream, counts._replace(committed=offset, cursor=max(counts.cursor, offset)))

    def stats(self) -> StreamStats:
        return self._file.stats()

    def close(self) -> None:
        """Release the reader lock. Items that were taken and not committed will be read again."""
        self._file.close()


def rewind(file: StreamFile[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
    """Rewind the stream to a checkpoint. The caller holds both roles. Returns the items that stay, oldest first.

    Items before `from_offset`, dropped items, and those for which `keep` is false are removed. The others are renumbered
    without gaps: the first has offset `from_offset`, which becomes the committed offset. The counts continue as if every
    item before it had been taken or dropped. Atomic: if the process is killed, the stream is either unchanged or
    rewound. Raises StreamError if the file is damaged.
    """
    with file.durable(), file.transaction() as stream:
        stored = [(json, file.decode(offset, json)) for offset, json in file.waiting(from_offset, -1)]
        kept = [(json, item) for json, item in stored if keep(item)]
        ((earlier_drops,),) = stream.execute("SELECT count(*) FROM drops WHERE offset < ?", (from_offset,))
        stream.execute("DELETE FROM items")
        stream.execute("DELETE FROM drops WHERE offset >= ?", (from_offset,))
        numbered = ((offset, json) for offset, (json, _) in enumerate(kept, start=from_offset))
        stream.executemany("INSERT INTO items VALUES (?, ?)", numbered)
        counts = file.counts()._replace(
            written=from_offset + len(kept),
            taken=from_offset - earlier_drops,
            dropped=earlier_drops,
            cursor=from_offset,
            committed=from_offset,
        )
        file.store(stream, counts)
    return [item for _, item in kept]

"""A stream between processes, in files that survive both ends.

    DIRECTORY/writer.lock, reader.lock      held by the processes at each end
    DIRECTORY/000000/                       one generation; the highest number is current, `rewind` creates the next
        00000000000000000000.jsonl ...      segments: the items (see `segments`)
        counts, dropped                     how many items were written, taken, committed; which were dropped (see `state`)

A writer appends to the newest segment and then counts the item as written; the reader never reads beyond that count. There
may be several writers; items are stored in the order in which they were written. Processes wait for each other only at a
lock, which is held while an item is appended or the counts change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from pipelinerl.files import AppendFile
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream.segments import (
    LINE_OVERHEAD_BYTES,
    ItemReader,
    encode_line,
    list_segments,
    read_segment,
    segment_path,
)
from pipelinerl.stream.state import (
    Counts,
    Role,
    StreamState,
    disk_errors_explained,
    ensure_directory,
    generation_path,
    newest_generation,
)

T = TypeVar("T")


class FileStreamWriter(Generic[T]):
    """A writing end. There may be several; a new one continues where earlier ones stopped or were killed."""

    def __init__(
        self,
        directory: Path,
        item_type: type[T],
        *,
        capacity: int,
        when_full: Literal["block", "drop_oldest"] = "block",
        segment_bytes: int = 16 << 20,
        on_drop: Callable[[T], None] | None = None,
    ) -> None:
        """`capacity` is in items. `on_drop` is called with every item that `drop_oldest` drops.

        A partial last record (a process was killed, or the disk was full) is cut off. Raises StreamError if the stream is
        being rewound, is damaged elsewhere in its newest segment, or can't be written.
        """
        if capacity < 1:
            raise ValueError(f"a stream's capacity is at least 1: {capacity}")
        self._capacity = capacity
        self._when_full = when_full
        self._segment_bytes = segment_bytes
        self._on_drop = on_drop
        self._encoder = msgspec.json.Encoder()
        self._items = ItemReader(item_type)
        with disk_errors_explained(directory), ExitStack() as undo:
            self._role = Role(ensure_directory(directory), "writer", shared=True)
            undo.callback(self._role.release)
            self._directory = ensure_directory(generation_path(directory, newest_generation(directory)))
            self._state = StreamState(self._directory)
            undo.callback(self._state.close)
            self._first, self._segment = self._recover()
            undo.pop_all()

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. Returns False, and writes nothing, if the stream is full and configured to block.

        `encoded`: the item as JSON, if the caller has already encoded it. Raises StreamError if the item can't be written;
        then the stream is unchanged, and the caller may try again.
        """
        counts = self._state.peek()
        if self._when_full == "block" and counts is not None and self._is_full(counts):
            return False
        line = encode_line(self._encoder.encode(item) if encoded is None else encoded)
        dropped: list[T] = []
        try:
            with disk_errors_explained(self._segment.path), self._state.locked():
                counts = self._make_room(self._state.load(), dropped)
                if counts is None:
                    return False
                counts = self._open_newest_segment(counts)
                self._segment.append(line)
                self._state.store(counts._replace(written=counts.written + 1, size=self._segment.size))
        finally:
            for oldest in dropped:
                if self._on_drop is not None:
                    self._on_drop(oldest)
        return True

    def stats(self) -> StreamStats:
        return self._state.stats()

    def close(self) -> None:
        """Sync the items to disk and release the writer lock. May be called twice."""
        if self._segment.closed:
            return
        with disk_errors_explained(self._segment.path):
            self._segment.sync()
        self._segment.close()
        self._items.close()
        self._state.close()
        self._role.release()

    def _is_full(self, counts: Counts) -> bool:
        return counts.written - counts.taken - self._state.drops.count >= self._capacity

    def _make_room(self, counts: Counts, dropped: list[T]) -> Counts | None:
        """Drop the oldest items until there is room for one more. Returns the counts; None if the stream is full and blocks.

        Dropped items are appended to `dropped` if there is an `on_drop`.
        """
        while self._is_full(counts):
            if self._when_full == "block":
                return None
            oldest = counts.cursor
            while oldest in self._state.drops:
                oldest += 1
            if self._on_drop is not None:  # Read it under the lock: afterwards the reader may delete its file.
                dropped.append(self._items.item(self._directory, oldest))
            self._state.drops.append(oldest)
            counts = counts._replace(cursor=oldest + 1)
            self._state.store(counts)
        self._state.drops.forget_before(counts.committed)
        return counts

    def _open_newest_segment(self, counts: Counts) -> Counts:
        """Open the newest segment, or begin the next if it is full, and cut it to its counted size.

        Another writer may have begun the segment, or left a partial record in it when it was killed.
        """
        if counts.size >= self._segment_bytes:
            counts = counts._replace(segment=counts.written, size=0)
        if counts.segment != self._first:
            full, self._segment = self._segment, AppendFile(segment_path(self._directory, counts.segment))
            self._first = counts.segment
            full.sync()
            full.close()
        self._segment.truncate(counts.size)
        return counts

    def _recover(self) -> tuple[int, AppendFile]:
        """The first offset of the newest segment, and the segment, cut after its last complete record."""
        with self._state.locked():
            counts = self._state.load()
            segments = list_segments(self._directory)
            first = segments[-1] if segments else counts.committed
            path = segment_path(self._directory, first)
            payloads = read_segment(path, newest=True) if segments else ()
            lines = [len(payload) + LINE_OVERHEAD_BYTES for payload in payloads]
            written = first + len(lines)
            if written < counts.committed:  # A power failure lost records that were already committed.
                written = first = counts.committed
                lines = []
            segment = AppendFile(segment_path(self._directory, first))
            segment.truncate(sum(lines))
            cursor = min(counts.cursor, written)
            taken = min(counts.taken, cursor - self._state.drops.count_before(cursor))
            self._state.store(counts._replace(written=written, cursor=cursor, taken=taken, segment=first, size=sum(lines)))
        return first, segment


class FileStreamReader(Generic[T]):
    """The reading end. One process at a time; a new one starts at the committed offset."""

    def __init__(self, directory: Path, item_type: type[T]) -> None:
        """Raises StreamError if the stream already has a reader or can't be opened. A writer is not required yet."""
        self._items = ItemReader(item_type)
        with disk_errors_explained(directory), ExitStack() as undo:
            self._role = Role(ensure_directory(directory), "reader")
            undo.callback(self._role.release)
            self._directory = ensure_directory(generation_path(directory, newest_generation(directory)))
            self._state = StreamState(self._directory)
            undo.callback(self._state.close)
            with self._state.locked():
                counts = self._state.load()
                start = counts.committed
                taken = start - self._state.drops.count_before(start)
                self._state.store(counts._replace(cursor=start, taken=taken))
            undo.pop_all()

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits.

        Raises StreamError with file and line for a damaged item.
        """
        counts = self._state.peek()
        if counts is not None and counts.cursor >= counts.written:
            return []
        with self._state.locked():
            counts = self._state.load()
            offset = counts.cursor
            taken: list[int] = []
            while offset < counts.written and len(taken) < limit:
                if offset not in self._state.drops:
                    taken.append(offset)
                offset += 1
            self._state.store(counts._replace(cursor=offset, taken=counts.taken + len(taken)))
        with disk_errors_explained(self._directory):
            return [(offset, self._items.item(self._directory, offset)) for offset in taken]

    def commit(self, offset: int) -> None:
        """Mark everything before `offset` as processed: a later reader starts there, and disk space is reclaimed.

        Durable on return. A lower offset than before has no effect. Raises ValueError if an item before `offset` was neither
        taken nor dropped, StreamError if the commit can't be made durable.
        """
        with self._state.locked():
            counts = self._state.load()
            reached = counts.cursor
            while reached in self._state.drops:  # the cursor of a reopened reader may precede items dropped earlier
                reached += 1
            if offset > reached:
                raise ValueError(f"can't commit up to offset {offset}: items from {reached} on were not taken yet")
            if offset <= counts.committed:
                return
            self._state.store(counts._replace(committed=offset, cursor=max(counts.cursor, offset)))
            self._state.drops.forget_before(offset)
        with disk_errors_explained(self._directory):
            self._state.sync()
            segments = list_segments(self._directory)
            for first, following in pairwise(segments):
                if following <= offset:
                    segment_path(self._directory, first).unlink()

    def stats(self) -> StreamStats:
        return self._state.stats()

    def close(self) -> None:
        """Release the reader lock. Items that were taken and not committed will be read again."""
        self._items.close()
        self._state.close()
        self._role.release()

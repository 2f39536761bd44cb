"""A stream between processes, in files that survive both of them.

    DIRECTORY/writer.lock, reader.lock      held by the processes at each end
    DIRECTORY/000000/                       the newest number counts; `rewind` makes the next
        00000000000000000000.jsonl ...      segments: the items (see `segments`)
        counts, dropped                     what was written, taken, committed and dropped (see `state`)

A writer appends to the newest segment and then counts the item as written; the reader looks at nothing beyond that
count. There may be several writers: their items are in the order in which they were written. Nobody waits for another,
except for a lock that is held while an item is appended or a few numbers change.
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
from pipelinerl.stream.state import Counts, Role, StreamState, explained, generation_path, made, newest_generation

T = TypeVar("T")


class FileStreamWriter(Generic[T]):
    """A writing end. There may be several; a later one continues where the others stopped or were killed."""

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
        """`capacity` is in items; `on_drop` is told every item that `drop_oldest` drops.

        A torn last record (a process was killed, or the disk was full) is cut off. Raises StreamError if the stream is
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
        with explained(directory), ExitStack() as undo:
            self._role = Role(made(directory), "writer", shared=True)
            undo.callback(self._role.release)
            self._directory = made(generation_path(directory, newest_generation(directory)))
            self._state = StreamState(self._directory)
            undo.callback(self._state.close)
            self._first, self._segment = self._recover()
            undo.pop_all()

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. False when the stream is full and set to block (nothing was written then).

        `encoded`: the item as JSON, if the caller has it already. Raises StreamError when the item can't be written; nothing
        of it is there then, and writing may be tried again.
        """
        counts = self._state.peek()
        if self._when_full == "block" and counts is not None and self._is_full(counts):
            return False
        line = encode_line(self._encoder.encode(item) if encoded is None else encoded)
        dropped: list[T] = []
        try:
            with explained(self._segment.path), self._state.locked():
                counts = self._make_room(self._state.load(), dropped)
                if counts is None:
                    return False
                counts = self._turn_to(counts)
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
        """Make what was written durable and let another process write. Closing twice is fine."""
        if self._segment.closed:
            return
        with explained(self._segment.path):
            self._segment.sync()
        self._segment.close()
        self._items.close()
        self._state.close()
        self._role.release()

    def _is_full(self, counts: Counts) -> bool:
        return counts.written - counts.taken - self._state.drops.count >= self._capacity

    def _make_room(self, counts: Counts, dropped: list[T]) -> Counts | None:
        """The counts, with room for one more, and what was dropped for that; None if the stream is full and blocks."""
        while self._is_full(counts):
            if self._when_full == "block":
                return None
            oldest = counts.cursor
            while oldest in self._state.drops:
                oldest += 1
            if self._on_drop is not None:  # Now: without the lock, its file may be dealt with and deleted.
                dropped.append(self._items.item(self._directory, oldest))
            self._state.drops.append(oldest)
            counts = counts._replace(cursor=oldest + 1)
            self._state.store(counts)
        self._state.drops.forget_before(counts.committed)
        return counts

    def _turn_to(self, counts: Counts) -> Counts:
        """Have the newest segment open, as it was counted: another writer may have begun it, or torn it in its death."""
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
        """The newest segment, cut behind its last whole record, and its first offset."""
        with self._state.locked():
            counts = self._state.load()
            segments = list_segments(self._directory)
            first = segments[-1] if segments else counts.committed
            path = segment_path(self._directory, first)
            payloads = read_segment(path, newest=True) if segments else ()
            lines = [len(payload) + LINE_OVERHEAD_BYTES for payload in payloads]
            written = first + len(lines)
            if written < counts.committed:  # The machine lost power and with it records that were dealt with long ago.
                written = first = counts.committed
                lines = []
            segment = AppendFile(segment_path(self._directory, first))
            segment.truncate(sum(lines))
            cursor = min(counts.cursor, written)
            taken = min(counts.taken, cursor - self._state.drops.count_before(cursor))
            self._state.store(counts._replace(written=written, cursor=cursor, taken=taken, segment=first, size=sum(lines)))
        return first, segment


class FileStreamReader(Generic[T]):
    """The reading end. One process at a time; a later one starts again at the committed offset."""

    def __init__(self, directory: Path, item_type: type[T]) -> None:
        """Raises StreamError if the stream has a reader, or can't be opened. There need not be a writer yet."""
        self._items = ItemReader(item_type)
        with explained(directory), ExitStack() as undo:
            self._role = Role(made(directory), "reader")
            undo.callback(self._role.release)
            self._directory = made(generation_path(directory, newest_generation(directory)))
            self._state = StreamState(self._directory)
            undo.callback(self._state.close)
            with self._state.locked():
                counts = self._state.load()
                start = counts.committed
                taken = start - self._state.drops.count_before(start)
                self._state.store(counts._replace(cursor=start, taken=taken))
            undo.pop_all()

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` items that are there now, oldest first, each with its offset. Never waits for any.

        Raises StreamError, naming file and line, for a damaged item.
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
        with explained(self._directory):
            return [(offset, self._items.item(self._directory, offset)) for offset in taken]

    def commit(self, offset: int) -> None:
        """Everything before `offset` is dealt with for good: a reader opened later starts there, disk is reclaimed.

        Durable on return. Committing less than before changes nothing. Raises ValueError if an item before `offset` was
        neither taken nor dropped, StreamError if it can't be made durable.
        """
        with self._state.locked():
            counts = self._state.load()
            reached = counts.cursor
            while reached in self._state.drops:  # a reader that was opened anew is not past what was dropped before
                reached += 1
            if offset > reached:
                raise ValueError(f"can't commit up to offset {offset}: items from {reached} on were not taken yet")
            if offset <= counts.committed:
                return
            self._state.store(counts._replace(committed=offset, cursor=max(counts.cursor, offset)))
            self._state.drops.forget_before(offset)
        with explained(self._directory):
            self._state.sync()
            segments = list_segments(self._directory)
            for first, following in pairwise(segments):
                if following <= offset:
                    segment_path(self._directory, first).unlink()

    def stats(self) -> StreamStats:
        return self._state.stats()

    def close(self) -> None:
        """Let another process read. What was taken and not committed will be read again."""
        self._items.close()
        self._state.close()
        self._role.release()

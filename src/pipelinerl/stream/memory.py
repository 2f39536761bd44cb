"""A stream within one process, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from pipelinerl.interfaces import StreamStats
from pipelinerl.stream import checked_capacity

T = TypeVar("T")


class _Shared(Generic[T]):
    """The state that both ends of a memory stream share."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, T]] = deque()
        self.written = 0
        self.taken = 0
        self.dropped = 0

    def stats(self) -> StreamStats:
        return StreamStats(self.written, self.taken, self.dropped)


class MemoryStreamWriter(Generic[T]):
    def __init__(
        self,
        shared: _Shared[T],
        capacity: int,
        when_full: Literal["block", "drop_oldest"],
        on_drop: Callable[[T], None] | None,
    ) -> None:
        self._shared = shared
        self._capacity = capacity
        self._when_full = when_full
        self._on_drop = on_drop

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. Returns False, and writes nothing, if the stream is full and configured to block."""
        del encoded  # nothing is encoded here
        shared = self._shared
        while len(shared.pending) >= self._capacity:
            if self._when_full == "block":
                return False
            _, oldest = shared.pending.popleft()
            shared.dropped += 1
            if self._on_drop is not None:
                self._on_drop(oldest)
        shared.pending.append((shared.written, item))
        shared.written += 1
        return True

    def stats(self) -> StreamStats:
        return self._shared.stats()

    def close(self) -> None:
        """Releases nothing: the items in the stream can still be read."""


class MemoryStreamReader(Generic[T]):
    def __init__(self, shared: _Shared[T]) -> None:
        self._shared = shared

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits."""
        pending = self._shared.pending
        items = [pending.popleft() for _ in range(min(limit, len(pending)))]
        self._shared.taken += len(items)
        return items

    def commit(self, offset: int) -> None:
        """Only checks. Raises ValueError if an item before `offset` was neither taken nor dropped."""
        shared = self._shared
        end = shared.pending[0][0] if shared.pending else shared.written
        if offset > end:
            raise ValueError(f"can't commit up to offset {offset}: items from {end} on were not taken yet")

    def stats(self) -> StreamStats:
        return self._shared.stats()

    def close(self) -> None:
        """Releases nothing."""


def memory_stream(
    *,
    capacity: int | None = None,
    when_full: Literal["block", "drop_oldest"] = "block",
    on_drop: Callable[[T], None] | None = None,
) -> tuple[MemoryStreamWriter[T], MemoryStreamReader[T]]:
    """The two ends of a new stream. `capacity` is in items; None: no limit. `on_drop` is called with every item that
    `drop_oldest` drops.

    Items are not copied, so they must be immutable, as everything in `types` is.
    """
    shared: _Shared[T] = _Shared()
    return MemoryStreamWriter(shared, checked_capacity(capacity), when_full, on_drop), MemoryStreamReader(shared)

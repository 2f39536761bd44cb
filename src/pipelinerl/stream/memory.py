"""A stream within one process, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from pipelinerl.interfaces import StreamStats
from pipelinerl.stream import checked_capacity

T = TypeVar("T")


class MemoryStream(Generic[T]):
    """Both ends of a stream. Items are not copied, so they must be immutable, as everything in `types` is."""

    def __init__(
        self,
        *,
        capacity: int | None = None,
        when_full: Literal["block", "drop_oldest"] = "block",
        on_drop: Callable[[T], None] | None = None,
    ) -> None:
        """`capacity` is in items; None: no limit. `on_drop` is called with every item that `drop_oldest` drops."""
        self._capacity = checked_capacity(capacity)
        self._when_full = when_full
        self._on_drop = on_drop
        self._pending: deque[tuple[int, T]] = deque()
        self._written = 0
        self._taken = 0
        self._dropped = 0

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. Returns False, and writes nothing, if the stream is full and configured to block."""
        del encoded  # nothing is encoded here
        while len(self._pending) >= self._capacity:
            if self._when_full == "block":
                return False
            _, oldest = self._pending.popleft()
            self._dropped += 1
            if self._on_drop is not None:
                self._on_drop(oldest)
        self._pending.append((self._written, item))
        self._written += 1
        return True

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits."""
        items = [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
        self._taken += len(items)
        return items

    def commit(self, offset: int) -> None:
        """Only checks. Raises ValueError if an item before `offset` was neither taken nor dropped."""
        end = self._pending[0][0] if self._pending else self._written
        if offset > end:
            raise ValueError(f"can't commit up to offset {offset}: items from {end} on were not taken yet")

    def stats(self) -> StreamStats:
        return StreamStats(self._written, self._taken, self._dropped)

    def close(self) -> None:
        """Releases nothing: the items in the stream can still be read."""

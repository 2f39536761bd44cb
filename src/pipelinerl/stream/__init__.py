"""Streams: ordered queues of encoded groups between stages. The hub has both ends.

files     in the run directory, so that a resumed run finds what was not trained on, or in memory
redis     the same in a Redis server
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


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
        self._remove(offset)
        self.waiting -= 1
        return self.left.pop(offset)

    def commit(self, offset: int) -> None:
        """Forget everything before `offset`."""
        self._commit(offset)
        self.left = {number: left for number, left in self.left.items() if number >= offset}

    @abstractmethod
    def keep(self, from_offset: int, wanted: Callable[[bytes], bool]) -> Sequence[bytes]:
        """For a resume: remove all groups before `from_offset`, and unwanted groups. Returns the others."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    @abstractmethod
    def _append(self, item: bytes, place: int | None) -> int: ...

    @abstractmethod
    def _commit(self, offset: int) -> None: ...

    @abstractmethod
    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        """The first groups from the offset `start` on."""

    @abstractmethod
    def _remove(self, offset: int) -> None: ...

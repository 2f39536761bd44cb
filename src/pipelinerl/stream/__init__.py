"""Streams: ordered queues of encoded items between stages. The hub has both ends.

memory    within the launcher's process
files     in the run directory, so that a resumed run finds what was not trained on
redis     the same in a Redis server
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class CursorStream(ABC):
    """What all kinds of stream do alike: which items were read. See `interfaces.Stream`."""

    waiting = 0
    _cursor = 0  # the offset of the next item to read, or lower

    def offsets(self) -> Sequence[int]:
        return [offset for offset, _ in self._entries(self._cursor)]

    def read(self, limit: int) -> Sequence[tuple[int, bytes]]:
        if not self.waiting:
            return []
        found = self._entries(self._cursor, limit)
        if found:
            self._cursor = found[-1][0] + 1
        self.waiting -= len(found)
        return found

    def return_to(self, offset: int) -> None:
        self._cursor = offset
        self.waiting = len(self.offsets())

    def drop(self) -> int:
        ((offset, _),) = self._entries(self._cursor, 1)
        self._remove(offset)
        self.waiting -= 1
        return offset

    @abstractmethod
    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        """The first items from the offset `start` on."""

    @abstractmethod
    def _remove(self, offset: int) -> None: ...

"""A stream in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class MemoryStream:
    """See `interfaces.Stream`."""

    def __init__(self) -> None:
        self._items: dict[int, bytes] = {}
        self._cursor = self._written = self.waiting = 0

    def offsets(self) -> Sequence[int]:
        return [offset for offset in self._items if offset >= self._cursor]

    def append(self, item: bytes, place: int | None = None) -> int:
        del place
        self._items[self._written] = item
        self._written += 1
        self.waiting += 1
        return self._written - 1

    def read(self, limit: int) -> Sequence[tuple[int, bytes]]:
        if not self.waiting:
            return []
        found = [(offset, self._items[offset]) for offset in self.offsets()[:limit]]
        if found:
            self._cursor = found[-1][0] + 1
        self.waiting -= len(found)
        return found

    def return_to(self, offset: int) -> None:
        self._cursor = offset
        self.waiting = len(self.offsets())

    def drop(self) -> int:
        offset = self.offsets()[0]
        del self._items[offset]
        self.waiting -= 1
        return offset

    def commit(self, offset: int) -> None:
        self._items = {number: item for number, item in self._items.items() if number >= offset}

    def keep(self, from_offset: int, wanted: Callable[[bytes], bool]) -> Sequence[bytes]:
        self._items = {n: item for n, item in self._items.items() if n >= from_offset and wanted(item)}
        self.return_to(0)
        return list(self._items.values())

    def close(self) -> None:
        """The items end with the process."""

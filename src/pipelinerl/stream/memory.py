"""A stream in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from pipelinerl.stream import GroupStream


class MemoryStream(GroupStream):
    """See `GroupStream`."""

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, bytes] = {}
        self._written = 0

    def _append(self, item: bytes, place: int | None) -> int:  # noqa: ARG002 - it is in no file
        self._items[self._written] = item
        self._written += 1
        return self._written - 1

    def _commit(self, offset: int) -> None:
        self._items = {number: item for number, item in self._items.items() if number >= offset}

    def keep(self, from_offset: int, wanted: Callable[[bytes], bool]) -> Sequence[bytes]:
        self._items = {n: item for n, item in self._items.items() if n >= from_offset and wanted(item)}
        self.return_to(0)
        return list(self._items.values())

    def close(self) -> None:
        """The items end with the process."""

    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        return list(islice((entry for entry in self._items.items() if entry[0] >= start), limit))

    def _remove(self, offset: int) -> None:
        del self._items[offset]

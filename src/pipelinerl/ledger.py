"""A compact set of the group indices that were processed: nearly all of 0 .. n."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class LedgerRecord(msgspec.Struct, frozen=True):
    """A ledger as a checkpoint stores it: all indices under `below`, and `extras` (ascending, all above `below`)."""

    below: int = 0
    extras: tuple[int, ...] = ()


class GroupLedger:
    """A set of group indices (0, 1, 2, ...) that only grows.

    Groups finish nearly in the order in which they were started, so all but the last few are below a low-water mark.
    """

    def __init__(self, indices: Iterable[int] = ()) -> None:
        self._below = 0
        self._extras: set[int] = set()
        for index in indices:
            self.add(index)

    def add(self, index: int) -> None:
        """Idempotent. Raises ValueError for a negative index."""
        if index < 0:
            raise ValueError(f"a group index can't be negative: {index}")
        if index < self._below:
            return
        self._extras.add(index)
        while self._below in self._extras:
            self._extras.remove(self._below)
            self._below += 1

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self._below or index in self._extras

    def __len__(self) -> int:
        return self._below + len(self._extras)

    def missing_from(self, start: int = 0) -> Iterator[int]:
        """Endless ascending indices >= start (and >= 0) that are not in the ledger at the time they are yielded."""
        index = max(start, 0)
        while True:
            index = max(index, self._below)
            if index not in self._extras:
                yield index
            index += 1

    def to_record(self) -> LedgerRecord:
        return LedgerRecord(self._below, tuple(sorted(self._extras)))

    @classmethod
    def from_record(cls, record: LedgerRecord) -> GroupLedger:
        """Raises ValueError for an inconsistent record."""
        if record.below < 0 or any(index <= record.below for index in record.extras):
            raise ValueError(f"not a ledger: below {record.below}, extras {list(record.extras)[:10]}")
        ledger = cls()
        ledger._below = record.below
        ledger._extras = set(record.extras)
        return ledger

"""Which group indices have been dealt with: a set of numbers that is nearly all of 0 .. n, kept in little space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class LedgerRecord(msgspec.Struct, frozen=True):
    """A ledger as a checkpoint stores it: every index under `below`, and those of `extras` (ascending, all above it)."""

    below: int = 0
    extras: tuple[int, ...] = ()


class GroupLedger:
    """A set of group indices (0, 1, 2, ...) that only grows.

    Groups finish nearly in the order in which they were started, so all but the last few are under a low-water mark.
    """

    def __init__(self, indices: Iterable[int] = ()) -> None:
        self._below = 0
        self._extras: set[int] = set()
        for index in indices:
            self.add(index)

    def add(self, index: int) -> None:
        """Adding an index again changes nothing. Raises ValueError for a negative one."""
        if index < 0:
            raise ValueError(f"a group index is not negative: {index}")
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
        """The indices >= start (and >= 0) that are not in the ledger when their turn comes, ascending, without end."""
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
        """Raises ValueError for a record that no ledger writes."""
        if record.below < 0 or any(index <= record.below for index in record.extras):
            raise ValueError(f"not a ledger: below {record.below}, extras {list(record.extras)[:10]}")
        ledger = cls()
        ledger._below = record.below
        ledger._extras = set(record.extras)
        return ledger

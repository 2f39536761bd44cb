"""A compact set of the group indices that were processed: nearly all of 0 .. n."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class GroupLedger(msgspec.Struct):
    """A set of group indices (0, 1, 2, ...) that only grows: all under `below`, and `extras`, which are above it.

    Groups finish nearly in the order in which they were started, so `extras` are few. A ledger is stored as it is.
    """

    below: int = 0
    extras: set[int] = set()

    def __post_init__(self) -> None:
        if self.below < 0 or any(index <= self.below for index in self.extras):
            raise ValueError(f"not a ledger: below {self.below}, extras {sorted(self.extras)[:10]}")

    def copy(self) -> GroupLedger:
        return GroupLedger(self.below, set(self.extras))

    def add(self, index: int) -> None:
        """Idempotent. Raises ValueError for a negative index."""
        if index < 0:
            raise ValueError(f"a group index can't be negative: {index}")
        if index < self.below:
            return
        self.extras.add(index)
        while self.below in self.extras:
            self.extras.remove(self.below)
            self.below += 1

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.below or index in self.extras

    def missing_from(self, start: int = 0) -> Iterator[int]:
        """Endless ascending indices >= start (and >= 0) that are not in the ledger at the time they are yielded."""
        index = max(start, 0)
        while True:
            index = max(index, self.below)
            if index not in self.extras:
                yield index
            index += 1

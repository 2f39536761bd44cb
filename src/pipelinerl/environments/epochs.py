"""A finite set of problems as an endless stream: every one once an epoch."""

from __future__ import annotations

import random
from functools import lru_cache


class Epochs:
    """Which of `size` problems is number `index` of the stream: a function of `name` (with the seed in it) and index."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def place(self, index: int) -> int:
        epoch, place = divmod(index, self._size)
        return self._order(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        random.Random(f"{self._name}/{epoch}").shuffle(order)
        return order

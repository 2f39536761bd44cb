"""Packing samples into micro-batches of a token budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths` (tokens), each with at most `budget` tokens; every index is in exactly one bin.

    A sample longer than the budget gets a bin of its own. Best-fit decreasing: the longest sample first, each into the
    fullest bin that has room, the earliest such bin among equals. Any two bins hold more than one budget between them, so
    there are never twice as many bins as the tokens need; O(n log n) comparisons. The result depends only on the
    arguments. Indices ascend within a bin, bins are ordered by their first index.

    Raises ValueError for a length or budget below 1.
    """
    if budget < 1 or min(lengths, default=1) < 1:
        raise ValueError(f"can't pack: lengths must be at least 1, and so must the budget ({budget})")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(room, (length, 0))
        if at < len(room):
            free, chosen = room.pop(at)
        else:
            free, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        if free > length:
            insort(room, (free - length, chosen))
    return sorted(sorted(indices) for indices in bins)

"""Where each sequence lives in the KV cache: rows sorted into classes by length.

A decode step attends, for each class, to as many positions as its longest sequence has. Without classes one long sequence
would make all others pay for its length; with them, a class costs one more attention call a layer. Sequences are moved so
that decoding rows are always `0..R-1`, longest class first, followed by the rows of prompts still being processed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelinerl.engine.attention import RowClass
from pipelinerl.engine.sequence import Sequence

# Attention lengths are rounded up to this, so that shapes repeat from step to step.
_ROUND = 16


def class_limits(max_length: int, smallest: int = 32) -> tuple[int, ...]:
    """Doubling class lengths up to `max_length`: 32, 64, 128, ..."""
    limits = []
    length = smallest
    while length < max_length:
        limits.append(length)
        length *= 2
    return (*limits, max_length)


@dataclass(frozen=True)
class Moves:
    """Row contents to copy, all at once: `sources[i]` to `targets[i]`; `length` positions are enough for all."""

    sources: list[int]
    targets: list[int]
    length: int


class RowTable:
    """Assigns rows and keeps per-row state that a decode step needs as arrays.

    `positions` is where the row's next token goes, `last` that token, `counts` how many tokens were sampled, `keys` the
    request's randomness; `temperature`, `top_p`, `top_k` its sampling parameters.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        self.capacity = rows
        self._limits = class_limits(max_length)
        self._integers: npt.NDArray[np.int64] = np.zeros((4, rows), dtype=np.int64)
        self._reals: npt.NDArray[np.float32] = np.zeros((2, rows), dtype=np.float32)
        self.keys: npt.NDArray[np.uint64] = np.zeros(rows, dtype=np.uint64)
        self.positions, self.last, self.counts, self.top_k = self._integers
        self.temperature, self.top_p = self._reals
        self.decoding: list[Sequence] = []
        self._regions: list[tuple[int, int, int]] = []

    def place(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> Moves:
        """Give every sequence its row. Sequences stay where they are unless their region moved from under them."""
        by_class: list[list[Sequence]] = [[] for _ in self._limits]
        for sequence in decoding:
            needed = sequence.cached + 1
            by_class[next(i for i, limit in enumerate(self._limits) if limit >= needed)].append(sequence)
        sources: list[int] = []
        targets: list[int] = []
        length = 0
        self._regions = []
        self.decoding = []
        start = 0
        for limit, members in [*reversed(list(zip(self._limits, by_class, strict=True))), (0, list(prefilling))]:
            if not members:
                continue
            end = start + len(members)
            ordered: list[Sequence | None] = [None] * len(members)
            homeless = []
            for sequence in members:
                if start <= sequence.row < end:
                    ordered[sequence.row - start] = sequence
                else:
                    homeless.append(sequence)
            for offset, holder in enumerate(ordered):
                if holder is None:
                    sequence = homeless.pop()
                    if sequence.row >= 0:
                        sources.append(sequence.row)
                        targets.append(start + offset)
                        length = max(length, sequence.cached if limit else len(sequence.request.prompt_ids))
                    sequence.row = start + offset
                    ordered[offset] = sequence
            if limit:
                self._regions.append((start, end, limit))
                self.decoding += [sequence for sequence in ordered if sequence is not None]
            start = end
        if sources:
            self._integers[:, targets] = self._integers[:, sources]
            self._reals[:, targets] = self._reals[:, sources]
            self.keys[targets] = self.keys[sources]
        return Moves(sources, targets, length)

    def admit(self, sequence: Sequence) -> None:
        """Fill in the state of a sequence that was just given a row for the first time."""
        row, sampling = sequence.row, sequence.request.sampling
        self._integers[:, row] = (len(sequence.request.prompt_ids), 0, 0, sampling.top_k)
        self._reals[:, row] = (sampling.temperature, sampling.top_p)
        self.keys[row] = sequence.key

    def outgrown(self) -> bool:
        """Has a sequence grown beyond the length of its class?"""
        return any(int(self.positions[start:end].max()) >= limit for start, end, limit in self._regions)

    def classes(self) -> tuple[RowClass, ...]:
        """The decoding rows by class, each with the attention length that this step needs."""
        classes = []
        for start, end, limit in self._regions:
            needed = int(self.positions[start:end].max()) + 1
            classes.append(RowClass(start, end, min(limit, -(-needed // _ROUND) * _ROUND)))
        return tuple(classes)

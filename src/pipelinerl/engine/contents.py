"""What the rows of the KV cache hold, so that a request continues from the longest beginning of its prompt that is there.

    row in use       its sequence's prompt, from the first sampled token on
    released row     the whole sequence but its last token, until another sequence gets the row

Keys and values of released rows stay while there are free rows; the least recently used row is given away first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.engine.sampler import Ints
from pipelinerl.types import VersionSpan

SHORTEST = 16
"""Fewer tokens are computed again, which takes no longer than copying their keys and values."""


class Prefix(NamedTuple):
    """The first `length` positions of `row` are the beginning of a prompt. `versions`: of the weights that computed them."""

    row: int
    length: int
    versions: tuple[VersionSpan, ...]


NO_PREFIX = Prefix(-1, 0, ())


class Contents:
    """Arrays with one entry per row.

    ids          the tokens of its positions [rows, max_length]
    known        how many positions hold keys and values of these tokens, and may be read; 0: none
    oldest       version of the weights that computed the first one
    used_at      when the row was released; later ones are larger
    """

    def __init__(self, rows: int, max_length: int) -> None:
        self.ids: npt.NDArray[np.int32] = np.zeros((rows, max_length), dtype=np.int32)
        self._integers: Ints = np.zeros((3, rows), dtype=np.int64)
        self.known, self.oldest, self.used_at = self._integers
        self._versions: list[tuple[VersionSpan, ...]] = [()] * rows
        self._clock = 0

    def hold(self, row: int, ids: Seq[int], versions: tuple[VersionSpan, ...]) -> None:
        """The row holds `ids`, computed by the weights of `versions`."""
        self.ids[row, : len(ids)] = ids
        self.known[row], self.oldest[row], self._versions[row] = len(ids), versions[0].version, versions
        self._clock += 1
        self.used_at[row] = self._clock

    def forget(self, rows: Ints | int) -> None:
        self.known[rows] = self.used_at[rows] = 0

    def recomputed(self, free: Ints, version: int) -> None:
        """All keys and values are of `version` now, but for those of the `free` rows, which are out of date."""
        self.forget(free)
        self.oldest[:] = version
        self._versions = [(VersionSpan(version, 0, known),) for known in self.known.tolist()]

    def longest(self, ids: Seq[int], oldest: int, whole: Ints | None) -> Prefix | None:
        """The longest beginning of `ids` in a row whose entries are all of version `oldest` or later; of these the newest.

        `whole`: only these rows may be read, and none in part, as they hold recurrent states after their last token.
        """
        fits = (self.known >= SHORTEST) & (self.oldest >= oldest)
        if len(ids) < SHORTEST or not fits.any():
            return None
        rows = np.flatnonzero(fits)
        if whole is not None:
            rows = np.intersect1d(rows[self.known[rows] <= len(ids)], whole)
        wanted = np.array(ids, dtype=np.int32)
        rows = rows[(self.ids[rows, :SHORTEST] == wanted[:SHORTEST]).all(1)]
        if not len(rows):
            return None
        differs = self.ids[rows, : len(wanted)] != wanted
        lengths = np.minimum(np.where(differs.any(1), differs.argmax(1), len(wanted)), self.known[rows])
        if whole is not None:
            lengths[lengths < self.known[rows]] = 0
        best = int(np.lexsort((self.oldest[rows], lengths))[-1])
        row, length = int(rows[best]), int(lengths[best])
        versions = tuple(
            VersionSpan(span.version, span.start, min(span.end, length))
            for span in self._versions[row]
            if span.start < length
        )
        return Prefix(row, length, versions) if length else None

    def rearrange(self, rows: Ints, origins: Ints) -> None:
        """Row `rows[i]` gets what row `origins[i]` had, as if all at once."""
        length = int(self.known[origins].max(initial=0))
        self.ids[rows, :length] = self.ids[origins, :length]
        self._integers[:, rows] = self._integers[:, origins]
        had = [self._versions[origin] for origin in origins.tolist()]
        for row, versions in zip(rows.tolist(), had, strict=True):
            self._versions[row] = versions

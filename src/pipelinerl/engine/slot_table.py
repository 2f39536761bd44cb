"""The host's side of static decode steps: which sequence has which row, and the results that have arrived.

Rows never move, except when most of them have ended. The device knows ids, positions and counts of decoding rows one step
before the host does: results of a step are read after the next one has been launched. `flush` waits for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.engine.attention import Move
from pipelinerl.engine.rows import DECODING, FREE, Ints, Reals, RowTable, Sequence, require_finite

Results = npt.NDArray[np.float64]
"""[rows, 2]: each row's token id, or -1 if it was not decoding, and the token's log-prob."""


class RowState(NamedTuple):
    """What the device has to know of n rows: integers [7, n], reals [2, n] and stop tokens [n, S]."""

    integers: Ints
    reals: Reals
    stops: Ints


class SlotTable(RowTable):
    """`RowTable` without classes of lengths. `positions` has the row's last token, which the next step processes."""

    def __init__(self, rows: int, max_length: int) -> None:
        super().__init__(rows, max_length)
        self._pending: deque[Callable[[], npt.NDArray[Any]]] = deque()
        self._changed: set[int] = set()
        self.sampled = 0

    def admit(self, fresh: Seq[Sequence]) -> None:
        """Give each sequence the lowest free row."""
        free = np.flatnonzero(self._kinds == FREE)[: len(fresh)]
        for row, sequence in zip(free.tolist(), fresh, strict=True):
            self._admit(sequence, row)
        self._used += len(fresh)

    def start_decoding(self, sequence: Sequence) -> None:
        """As in `RowTable`; the first decode step processes the prompt's last token."""
        super().start_decoding(sequence)
        prompt_ids = sequence.request.prompt_ids
        self.positions[sequence.row], self.last[sequence.row] = len(prompt_ids) - 1, prompt_ids[-1]
        self._changed.add(sequence.row)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self._changed.add(sequence.row)

    def decoding_rows(self) -> Ints:
        return np.flatnonzero(self._kinds == DECODING)

    def highest(self) -> int:
        """The number of rows up to the last occupied one."""
        taken = np.flatnonzero(self._kinds)
        return int(taken[-1]) + 1 if len(taken) else 0

    def take_changes(self) -> tuple[Ints, RowState] | None:
        """The rows that started or stopped decoding since the last call, and their state."""
        if not self._changed:
            return None
        rows_n = np.array(sorted(self._changed))
        self._changed.clear()
        decoding_n = (self._kinds[rows_n] == DECODING).astype(np.int64)
        integers = np.vstack([self._integers[:, rows_n], self.keys[rows_n].view(np.int64), decoding_n])
        every = self.decoding_rows()
        self.plain = bool(((self.temperature[every] == 1) & (self.top_p[every] == 1) & (self.top_k[every] == 0)).all())
        return rows_n, RowState(integers, self._reals[:, rows_n], self.stops[rows_n])

    # ---- results, which arrive late

    @property
    def pending(self) -> int:
        """Launched steps whose results have not been read."""
        return len(self._pending)

    def expect(self, results: Callable[[], npt.NDArray[Any]]) -> None:
        """Note a launched step; `results` waits for its results."""
        self._pending.append(results)

    def read_oldest(self) -> None:
        """Write the results of the oldest step to the arrays. Raises FloatingPointError as `RowTable.flush` does."""
        results: Results = self._pending.popleft()()
        rows_n = np.flatnonzero(results[:, 0] >= 0)
        ids_n, logprobs_n = results[rows_n, 0].astype(np.int64), results[rows_n, 1].astype(np.float32)
        require_finite(logprobs_n)
        counts_n = self.counts[rows_n]
        self.tokens[rows_n, counts_n] = ids_n
        self.logprobs[rows_n, counts_n] = logprobs_n
        self.last[rows_n] = ids_n
        self.counts[rows_n] += 1
        self.positions[rows_n] += 1
        self.sampled += len(rows_n)

    def flush(self) -> None:
        while self._pending:
            self.read_oldest()

    def ended_rows(self) -> list[tuple[int, bool]]:
        """All rows that have ended, as `ended` gives them."""
        rows_n = self.decoding_rows()
        return self.ended(rows_n[self.counts[rows_n] > 0])

    def gather_below(self, rows: int) -> list[Move]:
        """Move sequences from rows >= `rows` to free rows below. The table has been flushed and no row has ended."""
        sources = rows + np.flatnonzero(self._kinds[rows:])
        targets = np.flatnonzero(self._kinds[:rows] == FREE)[: len(sources)]
        moves = self._move(sources, targets)
        self._kinds[sources] = FREE
        for row in sources.tolist():
            self._owners[row] = None
        self._changed.update(sources.tolist(), targets.tolist())
        return moves

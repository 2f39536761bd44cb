"""The best configuration of each method: every (H, I) of a pipeline, every G of conventional RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.analytic import (
    Conventional,
    Pipeline,
    Workload,
    conventional,
    pipeline,
    pipeline_max_lag,
)

MAX_SLOTS = 1024
"""The search tries up to this many sequences per accelerator, or fewer if U is known only for fewer."""
_SAME = 1 - 1e-9
"""Rates within rounding of the best count as equal. The lowest lag decides between them, then the fewest slots."""


class Comparison(NamedTuple):
    """Both methods with a lag of at most `max_lag`. `pipeline` is None if no pipeline has such a low lag."""

    max_lag: int
    pipeline: Pipeline | None
    conventional: Conventional

    @property
    def speed_up(self) -> float | None:
        return self.pipeline.rate / self.conventional.rate if self.pipeline else None


@dataclass(frozen=True, eq=False)
class PipelineGrid:
    """All pipelines of a workload: `rates` and `max_lags` [slots, generating]; `slots` and `generating` are their axes."""

    workload: Workload
    slots: npt.NDArray[np.int64]
    generating: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]
    max_lags: npt.NDArray[np.float64]

    @classmethod
    def of(cls, workload: Workload, most_slots: int | None = None) -> PipelineGrid:
        """H = 1..most_slots (None: as far as U is known, at most MAX_SLOTS), I = 1..N-1. Empty if N = 1."""
        most = most_slots or max(1, min(MAX_SLOTS, int(workload.utilisation.largest)))
        slots, generating = np.arange(1, most + 1), np.arange(1, workload.accelerators)
        generation = workload.utilisation(slots)[:, None] * generating
        training = (workload.accelerators - generating) / workload.tau
        max_lags = pipeline_max_lag(workload, slots[:, None] * generating)
        return cls(workload, slots, generating, np.minimum(generation, training), max_lags)

    def best(self, max_lag: int | None = None) -> Pipeline | None:
        """The fastest with a lag of at most `max_lag` (None: any). Ties go to the lowest lag, then to the lowest H."""
        rates = self.rates if max_lag is None else np.where(self.max_lags <= max_lag, self.rates, 0.0)
        if not rates.size or rates.max() <= 0:
            return None
        rows, columns = np.nonzero(rates >= rates.max() * _SAME)
        first = np.lexsort((columns, rows, self.max_lags[rows, columns]))[0]
        return pipeline(self.workload, int(self.slots[rows[first]]), int(self.generating[columns[first]]))


def compare(
    workload: Workload, max_lags: Sequence[int], *, most_slots: int | None = None, baseline: Workload | None = None
) -> list[Comparison]:
    """Throughput against g_max (the paper's Figure 9): the best of both methods at each of these lags (>= 0), ascending.

    `baseline` is the workload of conventional RL, if costs differ when a phase has the whole machine.
    """
    grid = PipelineGrid.of(workload, most_slots)
    best, tried = conventional(baseline or workload, 1), 1
    comparisons = []
    for max_lag in sorted(max_lags):
        for steps in range(tried + 1, max_lag + 2):
            candidate = conventional(baseline or workload, steps)
            if candidate.rate * _SAME > best.rate:
                best = candidate
        tried = max(tried, max_lag + 1)
        comparisons.append(Comparison(max_lag, grid.best(max_lag), best))
    return comparisons

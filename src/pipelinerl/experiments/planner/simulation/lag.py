"""Exact lag of every token that was trained on. Lag is constant along a version span, so tokens are not visited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.simulation.engine import SimulatedRollout

Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Tokens at positions `start <= p < end` of a completion were sampled by weights `version`. Arrays of shape (S,)."""

    start_S: Ints
    end_S: Ints
    version_S: Ints


def spans_of(rollouts: Sequence[SimulatedRollout]) -> Spans:
    """The version spans of all tokens of these rollouts, all of which have ended."""
    counts = [rollout.last_update - rollout.first_update + 1 for rollout in rollouts]
    steps: list[int] = []
    versions: list[int] = []
    for rollout in rollouts:
        first, end = rollout.first_update, rollout.last_update + 1
        steps += rollout.engine.update_steps[first:end]
        versions += rollout.engine.update_versions[first:end]
    starts_R = np.array([rollout.start_step for rollout in rollouts], dtype=np.int64)
    lengths_R = np.array([rollout.length for rollout in rollouts], dtype=np.int64)
    counts_R = np.array(counts, dtype=np.int64)
    start_S = np.maximum(np.array(steps, dtype=np.int64) - np.repeat(starts_R, counts_R), 0)
    end_S = np.empty_like(start_S)
    end_S[:-1] = start_S[1:]
    end_S[np.cumsum(counts_R) - 1] = lengths_R
    return Spans(start_S, end_S, np.array(versions, dtype=np.int64))


class LagStatistics:
    """Histogram of lag over all added tokens, mean lag by position in the completion, and lag by optimizer step."""

    def __init__(self) -> None:
        self.step_mean: list[float | None] = []
        self.step_max: list[int | None] = []
        self._tokens_by_lag = np.zeros(1, dtype=np.int64)
        # Differences between consecutive positions: of the number of tokens there, and of the sum of their lags.
        self._tokens_change = np.zeros(1, dtype=np.int64)
        self._lag_change = np.zeros(1, dtype=np.int64)

    def add(self, rollouts: Sequence[SimulatedRollout], version: int) -> None:
        """Add rollouts that weights `version` are trained on."""
        if not rollouts:
            self.step_mean.append(None)
            self.step_max.append(None)
            return
        spans = spans_of(rollouts)
        lag_S, tokens_S = version - spans.version_S, spans.end_S - spans.start_S
        self.step_mean.append(float(np.average(lag_S, weights=tokens_S)))
        self.step_max.append(int(lag_S.max()))
        self._tokens_by_lag = _added(self._tokens_by_lag, lag_S, tokens_S)
        ones_S = np.ones_like(lag_S)
        for at_S, sign in ((spans.start_S, 1), (spans.end_S, -1)):
            self._tokens_change = _added(self._tokens_change, at_S, sign * ones_S)
            self._lag_change = _added(self._lag_change, at_S, sign * lag_S)

    def tokens_by_lag(self) -> Ints:
        """Number of tokens of each lag 0, 1, ... up to the largest."""
        return np.trim_zeros(self._tokens_by_lag, "b")

    def by_position(self) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Number of tokens at each position 0, 1, ... of a completion, and their mean lag."""
        tokens_L = np.cumsum(self._tokens_change)[:-1]
        lag_L = np.cumsum(self._lag_change)[:-1]
        return tokens_L, lag_L / np.maximum(tokens_L, 1)


def _added(totals: Ints, at_S: Ints, amounts_S: Ints) -> Ints:
    """`totals` with each amount added at its index, extended if necessary. Sums are exact up to 2**53."""
    size = max(len(totals), int(at_S.max()) + 1)
    grown = np.bincount(at_S, weights=amounts_S, minlength=size).astype(np.int64)
    grown[: len(totals)] += totals
    return grown

"""The simulated stream and trainer: groups in order, batches of B, one optimizer step after another, lag of every token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.engine import Publication, SimulatedGroup, SimulatedRollout
from pipelinerl.experiments.planner.scenario import Scenario
from pipelinerl.hub.outstanding import Outstanding

Ints = npt.NDArray[np.int64]


# ---- exact lag of every token that was trained on: constant along a version span, so tokens are not visited


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
        self.step_max: list[int | None] = []
        self._tokens_by_lag = np.zeros(1, dtype=np.int64)
        # Differences between consecutive positions: of the number of tokens there, and of the sum of their lags.
        self._tokens_change = np.zeros(1, dtype=np.int64)
        self._lag_change = np.zeros(1, dtype=np.int64)

    def add(self, rollouts: Sequence[SimulatedRollout], version: int) -> None:
        """Add rollouts that weights `version` are trained on."""
        if not rollouts:
            self.step_max.append(None)
            return
        spans = spans_of(rollouts)
        lag_S, tokens_S = version - spans.version_S, spans.end_S - spans.start_S
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


# ---- the trainer


@dataclass
class Steps:
    """Records of the optimizer steps, one entry per step."""

    end_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    sampled_tokens: list[int] = field(default_factory=list)


class SimulatedTrainer:
    """Takes groups from the stream only when it needs them, like the real trainer, and publishes as the schedule says."""

    def __init__(self, scenario: Scenario, outstanding: Outstanding, publications: list[Publication]) -> None:
        self.version = 0
        self.trained = 0
        self.busy_s = 0.0
        self.dropped: dict[str, int] = {}
        self.steps = Steps()
        self.lag = LagStatistics()
        self.finish_s: float | None = None
        """When the step in progress will be done; None: no step is in progress."""
        self._scenario, self._outstanding, self._publications = scenario, outstanding, publications
        self._stream: deque[SimulatedGroup] = deque()
        self._queue: deque[SimulatedRollout] = deque()
        self._batch: list[SimulatedRollout] = []
        self._free_s = 0.0
        self._counted_busy_s = 0.0

    @property
    def queued(self) -> int:
        """Rollouts waiting in the stream or in the trainer's queue."""
        return sum(len(group.rollouts) for group in self._stream) + len(self._queue)

    @property
    def rollouts_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def in_step(self) -> int:
        return len(self._batch)

    @property
    def goal_reached(self) -> bool:
        return self.version >= self._scenario.steps

    def try_write(self, group: SimulatedGroup) -> bool:
        """Write a finished group to the stream. False if the stream is full and set to block."""
        if self._scenario.capacity is not None and len(self._stream) >= self._scenario.capacity:
            if self._scenario.when_full == "block":
                return False
            oldest = self._stream.popleft()
            dropped, oldest.rollouts = len(oldest.rollouts), []
            self._count_dropped(dropped, "stream_full")
            self._outstanding.drop(dropped)
        self._stream.append(group)
        self._outstanding.hand_over(group.started_version, started=len(group.rollouts), rollouts=len(group.rollouts))
        return True

    def pump(self, now_s: float) -> bool:
        """Begin the next step if there is none and the schedule allows it. True if groups were taken from the stream."""
        took = False
        while self.finish_s is None and not self.goal_reached:
            pulled = False
            allowed = self._scenario.schedule.may_train(self.version, len(self._queue)).allowed
            while not allowed and self._stream:
                self._pull(now_s)
                pulled = took = True
                allowed = self._scenario.schedule.may_train(self.version, len(self._queue)).allowed
            if allowed:
                self._take_batch()
                self._begin(now_s)
            elif not pulled:
                break
        return took

    def finish(self) -> None:
        """Complete the step in progress, which increments the version."""
        assert self.finish_s is not None  # noqa: S101 - called only when a step ends
        now_s = self.finish_s
        self.lag.add([rollout for rollout in self._batch if rollout.used], self.version)
        self.version += 1
        self.trained += len(self._batch)
        self._acknowledge(len(self._batch))
        self._drop_too_old()
        if self._scenario.schedule.publishes(self.version) or self.goal_reached:
            self._publications.append(Publication(now_s, self.version))
        self._record(now_s)
        self._batch = []
        self.finish_s = None

    def _pull(self, now_s: float) -> None:
        group = self._stream.popleft()
        dropped = group.work.dropped
        kept = (
            [rollout for rollout, out in zip(group.rollouts, dropped, strict=True) if not out] if dropped else group.rollouts
        )
        if len(kept) < len(group.rollouts):
            self._count_dropped(len(group.rollouts) - len(kept), "preprocess")
            self._acknowledge(len(group.rollouts) - len(kept))
        self._queue.extend(kept)
        self._drop_too_old()
        group.rollouts = []  # break the reference cycle, which would keep every group in memory
        prepare_s = len(group.work.lengths) * self._scenario.costs.prepare_s
        self._free_s = max(self._free_s, now_s) + prepare_s
        self.busy_s += prepare_s

    def _drop_too_old(self) -> None:
        schedule = self._scenario.schedule
        oldest = schedule.oldest_trained(self.version)
        kept = [rollout for rollout in self._queue if rollout.oldest_version >= oldest] if oldest > 0 else self._queue
        too_old = len(self._queue) - len(kept)
        if too_old:
            self._queue = deque(kept)
            self._count_dropped(too_old, schedule.too_old_reason)
            self._acknowledge(too_old)

    def _take_batch(self) -> None:
        """Take B rollouts from the queue, in the order of the real trainer."""
        if self._scenario.schedule.trains_in_rounds():
            self._queue = deque(sorted(self._queue, key=lambda rollout: rollout.group.index))
        self._batch = [self._queue.popleft() for _ in range(self._scenario.batch_size)]

    def _begin(self, now_s: float) -> None:
        costs, used = self._scenario.costs, [rollout.length for rollout in self._batch if rollout.used]
        tokens = sum(used) + len(used) * self._scenario.workload.prompt_tokens
        step_s = costs.train_step_s + tokens * costs.train_token_s
        self._free_s = self.finish_s = max(self._free_s, now_s) + step_s
        self.busy_s += step_s

    def _record(self, now_s: float) -> None:
        before_s = self.steps.end_s[-1] if self.steps.end_s else 0.0
        wait_s = now_s - before_s - (self.busy_s - self._counted_busy_s)
        self._counted_busy_s = self.busy_s
        self.steps.end_s.append(now_s)
        self.steps.wait_s.append(max(0.0, wait_s))
        self.steps.sampled_tokens.append(sum(rollout.length for rollout in self._batch))

    def _count_dropped(self, rollouts: int, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + rollouts

    def _acknowledge(self, rollouts: int) -> None:
        """Record that the trainer has trained or dropped this many more rollouts."""
        self._outstanding.settle(self._outstanding.settled + rollouts)

"""The simulated stream and trainer: groups in order, batches of B, one optimizer step after another, lag of every token."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.engine import Publication, SimulatedGroup, SimulatedRollout
from pipelinerl.experiments.planner.scenario import Scenario
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.types import TrainerProgress

Ints = npt.NDArray[np.int64]


def tokens_by_lag(rollouts: Sequence[SimulatedRollout], version: int) -> Ints:
    """The number of tokens of each lag 0, 1, ... that weights `version` are trained on. All rollouts have ended.

    Lag is constant along a version span, so tokens are not visited.
    """
    if not rollouts:
        return np.zeros(0, dtype=np.int64)
    steps: list[int] = []
    versions: list[int] = []
    for rollout in rollouts:
        first, end = rollout.first_update, rollout.last_update + 1
        steps += rollout.engine.update_steps[first:end]
        versions += rollout.engine.update_versions[first:end]
    starts_R = np.array([rollout.start_step for rollout in rollouts], dtype=np.int64)
    lengths_R = np.array([rollout.length for rollout in rollouts], dtype=np.int64)
    counts_R = np.array([rollout.last_update - rollout.first_update + 1 for rollout in rollouts], dtype=np.int64)
    start_S = np.maximum(np.array(steps, dtype=np.int64) - np.repeat(starts_R, counts_R), 0)
    end_S = np.empty_like(start_S)
    end_S[:-1] = start_S[1:]
    end_S[np.cumsum(counts_R) - 1] = lengths_R
    lag_S = version - np.array(versions, dtype=np.int64)
    return np.bincount(lag_S, weights=end_S - start_S).astype(np.int64)  # sums are exact up to 2**53


class SimulatedTrainer:
    """Takes groups from the stream only when it needs them, like the real trainer, and publishes as the schedule says.

    end_s, wait_s, sampled_tokens, lag_max   one entry per optimizer step; a lag is None if no token had a gradient
    lag_tokens                               number of tokens of each lag that were trained on, with a gradient
    dropped, replaced                        dropped rollouts by reason, and those that the stream replaced by newer ones
    finish_s                                 when the step in progress will be done; None: no step is in progress
    """

    def __init__(self, scenario: Scenario, admission: AdmissionState, publications: list[Publication]) -> None:
        self.version = 0
        self.trained = 0
        self.busy_s = 0.0
        self.dropped: Counter[str] = Counter()
        self.replaced = 0
        self.end_s: list[float] = []
        self.wait_s: list[float] = []
        self.sampled_tokens: list[int] = []
        self.lag_max: list[int | None] = []
        self.lag_tokens = np.zeros(0, dtype=np.int64)
        self.finish_s: float | None = None
        self._scenario, self._admission, self._publications = scenario, admission, publications
        self._stream: deque[SimulatedGroup] = deque()
        self._queue: deque[SimulatedRollout] = deque()
        self._batch: list[SimulatedRollout] = []
        self._free_s = 0.0
        self._counted_busy_s = 0.0

    @property
    def queued(self) -> int:
        """Rollouts in the stream, in the trainer's queue or in the step in progress."""
        return sum(len(group.rollouts) for group in self._stream) + len(self._queue) + len(self._batch)

    @property
    def goal_reached(self) -> bool:
        return self.version >= self._scenario.steps

    def progress(self) -> TrainerProgress:
        return TrainerProgress(version=self.version, trained=self.trained, dropped=self.dropped)

    def try_write(self, group: SimulatedGroup) -> bool:
        """Write a finished group to the stream. False if the stream is full and set to block."""
        if self._scenario.capacity is not None and len(self._stream) >= self._scenario.capacity:
            if self._scenario.when_full == "block":
                return False
            oldest = self._stream.popleft()
            self.replaced += len(oldest.rollouts)
            self._admission.replace(0, len(oldest.rollouts))
            oldest.rollouts = []
        self._stream.append(group)
        self._admission.hand_over(group.index, rollouts=len(group.rollouts))
        return True

    def pump(self, now_s: float) -> bool:
        """Begin the next step if there is none and the schedule allows it. True if groups were taken from the stream."""
        took = False
        while self.finish_s is None and not self.goal_reached:
            if self._scenario.schedule.may_train(self.version, len(self._queue)).allowed:
                self._begin(now_s)
            elif self._stream:
                self._pull(now_s)
                took = True
            else:
                break
        return took

    def finish(self) -> None:
        """Complete the step in progress, which increments the version."""
        assert self.finish_s is not None  # noqa: S101 - called only when a step ends
        now_s, batch = self.finish_s, self._batch
        found = tokens_by_lag([rollout for rollout in batch if rollout.used], self.version)
        self.lag_max.append(len(found) - 1 if len(found) else None)
        longer, shorter = sorted((self.lag_tokens, found), key=len, reverse=True)
        self.lag_tokens = longer.copy()
        self.lag_tokens[: len(shorter)] += shorter
        self.version += 1
        self.trained += len(batch)
        self._queue = deque(self._fresh(self._queue))
        if self._scenario.schedule.publishes(self.version) or self.goal_reached:
            self._publications.append(Publication(now_s, self.version))
        before_s = self.end_s[-1] if self.end_s else 0.0
        self.wait_s.append(max(0.0, now_s - before_s - (self.busy_s - self._counted_busy_s)))
        self._counted_busy_s = self.busy_s
        self.end_s.append(now_s)
        self.sampled_tokens.append(sum(rollout.length for rollout in batch))
        self._batch, self.finish_s = [], None

    def _pull(self, now_s: float) -> None:
        group = self._stream.popleft()
        dropped = group.work.dropped or (False,) * len(group.rollouts)
        kept = [rollout for rollout, out in zip(group.rollouts, dropped, strict=True) if not out]
        if len(kept) < len(group.rollouts):
            self.dropped["preprocess"] += len(group.rollouts) - len(kept)
        self._queue.extend(self._fresh(kept))
        group.rollouts = []  # break the reference cycle, which would keep every group in memory
        self._work(now_s, len(group.work.lengths) * self._scenario.costs.prepare_s)

    def _fresh(self, rollouts: Sequence[SimulatedRollout]) -> Sequence[SimulatedRollout]:
        """Those that may be trained on; the others are too old, and counted as dropped."""
        schedule = self._scenario.schedule
        if (oldest := schedule.oldest_trained(self.version)) <= 0:
            return rollouts
        kept = [rollout for rollout in rollouts if rollout.oldest_version >= oldest]
        if too_old := len(rollouts) - len(kept):
            self.dropped[schedule.too_old_reason] += too_old
        return kept

    def _begin(self, now_s: float) -> None:
        """Begin a step on the first B rollouts of the queue, in the order of the real trainer."""
        scenario, costs = self._scenario, self._scenario.costs
        if scenario.schedule.trains_in_rounds():
            self._queue = deque(sorted(self._queue, key=lambda rollout: rollout.group.index))
        self._batch = [self._queue.popleft() for _ in range(scenario.batch_size)]
        used = [rollout.length for rollout in self._batch if rollout.used]
        tokens = sum(used) + len(used) * scenario.workload.prompt_tokens
        self.finish_s = self._work(now_s, costs.train_step_s + tokens * costs.train_token_s)

    def _work(self, now_s: float, busy_s: float) -> float:
        """Work for `busy_s` when all earlier work is done; returns the end."""
        self.busy_s += busy_s
        self._free_s = max(self._free_s, now_s) + busy_s
        return self._free_s

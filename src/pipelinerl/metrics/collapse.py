"""Notices that a run's reward has fallen to its floor and stays there. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import fmean

from pipelinerl.metrics.records import StepRecord

PATIENCE = 20
"""Steps in a row at the floor that are a collapse."""
_SMOOTHED = 5


class CollapseWatch:
    """Observes the steps of a run in order. `note` is a sentence about the latest collapse; None if there was none.

    A step is at the floor if all of its rewards are equal, none of the run's mean rewards was lower, and the best mean of 5
    steps in a row was higher by more than half of the largest standard deviation in a batch. The last condition leaves out
    runs that have only ever had a lucky answer.
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._floor, self._best, self._spread = math.inf, -math.inf, 0.0
        self._latest: deque[float] = deque(maxlen=_SMOOTHED)
        self._began: int | None = None

    @property
    def now(self) -> str:
        """`note` while the run is at its floor, else empty."""
        return self.note or "" if self._began is not None else ""

    def observe(self, step: StepRecord) -> None:
        reward = step.reward
        if reward is None:
            return
        self._floor = min(self._floor, reward)
        self._spread = max(self._spread, step.reward_std or 0.0)
        self._latest.append(reward)
        if len(self._latest) == _SMOOTHED:
            self._best = max(self._best, fmean(self._latest))
        fallen = reward == self._floor and step.reward_std == 0 and self._best - self._floor > self._spread / 2
        if not fallen:
            if self.note is not None and self._began is not None:
                self.note = self.note.replace(f"since step {self._began}", f"in steps {self._began} to {step.version - 1}")
            self._began = None
            return
        self._began = step.version if self._began is None else self._began
        if step.version - self._began + 1 == PATIENCE:
            self.note = (
                f"every rollout has had the lowest reward, {reward:.3g}, since step {self._began}; the best {_SMOOTHED} "
                f"steps had a mean of {self._best:.3g}. Such a model learns nothing any more: go back to an earlier "
                "checkpoint, with a lower trainer.learning_rate"
            )


def collapse_of(steps: Iterable[StepRecord]) -> str | None:
    """The `note` of a whole run."""
    watch = CollapseWatch()
    for step in steps:
        watch.observe(step)
    return watch.note

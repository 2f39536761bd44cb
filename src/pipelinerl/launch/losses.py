"""A session that loses a process which can't be replaced is followed by another one, from the latest checkpoint.

`launch.restarts` limits how many sessions in a row may end so without a new checkpoint. The launcher imports this module at
the first loss.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from pipelinerl.checkpoint_folders import by_version
from pipelinerl.errors import PipelineRLError, RunDirectoryError
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.launch.summary import Outcome
from pipelinerl.metrics.reading import read_lines
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.totals import actor_total
from pipelinerl.types import TRAINER, ActorProgress, trainer_progress

FIRST_PAUSE_S = 0.5
"""Pause before another session follows one that lost a process; it doubles with each one that made no progress."""
LONGEST_PAUSE_S = 60.0


class Loss(NamedTuple):
    """A session lost a process at `time_s` (by `time.monotonic`). `steps`: those after its latest checkpoint."""

    time_s: float
    steps: int


class Losses:
    """The sessions of a run that lost a process which can't be replaced, and whether another session follows.

    error            why the latest session ended, if another one follows
    lock             on the run directory, over all sessions
    records_from_s   of all these sessions: times in records include what a restart takes
    """

    def __init__(self, first: Session, lock: RunLock) -> None:
        self.error: PipelineRLError | None = None
        self.lock, self.records_from_s = lock, first.records_from_s
        self._allowed = first.config.launch.restarts
        self._losses: list[Loss] = []
        self._latest = 0  # the version of the latest checkpoint
        self._reports: list[str] = []  # of the sessions since the latest new checkpoint
        self._rollouts = self._rollouts_abandoned = 0

    def allow(self, session: Session, outcome: Outcome) -> bool:
        """Whether another session follows this one, which has ended."""
        self.error = None
        if not outcome.lost:
            return False
        versions = by_version(session.run.checkpoints)
        latest = self._latest = max(versions, default=0)
        if latest > session.plan.version:
            self._reports.clear()
        self._reports.append(str(outcome.error))
        if len(self._reports) > self._allowed:
            return False
        trainer = trainer_progress(outcome.statuses.get(TRAINER))
        self._losses.append(Loss(time.monotonic(), max(trainer.version - latest, 0) if trainer else 0))
        self.error = outcome.error
        actors = actor_total(outcome.statuses) or ActorProgress()
        self._rollouts = _rollouts(session.plan) + actors.rollouts_started - sum(actors.rollouts_dropped.values())
        return True

    def begin(self, plan: StartPlan) -> None:
        """Another session begins: count what the rewind to its plan has given up."""
        self._rollouts_abandoned += max(0, self._rollouts - _rollouts(plan))

    @property
    def pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(len(self._reports) - 1, 16))

    @property
    def message(self) -> str:
        said = self._reports[-1].splitlines()[0].removesuffix("; the end of its log:")
        number = f"restart {len(self._reports)} of {self._allowed}"
        what = "goes on from its latest checkpoint" if self._latest else "starts again from the beginning"
        return f"{said}; the run {what} in {self.pause_s:g} s ({number})"

    def counted(self, session: Session, outcome: Outcome) -> Outcome:
        """The outcome of the last session, with the losses. If it was lost too, its error has all reports."""
        error = outcome.error
        if error is not None and outcome.lost and len(self._reports) > 1:
            numbered = (f"{number}. {report}" for number, report in enumerate(self._reports, start=1))
            lost = (
                f"{len(self._reports)} sessions lost a process without a new checkpoint (launch.restarts: {self._allowed}):"
            )
            error = type(error)("\n".join([lost, *numbered]))
        if not self._losses:
            return outcome
        steps: list[StepRecord] = []
        with suppress(FileNotFoundError, RunDirectoryError):  # no step was taken; the summary names damaged records
            steps = read_lines(session.run.metrics, StepRecord)
        times_s = [session.records_from_s + step.time_s for step in steps]
        found = {
            "count": len(self._losses),
            "steps_lost": sum(loss.steps for loss in self._losses),
            "rollouts_abandoned": self._rollouts_abandoned,
            "recovery_s": [
                round(min(after) - loss.time_s, 3)
                for loss in self._losses
                if (after := [time_s for time_s in times_s if time_s > loss.time_s])
            ],
        }
        return replace(outcome, error=error, restarts={**outcome.restarts, "run": found})


def _rollouts(plan: StartPlan) -> int:
    """The rollouts that a session begins with: those that the trainer is done with, and those in the streams."""
    return plan.settled + sum(kept.left for kept in plan.kept)

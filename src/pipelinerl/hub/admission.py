"""Decides which generation process may start the next group, and when: pure transitions over exact counts.

The schedule decides on the counts of all engines: a round has the right number of rollouts, the lag bound counts the work
of all, and no index is used twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipelinerl.hub.outstanding import Outstanding
from pipelinerl.interfaces import Admitted, PipelineState, Schedule, Verdict
from pipelinerl.ledger import GroupLedger
from pipelinerl.types import ACTOR, TrainerProgress


class Claim(NamedTuple):
    """A group in progress: who has it, the version that it counts as started with, and its attempts."""

    process: int
    version: int
    attempts: int


@dataclass
class Part:
    """What all generation processes of one number have done in the session.

    lost                        attempts of the groups that were in progress when processes ended
    groups, attempts, rollouts  of finished groups: `rollouts` of the attempts are in them
    dropped                     the other attempts of these groups, by reason
    replaced                    rollouts that the stream dropped for newer ones
    """

    lost: int = 0
    groups: int = 0
    attempts: int = 0
    rollouts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    replaced: int = 0


class AdmissionState:
    """Which groups are in progress, and what the schedule allows."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        taken: GroupLedger | None = None,
        processes: int = 1,
        handed_over: int = 0,
        settled: int = 0,
    ) -> None:
        """`taken`: groups that must not be started. A session begins with `handed_over` rollouts in the stream, and with
        `settled` that the trainer is done with.
        """
        self.schedule = schedule
        self.counts = Outstanding(handed_over=handed_over, settled=settled)
        self.trainer: TrainerProgress | None = None
        self.claims: dict[int, Claim] = {}
        self.parts: dict[int, Part] = {}
        self._own: Counter[int] = Counter()  # attempts in progress, by process
        self._taken = taken or GroupLedger()
        self._processes = processes

    def claim(self, process: int, engine_version: int, rollouts: int) -> Admitted:
        """Count a group of `rollouts` attempts as started by generation process number `process`, if that is allowed now.

        `engine_version` is the version of the asking engine's weights.
        """
        progress = self.trainer or TrainerProgress(version=engine_version)
        self.counts.settle(progress.trained + sum(progress.dropped.values()))
        verdict = self._verdict(process, progress, engine_version, rollouts)
        if not verdict.allowed:
            return Admitted(None, verdict)
        counts = self.counts
        index = counts.returned.pop(0) if counts.returned else next(self._taken.missing_from(counts.next_index))
        counts.start(index, engine_version, rollouts)
        self.claims[index] = Claim(process, engine_version, rollouts)
        self._own[process] += rollouts
        return Admitted(index, verdict)

    def holds(self, process: int, groups: Sequence[int], engine_version: int) -> None:
        """The process has not begun these groups yet, so they will start with weights of at least this version."""
        for index in groups:
            claim = self.claims.get(index)
            if claim is not None and claim.process == process and claim.version < engine_version:
                self.counts.restart(claim.version, engine_version, claim.attempts)
                self.claims[index] = claim._replace(version=engine_version)

    def hand_over(
        self, index: int, *, rollouts: int, skipped: bool = False, dropped: Mapping[str, int] | None = None
    ) -> int:
        """Count a group as finished, with `rollouts` rollouts: its other attempts were dropped, or `skipped`.

        Returns the number of the process that had it.
        """
        claim = self.claims.pop(index)
        self.counts.hand_over(claim.version, started=claim.attempts, rollouts=rollouts)
        self._own[claim.process] -= claim.attempts
        part = self._part(claim.process)
        part.groups += not skipped
        part.attempts += 0 if skipped else claim.attempts
        part.rollouts += rollouts
        part.dropped.update(dropped or {})
        return claim.process

    def replace(self, process: int, rollouts: int) -> None:
        """Count rollouts as dropped that the stream replaced by newer ones of this process."""
        self.counts.drop(rollouts)
        self._part(process).replaced += rollouts

    def lose(self, process: int) -> Part:
        """The process has ended: its groups in progress are started again, first of all. Returns what it has done."""
        part = self._part(process)
        for index in [index for index, claim in self.claims.items() if claim.process == process]:
            claim = self.claims.pop(index)
            self.counts.hand_over(claim.version, started=claim.attempts, rollouts=0)
            self.counts.returned.append(index)
            part.lost += claim.attempts
        self.counts.returned.sort()
        self._own[process] = 0
        return part

    def own(self, process: int) -> int:
        """Rollouts in progress of a process, where a decision depends on it: in rounds, each has its share."""
        return self._own[process] if self._processes > 1 and self.schedule.trains_in_rounds() else 0

    def may_take(self, version: int) -> Verdict:
        """Whether an engine may apply the weights of `version` now. If so, it must: they are counted as applied."""
        verdict = self.schedule.may_take_weights(self.counts.in_progress_before(version))
        if verdict.allowed:
            self.counts.newest_version = max(version, self.counts.newest_version)
        return verdict

    def _part(self, process: int) -> Part:
        return self.parts.setdefault(process, Part())

    def _verdict(self, process: int, trainer: TrainerProgress, engine_version: int, rollouts: int) -> Verdict:
        counts = self.counts
        if trainer.goal_reached:
            return Verdict(False, "the end of the run: the trainer has reached its goal")
        if not counts.opened:
            return Verdict(False, "the evaluation before training", (ACTOR,))
        oldest = counts.oldest_in_progress
        seen = PipelineState(
            engine_version=engine_version,
            trainer_version=trainer.version,
            oldest_in_progress=engine_version if oldest is None else oldest,
            outstanding=counts.rollouts,
            handed_over=counts.handed_over,
            latency=counts.latency,
            most_in_progress=counts.most_in_progress,
            newest_version=max(counts.newest_version, engine_version),
            own=self.own(process),
            processes=self._processes,
        )
        return self.schedule.may_start(seen, rollouts)

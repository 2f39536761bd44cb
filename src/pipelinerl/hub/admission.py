"""Decides which generation process may start the next group, and when: pure transitions over exact counts.

The schedule decides on the counts of all engines: a round has the right number of rollouts, the lag bound counts the work
of all, and no index is used twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipelinerl.interfaces import Admitted, PipelineState, Verdict
from pipelinerl.schedule import Schedule
from pipelinerl.types import ACTOR, GroupLedger, TrainerProgress

LATENCY_WEIGHT = 0.1
"""Weight of the latest group in the running mean `AdmissionState.latency`."""


class Claim(NamedTuple):
    """A group in progress: who has it, the version that it counts as started with, and its attempts."""

    process: int
    version: int
    attempts: int


@dataclass
class ProcessTotals:
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
    """Which groups are in progress, how many rollouts are neither trained nor dropped yet, and what the schedule allows.

    next_index       lowest group index that was not started in this session
    returned         indices of groups whose process died, to be started again first
    opened           groups may be started (the evaluation before training is over)
    newest_version   newest weights that any engine has applied
    settled          rollouts that the trainer has trained or dropped since the beginning of the run, as far as known here
    in_progress      rollouts of groups in progress, by the version at their start
    handed_over      rollouts in the stream or with the trainer
    most_in_progress highest number of rollouts in progress so far in this session
    first_version    version of the weights that the session's first group was started with
    latency          optimizer steps from the start of a group to its hand-over, a running mean over the groups that were
                     started after the session's first weight update; None before the first of them
    """

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
        self.trainer: TrainerProgress | None = None
        self.claims: dict[int, Claim] = {}
        self.parts: defaultdict[int, ProcessTotals] = defaultdict(ProcessTotals)
        self.next_index = self.newest_version = self.most_in_progress = 0
        self.handed_over, self.settled = handed_over, settled
        self.returned: list[int] = []
        self.opened = False
        self.in_progress: Counter[int] = Counter()
        self.first_version: int | None = None
        self.latency: float | None = None
        self._own: Counter[int] = Counter()  # attempts in progress, by process
        self._attempts = 0  # the total of `in_progress`, which is asked for often
        self._taken = taken or GroupLedger()
        self._processes = processes

    @property
    def outstanding(self) -> int:
        return self._attempts + self.handed_over

    def in_progress_before(self, version: int) -> int:
        """Rollouts in progress that were started with weights older than `version`."""
        return sum(rollouts for started, rollouts in self.in_progress.items() if started < version)

    def claim(self, process: int, engine_version: int, rollouts: int) -> Admitted:
        """Count a group of `rollouts` attempts as started by generation process number `process`, if that is allowed now.

        `engine_version` is the version of the asking engine's weights.
        """
        progress = self.trainer or TrainerProgress(version=engine_version)
        self.settle(progress.trained + sum(progress.dropped.values()))
        verdict = self._verdict(process, progress, engine_version, rollouts)
        if not verdict.allowed:
            return Admitted(None, verdict)
        index = self.returned.pop(0) if self.returned else self._taken.first_missing(self.next_index)
        self.next_index = max(self.next_index, index + 1)
        self.claims[index] = Claim(process, engine_version, rollouts)
        self.in_progress[engine_version] += rollouts
        self._attempts += rollouts
        self.most_in_progress = max(self.most_in_progress, self._attempts)
        if self.first_version is None:
            self.first_version = engine_version
        self._own[process] += rollouts
        return Admitted(index, verdict)

    def holds(self, process: int, groups: Sequence[int], engine_version: int) -> None:
        """The process has not begun these groups yet, so they will start with weights of at least this version."""
        for index in groups:
            claim = self.claims.get(index)
            if claim is not None and claim.process == process and claim.version < engine_version:
                self._remove(claim)
                self.in_progress[engine_version] += claim.attempts
                self._attempts += claim.attempts
                self.claims[index] = claim._replace(version=engine_version)

    def hand_over(
        self, index: int, *, rollouts: int, skipped: bool = False, dropped: Mapping[str, int] | None = None
    ) -> int:
        """Count a group as finished, with `rollouts` rollouts: its other attempts were dropped, or `skipped`.

        Returns the number of the process that had it.
        """
        claim = self.claims.pop(index)
        self._remove(claim)
        self._own[claim.process] -= claim.attempts
        self.handed_over += rollouts
        if claim.version != self.first_version and rollouts:  # else the trainer had nothing to train on meanwhile
            steps = max(0, self.newest_version - claim.version)
            self.latency = steps if self.latency is None else self.latency + LATENCY_WEIGHT * (steps - self.latency)
        part = self.parts[claim.process]
        part.groups += not skipped
        part.attempts += 0 if skipped else claim.attempts
        part.rollouts += rollouts
        part.dropped.update(dropped or {})
        return claim.process

    def replace(self, process: int, rollouts: int) -> None:
        """Count rollouts as dropped that the stream replaced by newer ones of this process."""
        self.handed_over = max(0, self.handed_over - rollouts)
        self.parts[process].replaced += rollouts

    def settle(self, total: int) -> None:
        """The trainer has trained or dropped `total` rollouts since the beginning of the run. A lower total is ignored."""
        newly, self.settled = max(0, total - self.settled), max(total, self.settled)
        self.handed_over = max(0, self.handed_over - newly)

    def lose(self, process: int) -> ProcessTotals:
        """The process has ended: its groups in progress are started again, first of all. Returns what it has done."""
        part = self.parts[process]
        for index in [index for index, claim in self.claims.items() if claim.process == process]:
            claim = self.claims.pop(index)
            self._remove(claim)
            self.returned.append(index)
            part.lost += claim.attempts
        self.returned.sort()
        self._own[process] = 0
        return part

    def own(self, process: int) -> int:
        """Rollouts in progress of a process, where a decision depends on it: in rounds, each has its share."""
        return self._own[process] if self._processes > 1 and self.schedule.in_rounds else 0

    def may_take(self, version: int) -> Verdict:
        """Whether an engine may apply the weights of `version` now. If so, it must: they are counted as applied."""
        verdict = self.schedule.may_take_weights(self.in_progress_before(version))
        if verdict.allowed:
            self.newest_version = max(version, self.newest_version)
        return verdict

    def _remove(self, claim: Claim) -> None:
        self._attempts -= claim.attempts
        self.in_progress[claim.version] -= claim.attempts
        if not self.in_progress[claim.version]:
            del self.in_progress[claim.version]

    def _verdict(self, process: int, trainer: TrainerProgress, engine_version: int, rollouts: int) -> Verdict:
        if trainer.goal_reached:
            return Verdict(False, "the end of the run: the trainer has reached its goal")
        if not self.opened:
            return Verdict(False, "the evaluation before training", (ACTOR,))
        seen = PipelineState(
            engine_version=engine_version,
            trainer_version=trainer.version,
            oldest_in_progress=min(self.in_progress, default=engine_version),
            outstanding=self.outstanding,
            handed_over=self.handed_over,
            latency=self.latency,
            most_in_progress=self.most_in_progress,
            newest_version=max(self.newest_version, engine_version),
            own=self.own(process),
            processes=self._processes,
        )
        return self.schedule.may_start(seen, rollouts)

"""One simulated generation process, which advances from event to event instead of token by token.

Between two events the same h sequences advance by a token every `decode_step_s[h]` seconds, so a *segment* of n steps takes
one computation. Events are: a sequence ends, a reward arrives, or the engine is woken because weights were published or
something else that it was waiting for has changed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pipelinerl.actor.actor import open_limit
from pipelinerl.experiments.planner.scenario import GroupWork, Scenario

# ---- records of the simulated pipeline, with slots because there may be millions


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """K attempts that run in one engine. `open` of them are queued, in progress or waiting for their reward."""

    index: int
    work: GroupWork
    open: int = 0
    rollouts: list[SimulatedRollout] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimulatedRollout:
    """One attempt. `engine` samples its tokens in decode steps `start_step` .. `start_step + length - 1`.

    `first_update` and `last_update` index the engine's `update_versions`: the weights of its first and last token.
    """

    group: SimulatedGroup
    length: int
    used: bool
    engine: SimulatedEngine
    wait_s: float = 0.0
    start_step: int = 0
    first_update: int = 0
    last_update: int = 0

    @property
    def oldest_version(self) -> int:
        """The version of the first token."""
        return self.engine.update_versions[self.first_update]


class DecodeSegment(NamedTuple):
    """`steps` decode steps of `step_s` each, after a pause from the token boundary at `begin_s` on."""

    begin_s: float
    pause_s: float
    step_s: float
    steps: int

    def boundary_s(self, steps: int) -> float:
        """The time at which this many of the steps are done."""
        return self.begin_s + self.pause_s + steps * self.step_s

    def steps_until(self, time_s: float, *, later: bool = False) -> int:
        """Steps (at least one) to the first token boundary at or after `time_s`; strictly after it if `later`."""
        steps = (time_s - self.begin_s - self.pause_s) / self.step_s
        return max(1, math.floor(steps) + 1 if later else math.ceil(steps))


class SimulatedEngine:
    """H slots and the queue of rollouts for them. `segment` is the current segment; None: there is no open rollout.

    If no sequence is in progress but rollouts wait for rewards, the segment is the time until the next reward.
    """

    def __init__(self, index: int, scenario: Scenario) -> None:
        self.index = index
        self.slots = scenario.slots
        self.version = 0
        self.active = 0
        self.steps_done = 0
        self.decode_s = self.slot_s = 0.0
        self.finished: deque[SimulatedGroup] = deque()
        self.segment: DecodeSegment | None = None
        self.event_number = 0
        """Number of the engine's latest event. Events in the queue with an older number are stale."""
        self.update_steps = [0]
        self.update_versions = [self.version]
        self._costs = scenario.costs
        in_rounds = scenario.schedule.in_rounds
        self._max_open = open_limit(scenario.max_open_rollouts, scenario.slots, in_rounds=in_rounds)
        self._waiting: deque[SimulatedRollout] = deque()
        self._ends: list[int] = []
        self._ending: dict[int, list[SimulatedRollout]] = {}
        self._rewards: list[tuple[float, int, int, SimulatedRollout]] = []
        """A heap of (time of the reward, tie-breakers, rollout)."""
        self._pause_s = 0.0

    @property
    def room(self) -> int:
        """Free slots; 0 while the actor's limit on open rollouts is reached."""
        if self._max_open is not None and self.running + len(self._rewards) >= self._max_open:
            return 0
        return self.slots - self.running

    @property
    def running(self) -> int:
        return self.active + len(self._waiting)

    # ---- at a token boundary

    def take_weights(self, version: int) -> None:
        """Use the weights of `version` from the next decode step on."""
        self.version, step = version, self.steps_done
        self._pause_s = self._costs.update_pause_s
        if self.update_steps[-1] == step:
            self.update_versions[-1] = version
        else:
            self.update_steps.append(step)
            self.update_versions.append(version)

    def submit(self, group: SimulatedGroup) -> None:
        work = group.work
        triples = zip(work.lengths, work.used, work.waits_s or (0.0,) * len(work.lengths), strict=True)
        group.rollouts = [SimulatedRollout(group, length, used, self, wait_s) for length, used, wait_s in triples]
        group.open = len(group.rollouts)
        self._waiting.extend(group.rollouts)

    def begin(self, now_s: float) -> None:
        """Fill the slots and begin a segment, until the next sequence ends or the next reward arrives."""
        entering = min(self.slots - self.active, len(self._waiting))
        for _ in range(entering):
            rollout = self._waiting.popleft()
            rollout.start_step = self.steps_done
            rollout.first_update = len(self.update_steps) - 1
            end = self.steps_done + rollout.length
            if end not in self._ending:
                self._ending[end] = []
                heapq.heappush(self._ends, end)
            self._ending[end].append(rollout)
        self.active += entering
        if self.active:
            steps = self._ends[0] - self.steps_done
            step_s = self._costs.decode_step_s[self.active]
            self.segment = DecodeSegment(now_s, self._pause_s, step_s, steps)
            if self._rewards:
                self.segment = self.segment._replace(steps=min(steps, self.segment.steps_until(self._rewards[0][0])))
        elif self._rewards:
            self.segment = DecodeSegment(now_s, 0.0, self._rewards[0][0] - now_s, 1)
        else:
            self.segment = None
        self._pause_s = 0.0

    # ---- within a segment

    def end_s(self) -> float:
        """The end of the segment, including the actor's work on the rollouts that end then."""
        segment = self.segment
        assert segment is not None  # noqa: S101 - called only with a segment
        ending = len(self._ending[self._ends[0]]) if self._ends and self.steps_done + segment.steps == self._ends[0] else 0
        return segment.boundary_s(segment.steps) + ending * self._costs.rollout_s

    def stop_at_boundary(self, now_s: float, *, later: bool) -> bool:
        """End the segment at the first boundary at or after `now_s` (`later`: after). False if it ends there anyway."""
        segment = self.segment
        assert segment is not None  # noqa: S101 - called only with a segment
        if not self.active:  # nothing decodes, so the segment can end now
            self.segment = DecodeSegment(now_s, 0.0, 0.0, 1)
            return True
        steps = segment.steps_until(now_s, later=later)
        if steps >= segment.steps:
            return False
        self.segment = segment._replace(steps=steps)
        return True

    def finish_segment(self) -> None:
        """Free the slots of sequences that ended with the segment. Complete groups go to `finished`, oldest first."""
        if self.segment is None:
            return
        now_s = self.end_s()
        self._account(self.segment, self.segment.steps)
        self.segment = None
        ended: list[SimulatedRollout] = []
        if self._ends and self._ends[0] == self.steps_done:
            ended = self._ending.pop(heapq.heappop(self._ends))
        for number, rollout in enumerate(ended):
            rollout.last_update = len(self.update_steps) - 1
            self.active -= 1
            if rollout.wait_s > 0:
                heapq.heappush(self._rewards, (now_s + rollout.wait_s, self.steps_done, number, rollout))
        rewarded = [rollout for rollout in ended if rollout.wait_s <= 0]
        while self._rewards and self._rewards[0][0] <= now_s:
            rewarded.append(heapq.heappop(self._rewards)[-1])
        complete = []
        for rollout in rewarded:
            rollout.group.open -= 1
            if rollout.group.open == 0:
                complete.append(rollout.group)
        self.finished.extend(sorted(complete, key=lambda group: group.index))

    def interrupt(self, now_s: float) -> None:
        """Account for the part of the segment before `now_s`, the end of the run."""
        if self.segment is not None and self.active:
            done_s = now_s - self.segment.begin_s - self.segment.pause_s
            steps = min(self.segment.steps, max(0, math.floor(done_s / self.segment.step_s)))
            self._account(self.segment, steps)
        self.segment = None

    # ---- helpers

    def _account(self, segment: DecodeSegment, steps: int) -> None:
        """Count `steps` of the segment as done. Without a sequence in progress they are not decode steps."""
        if not self.active:
            return
        decode_s = steps * segment.step_s
        self.steps_done += steps
        self.decode_s += decode_s
        self.slot_s += decode_s * self.active

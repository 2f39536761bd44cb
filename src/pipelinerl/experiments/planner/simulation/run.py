"""The event loop of the simulation. An event is a token boundary of an engine or the end of an optimizer step."""

from __future__ import annotations

import heapq

from pipelinerl.actor.outstanding import Outstanding
from pipelinerl.experiments.planner.simulation.engine import Publication, SimulatedEngine, SimulatedGroup
from pipelinerl.experiments.planner.simulation.result import Prediction, Timeline, prediction
from pipelinerl.experiments.planner.simulation.scenario import Scenario
from pipelinerl.experiments.planner.simulation.trainer import SimulatedTrainer
from pipelinerl.interfaces import PipelineState

TRAINER, ENGINE = 0, 1
"""Order of events at the same time: the trainer first, then the engines by index."""
MAX_STEPS_OF_ROLLOUTS = 1000
"""Limit on rollouts started without an optimizer step, beyond one per slot, in multiples of a step's rollouts."""


def simulate(scenario: Scenario) -> Prediction:
    """Run `scenario` to its last optimizer step. The result is deterministic, bit for bit.

    Raises ValueError if the run would never end: the schedule deadlocks, or all generated rollouts are dropped.
    """
    return _Run(scenario).to_the_end()


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._publications = [Publication(0.0, 0)]
        self._outstanding = Outstanding()
        self._trainer = SimulatedTrainer(scenario, self._outstanding, self._publications)
        self._engines = [SimulatedEngine(index, scenario, self._publications) for index in range(scenario.engines)]
        self._events: list[tuple[float, int, int, int]] = []
        self._active = 0
        self._groups_at_step = 0
        self._timeline = Timeline()
        # Engines to wake when the condition that they wait for may have changed.
        self._denied: set[int] = set()
        """Engines that have room and may not start more groups."""
        self._blocked: set[int] = set()
        """Engines with finished groups for which the stream has no room."""
        self._held: set[int] = set()
        """Engines that may not take the available weights."""

    def to_the_end(self) -> Prediction:
        for engine in self._engines:
            self._boundary(engine, 0.0)
        now_s = 0.0
        while not self._trainer.goal_reached:
            if not self._events:
                raise ValueError(f"deadlock at version {self._trainer.version}: the schedule allows no further work")
            now_s, kind, index, number = heapq.heappop(self._events)
            if kind == TRAINER:
                self._step_ends(now_s)
            elif number == self._engines[index].event_number:
                self._segment_ends(self._engines[index], now_s)
        for engine in self._engines:
            engine.interrupt(now_s)
            self._count_starved(engine, now_s)
        return prediction(
            self._scenario,
            self._trainer,
            self._engines,
            self._timeline,
            time_s=now_s,
            started=self._outstanding.next_index * self._scenario.group_size,
            outstanding=self._outstanding.rollouts,
        )

    # ---- events

    def _step_ends(self, now_s: float) -> None:
        self._trainer.finish()
        self._groups_at_step = self._outstanding.next_index
        self._pump(now_s)
        for index in sorted(self._denied | self._blocked):
            self._wake(self._engines[index], now_s, later=False)

    def _segment_ends(self, engine: SimulatedEngine, now_s: float) -> None:
        took = engine.catch_up(now_s)
        if took and engine.end_s() > now_s:  # the pauses of the updates delay the end
            self._schedule_end(engine)
        else:
            self._boundary(engine, now_s)

    def _boundary(self, engine: SimulatedEngine, now_s: float) -> None:
        """The actor's actions between two decode steps, in the real actor's order."""
        active = engine.active
        engine.finish_segment()
        self._hand_over(engine, now_s)
        self._take_weights(engine, now_s)
        self._start_groups(engine, now_s)
        engine.begin(now_s)
        if engine.segment is not None:
            self._schedule_end(engine)
        self._active += engine.active - active
        self._timeline.add(now_s, self._active / self._scenario.engines)

    def _hand_over(self, engine: SimulatedEngine, now_s: float) -> None:
        if not engine.finished:
            return
        dropped = self._trainer.rollouts_dropped
        took = wrote = False
        while engine.finished and self._trainer.try_write(engine.finished[0]):
            engine.in_progress -= len(engine.finished.popleft().rollouts)
            took |= self._pump(now_s)
            wrote = True
        waiting: set[int] = set()
        if took:
            waiting |= self._blocked
        if wrote or self._trainer.rollouts_dropped > dropped:
            waiting |= self._denied
        if wrote and self._held and self._may_take(self._publications[-1].version):
            waiting |= self._held
        for index in sorted(waiting - {engine.index}):
            self._wake(self._engines[index], now_s, later=index < engine.index)
        _set_membership(self._blocked, engine.index, bool(engine.finished))

    def _take_weights(self, engine: SimulatedEngine, now_s: float) -> None:
        version = engine.offered(now_s)
        if version is None:
            return
        allowed = self._may_take(version)
        if allowed:
            self._outstanding.newest_version = max(self._outstanding.newest_version, version)
            engine.take_weights(now_s)
        _set_membership(self._held, engine.index, not allowed)

    def _may_take(self, version: int) -> bool:
        return self._scenario.schedule.may_take_weights(self._outstanding.in_progress_before(version)).allowed

    def _start_groups(self, engine: SimulatedEngine, now_s: float) -> None:
        if engine.room <= 0 and engine.denied_since_s is None:
            return
        self._count_starved(engine, now_s)
        while engine.room > 0:
            if engine.finished or not self._may_start(engine):
                engine.denied_since_s = now_s
                break
            index = self._outstanding.next_index
            self._check_progress(index)
            group = SimulatedGroup(index, self._scenario.workload.group(index), engine.version)
            self._outstanding.start(index, engine.version, self._scenario.group_size)
            engine.submit(group)
        _set_membership(self._denied, engine.index, engine.denied_since_s is not None)

    def _check_progress(self, index: int) -> None:
        scenario = self._scenario
        rollouts = (index - self._groups_at_step) * scenario.group_size
        if rollouts > MAX_STEPS_OF_ROLLOUTS * scenario.batch_size + scenario.slots * scenario.engines:
            raise ValueError(
                f"no optimizer step after version {self._trainer.version} in {rollouts} rollouts; dropped so far: "
                f"{self._trainer.dropped}"
            )

    def _may_start(self, engine: SimulatedEngine) -> bool:
        oldest = self._outstanding.oldest_in_progress
        state = PipelineState(
            engine_version=engine.version,
            trainer_version=self._trainer.version,
            oldest_in_progress=engine.version if oldest is None else oldest,
            outstanding=self._outstanding.rollouts,
            handed_over=self._outstanding.handed_over,
            latency=self._outstanding.latency,
            newest_version=max(self._outstanding.newest_version, engine.version),
            own=engine.in_progress,
            processes=self._scenario.engines,
        )
        return self._scenario.schedule.may_start(state, self._scenario.group_size).allowed

    # ---- helpers

    def _pump(self, now_s: float) -> bool:
        idle = self._trainer.finish_s is None
        took = self._trainer.pump(now_s)
        if idle and self._trainer.finish_s is not None:
            heapq.heappush(self._events, (self._trainer.finish_s, TRAINER, 0, 0))
        return took

    def _wake(self, engine: SimulatedEngine, now_s: float, *, later: bool) -> None:
        """Something changed at `now_s`: process the engine at its next token boundary, or now if it is idle."""
        if engine.segment is None:
            engine.event_number += 1
            heapq.heappush(self._events, (now_s, ENGINE, engine.index, engine.event_number))
            return
        took = engine.catch_up(now_s)
        if engine.stop_at_boundary(now_s, later=later) or took:
            self._schedule_end(engine)

    def _schedule_end(self, engine: SimulatedEngine) -> None:
        engine.event_number += 1
        heapq.heappush(self._events, (engine.end_s(), ENGINE, engine.index, engine.event_number))

    def _count_starved(self, engine: SimulatedEngine, now_s: float) -> None:
        if engine.denied_since_s is not None:
            engine.starved_s += now_s - engine.denied_since_s
            engine.denied_since_s = None


def _set_membership(members: set[int], member: int, belongs: bool) -> None:
    if belongs:
        members.add(member)
    else:
        members.discard(member)

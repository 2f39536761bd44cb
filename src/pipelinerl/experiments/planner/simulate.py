"""The event loop and its result. An event is a token boundary of an engine or the end of an optimizer step."""

from __future__ import annotations

import heapq
from collections import Counter
from statistics import fmean

import msgspec
import numpy as np

from pipelinerl.experiments.planner.engine import Publication, SimulatedEngine, SimulatedGroup
from pipelinerl.experiments.planner.scenario import MeasuredRun, Scenario, first_fifth
from pipelinerl.experiments.planner.trainer import Ints, SimulatedTrainer
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.report import count, new_table, number, rendered


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run. Times are in the unit of the costs and start when engines and trainer are ready.

    *_later               rates after the first fifth of the steps, when the pipeline has filled (see `first_fifth`)
    tokens_per_s          all generated tokens, trained on or not; `trained_tokens` are of rollouts in optimizer steps
    lag_*                 over all tokens with a gradient, equally weighted; `lag_tokens[k]` of them had lag k
    engine_busy_fraction  share of time in decode steps; the actor's own work, prefill and pauses are excluded
    slots_used            sequences in progress over H, averaged over the time of decode steps
    wait_s_*              time the trainer waited for data before a step
    step_*                one entry per optimizer step; a lag is None if no token in the step had a gradient
    rollouts_*            every started rollout is trained, dropped, queued or in progress
    """

    schedule: str
    engines: int
    slots: int
    steps: int
    time_s: float
    samples_per_s: float
    samples_per_s_later: float
    tokens_per_s: float
    trained_tokens_per_s_later: float
    lag_mean: float | None
    lag_max: int | None
    lag_p50: int | None
    lag_p99: int | None
    lag_tokens: list[int]
    engine_busy_fraction: float
    slots_used: float
    trainer_busy_fraction: float
    wait_s_mean: float
    wait_s_max: float
    tokens_generated: int
    rollouts_started: int
    rollouts_trained: int
    rollouts_dropped: dict[str, int]
    rollouts_queued: int
    rollouts_in_progress: int
    step_end_s: list[float]
    step_wait_s: list[float]
    step_lag_max: list[int | None]


def _nearest_rank(counts: Ints, fraction: float) -> int | None:
    """The smallest value k such that at least `fraction` of the values are <= k; `counts[k]` values equal k."""
    total = counts.sum()
    return int(np.searchsorted(np.cumsum(counts), fraction * total)) if total else None


# ---- run


TRAINER, ENGINE = 0, 1
"""Order of events at the same time: the trainer first, then the engines by index."""
MAX_STEPS_OF_ROLLOUTS = 1000
"""Limit on rollouts started without an optimizer step, beyond one per slot, in multiples of a step's rollouts."""


def simulate(scenario: Scenario) -> RunPrediction:
    """Run `scenario` to its last optimizer step. The result is deterministic, bit for bit.

    Raises ValueError if the run would never end: the schedule deadlocks, or all generated rollouts are dropped.
    """
    return _Run(scenario).to_the_end()


class _Run:
    """The event loop. The sets have the engines, by index, to wake when the condition that they wait for may have changed:

    denied    may not start more groups, though they have room
    blocked   have finished groups for which the stream has no room
    held      may not take the available weights
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._publications = [Publication(0.0, 0)]
        self._admission = AdmissionState(scenario.schedule, processes=scenario.engines)
        self._admission.opened = True
        self._trainer = SimulatedTrainer(scenario, self._admission, self._publications)
        self._admission.trainer = self._trainer.progress()
        self._engines = [SimulatedEngine(index, scenario, self._publications) for index in range(scenario.engines)]
        self._events: list[tuple[float, int, int, int]] = []
        self._groups_at_step = 0
        self._denied: set[int] = set()
        self._blocked: set[int] = set()
        self._held: set[int] = set()

    def to_the_end(self) -> RunPrediction:
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
        return self._prediction(now_s)

    def _prediction(self, time_s: float) -> RunPrediction:
        """The prediction of a simulation that ended at `time_s`."""
        scenario, trainer, engines = self._scenario, self._trainer, self._engines
        later = first_fifth(trainer.version, scenario.schedule)
        later_s = time_s - (trainer.end_s[later - 1] if later else 0.0)
        tokens = sum(engine.tokens for engine in engines)
        decode_s = sum(engine.decode_s for engine in engines)
        lags = trainer.lag_tokens
        return RunPrediction(
            schedule=scenario.schedule.name,
            engines=scenario.engines,
            slots=scenario.slots,
            steps=trainer.version,
            time_s=time_s,
            samples_per_s=trainer.trained / time_s,
            samples_per_s_later=(trainer.version - later) * scenario.batch_size / later_s,
            tokens_per_s=tokens / time_s,
            trained_tokens_per_s_later=sum(trainer.sampled_tokens[later:]) / later_s,
            lag_mean=float(np.average(np.arange(len(lags)), weights=lags)) if len(lags) else None,
            lag_max=len(lags) - 1 if len(lags) else None,
            lag_p50=_nearest_rank(lags, 0.50),
            lag_p99=_nearest_rank(lags, 0.99),
            lag_tokens=lags.tolist(),
            engine_busy_fraction=decode_s / (time_s * len(engines)),
            slots_used=sum(engine.slot_s for engine in engines) / (decode_s * scenario.slots),
            trainer_busy_fraction=trainer.busy_s / time_s,
            wait_s_mean=fmean(trainer.wait_s),
            wait_s_max=max(trainer.wait_s),
            tokens_generated=tokens,
            rollouts_started=self._admission.next_index * scenario.group_size,
            rollouts_trained=trainer.trained,
            rollouts_dropped=dict(+(trainer.dropped + Counter(stream_full=trainer.replaced))),
            rollouts_queued=trainer.queued,
            rollouts_in_progress=sum(self._admission.in_progress.values()),
            step_end_s=trainer.end_s,
            step_wait_s=trainer.wait_s,
            step_lag_max=trainer.lag_max,
        )

    # ---- events

    def _step_ends(self, now_s: float) -> None:
        self._trainer.finish()
        self._groups_at_step = self._admission.next_index
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
        engine.finish_segment()
        if engine.finished:
            self._hand_over(engine, now_s)
        version = engine.offered(now_s)
        held = version is not None and not self._admission.may_take(version).allowed
        if version is not None and not held:
            engine.take_weights(now_s)
        denied = False
        while engine.room > 0 and not denied:
            denied = bool(engine.finished) or not self._start_group(engine)
        (self._blocked.add if engine.finished else self._blocked.discard)(engine.index)
        (self._held.add if held else self._held.discard)(engine.index)
        (self._denied.add if denied else self._denied.discard)(engine.index)
        engine.begin(now_s)
        if engine.segment is not None:
            self._schedule_end(engine)

    def _hand_over(self, engine: SimulatedEngine, now_s: float) -> None:
        took = wrote = False
        while engine.finished and self._trainer.try_write(engine.finished[0]):
            engine.finished.popleft()
            took |= self._pump(now_s)
            wrote = True
        if not wrote:
            return
        waiting = self._denied | self._blocked if took else self._denied.copy()
        if self._held:
            older = self._admission.in_progress_before(self._publications[-1].version)
            if self._scenario.schedule.may_take_weights(older).allowed:
                waiting |= self._held
        for index in sorted(waiting - {engine.index}):
            self._wake(self._engines[index], now_s, later=index < engine.index)

    def _start_group(self, engine: SimulatedEngine) -> bool:
        """Start the next group, if the schedule allows it. Raises ValueError if no optimizer step ever ends."""
        scenario = self._scenario
        rollouts = (self._admission.next_index - self._groups_at_step) * scenario.group_size
        if rollouts > MAX_STEPS_OF_ROLLOUTS * scenario.batch_size + scenario.slots * scenario.engines:
            raise ValueError(
                f"no optimizer step after version {self._trainer.version} in {rollouts} rollouts; dropped so far: "
                f"{dict(self._trainer.dropped)}"
            )
        index = self._admission.claim(engine.index, engine.version, scenario.group_size).group
        if index is None:
            return False
        engine.submit(SimulatedGroup(index, scenario.workload.group(index)))
        return True

    def _pump(self, now_s: float) -> bool:
        idle = self._trainer.finish_s is None
        took = self._trainer.pump(now_s)
        self._admission.trainer = self._trainer.progress()
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


_ROWS = (
    ("samples/s", "samples_per_s", ".4g"),
    ("samples/s, after a fifth of the steps", "samples_per_s_later", ".4g"),
    ("trained tokens/s, after a fifth", "trained_tokens_per_s_later", ".4g"),
    ("lag, mean over tokens", "lag_mean", ".3g"),
    ("lag, largest", "lag_max", "d"),
    ("engine busy", "engine_busy_fraction", ".1%"),
    ("trainer busy", "trainer_busy_fraction", ".1%"),
)


def prediction_text(prediction: RunPrediction, measured: MeasuredRun | None = None) -> str:
    """The prediction of a run as a table, next to what the run measured if it is known."""
    engines = count(prediction.engines, "engine")
    title = f"{prediction.schedule}, {engines} of {prediction.slots} slots, {count(prediction.steps, 'step')}"
    table = new_table(title, "", "predicted", *(("measured", "off by") if measured else ()))
    for name, field, pattern in _ROWS:
        predicted, found = getattr(prediction, field), getattr(measured, field, None)
        off = f"{predicted / found - 1:+.1%}" if predicted is not None and found else "-"
        table.add_row(name, number(predicted, pattern), *((number(found, pattern), off) if measured else ()))
    table.add_row("lag, median and 99%", f"{prediction.lag_p50} and {prediction.lag_p99}")
    table.add_row("slots in use while decoding", f"{prediction.slots_used:.1%}")
    waits = f"mean {prediction.wait_s_mean:.3g} s, longest {prediction.wait_s_max:.3g} s"
    table.add_row("trainer waits before a step", waits)
    table.add_row("duration", f"{prediction.time_s:.4g} s")
    if prediction.rollouts_dropped:
        dropped = ", ".join(f"{reason} {rollouts}" for reason, rollouts in prediction.rollouts_dropped.items())
        table.add_row("rollouts dropped", f"{dropped}, of {prediction.rollouts_started} started")
    return rendered(table)

"""The event loop and its result. An event is a token boundary of an engine or the end of an optimizer step."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.scenario import (
    Scenario,
    SimulatedEngine,
    SimulatedGroup,
    SimulatedRollout,
    first_fifth,
)
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.report import count, in_terminal, number, table
from pipelinerl.types import TrainerProgress


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run. Times are in the unit of the costs and start when engines and trainer are ready.

    *_later               rates after the first fifth of the steps, when the pipeline has filled (see `first_fifth`)
    trained_tokens_*      of the rollouts in optimizer steps
    lag_*                 over all tokens with a gradient, equally weighted; `lag_tokens[k]` of them had lag k
    engine_busy_fraction  share of time in decode steps; the actor's own work, prefill and pauses are excluded
    slots_used            sequences in progress over H, averaged over the time of decode steps
    step_*                one entry per optimizer step: its end, and how long the trainer waited for data before it
    rollouts_*            every started rollout is trained, dropped, queued or in progress
    """

    schedule: str
    engines: int
    slots: int
    steps: int
    time_s: float
    samples_per_s: float
    samples_per_s_later: float
    trained_tokens_per_s_later: float
    lag_mean: float | None
    lag_max: int | None
    lag_p99: int | None
    lag_tokens: list[int]
    engine_busy_fraction: float
    slots_used: float
    trainer_busy_fraction: float
    rollouts_started: int
    rollouts_trained: int
    rollouts_dropped: dict[str, int]
    rollouts_queued: int
    rollouts_in_progress: int
    step_end_s: list[float]
    step_wait_s: list[float]


# ---- stream and trainer: groups in order, batches of B, one optimizer step after another, lag of every token


def tokens_by_lag(rollouts: Sequence[SimulatedRollout], version: int) -> npt.NDArray[np.int64]:
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

    end_s, wait_s, sampled_tokens   one entry per optimizer step
    lag_tokens                      number of tokens of each lag that were trained on, with a gradient
    dropped, replaced               dropped rollouts by reason, and rollouts that the stream replaced by newer ones
    published                       newest version of weights that engines may take
    finish_s                        when the step in progress will be done; None: no step is in progress
    """

    def __init__(self, scenario: Scenario, admission: AdmissionState) -> None:
        self.version = self.published = 0
        self.trained = 0
        self.busy_s = 0.0
        self.dropped: Counter[str] = Counter()
        self.replaced = 0
        self.end_s: list[float] = []
        self.wait_s: list[float] = []
        self.sampled_tokens: list[int] = []
        self.lag_tokens = np.zeros(0, dtype=np.int64)
        self.finish_s: float | None = None
        self._scenario, self._admission = scenario, admission
        self._stream: deque[SimulatedGroup] = deque()
        self._queue: deque[SimulatedRollout] = deque()
        self._batch: list[SimulatedRollout] = []
        self._free_s = 0.0
        self._counted_busy_s = 0.0

    @property
    def goal_reached(self) -> bool:
        return self.version >= self._scenario.steps

    def progress(self) -> TrainerProgress:
        """As of the last optimizer step, except that `dropped` is what it is at any time."""
        return TrainerProgress(version=self.version, trained=self.trained, dropped=self.dropped)

    def queued(self) -> int:
        """Rollouts in the stream, in the trainer's queue or in the step in progress."""
        return sum(len(group.rollouts) for group in self._stream) + len(self._queue) + len(self._batch)

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
                group, took = self._stream.popleft(), True
                dropped = group.work.dropped or (False,) * len(group.rollouts)
                left = [rollout for rollout, out in zip(group.rollouts, dropped, strict=True) if not out]
                if len(left) < len(group.rollouts):
                    self.dropped["preprocess"] += len(group.rollouts) - len(left)
                self._queue.extend(self._fresh(left))
                group.rollouts = []  # break the reference cycle, which would hold every group in memory
                self._work(now_s, len(group.work.lengths) * self._scenario.costs.prepare_s)
            else:
                break
        return took

    def finish(self) -> None:
        """Complete the step in progress, which increments the version."""
        assert self.finish_s is not None  # noqa: S101 - called only when a step ends
        now_s, batch = self.finish_s, self._batch
        found = tokens_by_lag([rollout for rollout in batch if rollout.used], self.version)
        longer, shorter = sorted((self.lag_tokens, found), key=len, reverse=True)
        self.lag_tokens = longer.copy()
        self.lag_tokens[: len(shorter)] += shorter
        self.version += 1
        self.trained += len(batch)
        self._queue = deque(self._fresh(self._queue))
        if self._scenario.schedule.publishes(self.version) or self.goal_reached:
            self.published = self.version
        before_s = self.end_s[-1] if self.end_s else 0.0
        self.wait_s.append(max(0.0, now_s - before_s - (self.busy_s - self._counted_busy_s)))
        self._counted_busy_s = self.busy_s
        self.end_s.append(now_s)
        self.sampled_tokens.append(sum(rollout.length for rollout in batch))
        self._batch, self.finish_s = [], None

    def _fresh(self, rollouts: Sequence[SimulatedRollout]) -> Sequence[SimulatedRollout]:
        """The rollouts that may be trained on; the others are too old, and counted as dropped."""
        schedule = self._scenario.schedule
        if (oldest := schedule.oldest_trained(self.version)) <= 0:
            return rollouts
        fresh = [one for one in rollouts if one.engine.update_versions[one.first_update] >= oldest]
        if too_old := len(rollouts) - len(fresh):
            self.dropped[schedule.too_old_reason] += too_old
        return fresh

    def _begin(self, now_s: float) -> None:
        """Begin a step on the first B rollouts of the queue, in the order of the real trainer."""
        scenario, costs = self._scenario, self._scenario.costs
        if scenario.schedule.in_rounds:
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
        self._admission = AdmissionState(scenario.schedule, processes=scenario.engines)
        self._admission.opened = True
        self._trainer = SimulatedTrainer(scenario, self._admission)
        self._admission.trainer = self._trainer.progress()
        self._engines = [SimulatedEngine(index, scenario) for index in range(scenario.engines)]
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
                self._boundary(self._engines[index], now_s)
        for engine in self._engines:
            engine.interrupt(now_s)
        return self._prediction(now_s)

    def _prediction(self, time_s: float) -> RunPrediction:
        """The prediction of a simulation that ended at `time_s`."""
        scenario, trainer, engines = self._scenario, self._trainer, self._engines
        later = first_fifth(trainer.version, scenario.schedule)
        later_s = time_s - (trainer.end_s[later - 1] if later else 0.0)
        decode_s = sum(engine.decode_s for engine in engines)
        lags = trainer.lag_tokens
        p99 = int(np.searchsorted(np.cumsum(lags), 0.99 * lags.sum())) if lags.sum() else None
        return RunPrediction(
            schedule=scenario.schedule.name,
            engines=scenario.engines,
            slots=scenario.slots,
            steps=trainer.version,
            time_s=time_s,
            samples_per_s=trainer.trained / time_s,
            samples_per_s_later=(trainer.version - later) * scenario.batch_size / later_s,
            trained_tokens_per_s_later=sum(trainer.sampled_tokens[later:]) / later_s,
            lag_mean=float(np.average(np.arange(len(lags)), weights=lags)) if len(lags) else None,
            lag_max=len(lags) - 1 if len(lags) else None,
            lag_p99=p99,
            lag_tokens=lags.tolist(),
            engine_busy_fraction=decode_s / (time_s * len(engines)),
            slots_used=sum(engine.slot_s for engine in engines) / (decode_s * scenario.slots),
            trainer_busy_fraction=trainer.busy_s / time_s,
            rollouts_started=self._admission.next_index * scenario.group_size,
            rollouts_trained=trainer.trained,
            rollouts_dropped=dict(+(trainer.dropped + Counter(stream_full=trainer.replaced))),
            rollouts_queued=trainer.queued(),
            rollouts_in_progress=sum(self._admission.in_progress.values()),
            step_end_s=trainer.end_s,
            step_wait_s=trainer.wait_s,
        )

    # ---- events

    def _step_ends(self, now_s: float) -> None:
        self._trainer.finish()
        self._admission.trainer = self._trainer.progress()
        self._groups_at_step = self._admission.next_index
        self._pump(now_s)
        published, waiting = self._trainer.published == self._trainer.version, self._denied | self._blocked
        for engine in self._engines:
            if (published and engine.active) or engine.index in waiting:
                self._wake(engine, now_s, later=False)

    def _boundary(self, engine: SimulatedEngine, now_s: float) -> None:
        """The actor's actions between two decode steps, in the real actor's order."""
        engine.finish_segment()
        if engine.finished:
            self._hand_over(engine, now_s)
        newest = self._trainer.published
        held = newest > engine.version and not self._admission.may_take(newest).allowed
        if newest > engine.version and not held:
            engine.take_weights(newest)
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
            older = self._admission.in_progress_before(self._trainer.published)
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
        if idle and self._trainer.finish_s is not None:
            heapq.heappush(self._events, (self._trainer.finish_s, TRAINER, 0, 0))
        return took

    def _wake(self, engine: SimulatedEngine, now_s: float, *, later: bool) -> None:
        """Something changed at `now_s`: process the engine at its next token boundary, or now if it is idle."""
        if engine.segment is None:
            engine.event_number += 1
            heapq.heappush(self._events, (now_s, ENGINE, engine.index, engine.event_number))
            return
        if engine.stop_at_boundary(now_s, later=later):
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


def prediction_text(prediction: RunPrediction, measured: Mapping[str, float | None] | None = None) -> str:
    """The prediction of a run as a table, next to what the run measured if it is known."""
    engines = count(prediction.engines, "engine")
    title = f"{prediction.schedule}, {engines} of {prediction.slots} slots, {count(prediction.steps, 'step')}"
    waits_s = prediction.step_wait_s
    dropped = ", ".join(f"{reason} {rollouts}" for reason, rollouts in prediction.rollouts_dropped.items())
    rows = []
    for name, field, pattern in _ROWS:
        predicted, found = getattr(prediction, field), (measured or {}).get(field)
        off = f"{predicted / found - 1:+.1%}" if predicted is not None and found else "-"
        row = {"what": name, "predicted": number(predicted, pattern)}
        rows.append(row | ({"measured": number(found, pattern), "off by": off} if measured else {}))
    return in_terminal(
        table(
            title,
            rows,
            f"99% of the tokens have a lag of at most {prediction.lag_p99}; {prediction.slots_used:.1%} of the slots are in "
            "use while decoding",
            f"{prediction.time_s:.4g} s; the trainer waits {fmean(waits_s):.3g} s for a step, at most {max(waits_s):.3g} s",
            *([f"rollouts dropped: {dropped}, of {prediction.rollouts_started} started"] if dropped else []),
        )
    )

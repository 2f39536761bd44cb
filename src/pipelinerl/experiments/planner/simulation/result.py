"""The prediction of a simulation: plain numbers that can be encoded as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import msgspec
import numpy as np

from pipelinerl.experiments.planner.simulation.engine import SimulatedEngine
from pipelinerl.experiments.planner.simulation.lag import LagStatistics
from pipelinerl.experiments.planner.simulation.scenario import Scenario
from pipelinerl.experiments.planner.simulation.trainer import SimulatedTrainer
from pipelinerl.interfaces import Schedule

POSITION_BINS = 32
TIMELINE_POINTS = 512


class PositionLag(msgspec.Struct, frozen=True):
    """Mean lag of the `tokens` trained on at positions `start <= p < end` of their completions."""

    start: int
    end: int
    tokens: int
    lag_mean: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run. Times are in the unit of the costs and start when engines and trainer are ready.

    *_later               rates after the first fifth of the steps, when the pipeline has filled (see `first_fifth`)
    tokens_per_s          all generated tokens, trained on or not; `trained_tokens` are of rollouts in optimizer steps
    lag_*                 over all tokens with a gradient, equally weighted; `lag_tokens[k]` of them had lag k
    engine_busy_fraction  share of time in decode steps, prefill included; the actor's own work and pauses are excluded
    slots_used            sequences in progress over H, averaged over the time of decode steps
    starved_fraction      share of time in which an engine had room but was not allowed to start more: draining or idle
    wait_s_*              time the trainer waited for data before a step
    in_progress           (time, sequences in progress per engine): generation batch size over time
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
    lag_by_position: list[PositionLag]
    engine_busy_fraction: float
    slots_used: float
    starved_fraction: float
    trainer_busy_fraction: float
    wait_s_mean: float
    wait_s_max: float
    tokens_generated: int
    rollouts_started: int
    rollouts_trained: int
    rollouts_dropped: dict[str, int]
    rollouts_queued: int
    rollouts_in_progress: int
    in_progress: list[tuple[float, float]]
    step_end_s: list[float]
    step_wait_s: list[float]
    step_lag_mean: list[float | None]
    step_lag_max: list[int | None]
    step_queued: list[int]


class Timeline:
    """A step function of time in bounded memory: evenly spaced samples; the spacing doubles when there are too many."""

    def __init__(self, points: int = TIMELINE_POINTS) -> None:
        self.samples: list[tuple[float, float]] = []
        self._points = points
        self._next_s = self._every_s = 0.0
        self._value = 0.0

    def add(self, time_s: float, value: float) -> None:
        """Set the value from `time_s` on. Times must not decrease."""
        while time_s > self._next_s:
            # The first spacing is far too short, but soon grows by doubling.
            self._every_s = self._every_s or time_s / self._points
            self.samples.append((self._next_s, self._value))
            if len(self.samples) >= self._points:
                self.samples = self.samples[::2]
                self._every_s *= 2
            self._next_s = self.samples[-1][0] + self._every_s
        self._value = value


def prediction(
    scenario: Scenario,
    trainer: SimulatedTrainer,
    engines: Sequence[SimulatedEngine],
    timeline: Timeline,
    *,
    time_s: float,
    started: int,
    outstanding: int,
) -> Prediction:
    """The prediction of a simulation that ended at `time_s`."""
    steps = trainer.steps
    later = first_fifth(len(steps.end_s), scenario.schedule)
    later_s = time_s - (steps.end_s[later - 1] if later else 0.0)
    tokens = sum(engine.tokens for engine in engines)
    engine_s = time_s * len(engines)
    busy_s = sum(engine.busy_s for engine in engines)
    decode_slot_s = sum(engine.decode_s for engine in engines) * scenario.slots
    lags = trainer.lag.tokens_by_lag()
    return Prediction(
        schedule=scenario.schedule.name,
        engines=scenario.engines,
        slots=scenario.slots,
        steps=trainer.version,
        time_s=time_s,
        samples_per_s=trainer.trained / time_s,
        samples_per_s_later=(trainer.version - later) * scenario.batch_size / later_s,
        tokens_per_s=tokens / time_s,
        trained_tokens_per_s_later=sum(steps.sampled_tokens[later:]) / later_s,
        lag_mean=float(np.average(np.arange(len(lags)), weights=lags)) if len(lags) else None,
        lag_max=len(lags) - 1 if len(lags) else None,
        lag_p50=_nearest_rank(lags, 0.50),
        lag_p99=_nearest_rank(lags, 0.99),
        lag_tokens=lags.tolist(),
        lag_by_position=_by_position(trainer.lag),
        engine_busy_fraction=busy_s / engine_s,
        slots_used=sum(engine.slot_s for engine in engines) / decode_slot_s,
        starved_fraction=sum(engine.starved_s for engine in engines) / engine_s,
        trainer_busy_fraction=trainer.busy_s / time_s,
        wait_s_mean=fmean(steps.wait_s),
        wait_s_max=max(steps.wait_s),
        tokens_generated=tokens,
        rollouts_started=started,
        rollouts_trained=trainer.trained,
        rollouts_dropped=dict(trainer.dropped),
        rollouts_queued=trainer.queued + trainer.in_step,
        rollouts_in_progress=outstanding - trainer.queued - trainer.in_step,
        in_progress=timeline.samples,
        step_end_s=steps.end_s,
        step_wait_s=steps.wait_s,
        step_lag_mean=trainer.lag.step_mean,
        step_lag_max=trainer.lag.step_max,
        step_queued=steps.queued,
    )


def first_fifth(steps: int, schedule: Schedule) -> int:
    """How many initial steps a steady rate excludes: a fifth, rounded down to whole rounds."""
    return max((version for version in range(1, steps // 5 + 1) if schedule.publishes(version)), default=0)


def _by_position(lag: LagStatistics) -> list[PositionLag]:
    """Mean lag in up to POSITION_BINS bins of equal width."""
    tokens_L, mean_L = lag.by_position()
    edges = np.unique(np.linspace(0, len(tokens_L), POSITION_BINS + 1).round().astype(int)).tolist()
    bins = []
    for start, end in pairwise(edges):
        tokens = int(tokens_L[start:end].sum())
        if tokens:
            bins.append(PositionLag(start, end, tokens, float(np.average(mean_L[start:end], weights=tokens_L[start:end]))))
    return bins


def _nearest_rank(counts: np.typing.NDArray[np.int64], fraction: float) -> int | None:
    """The smallest value k such that at least `fraction` of the values are <= k; `counts[k]` values equal k."""
    total = counts.sum()
    return int(np.searchsorted(np.cumsum(counts), fraction * total)) if total else None

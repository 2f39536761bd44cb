"""What the trainer publishes about itself: its status on the board, and the records of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import correlation, fmean, pstdev
from typing import Any, Literal

import msgspec
import xxhash

from pipelinerl.files import Lines
from pipelinerl.interfaces import Board
from pipelinerl.metrics.records import CollapseWatch, EngineRecord, PublishedRecord, StepRecord, TrainedRecord, TrainedSample
from pipelinerl.metrics.statistics import actor_total, engine_total, mean_metrics
from pipelinerl.status.board import StatusReporter, last_statuses
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.step import StepResult
from pipelinerl.types import (
    ENGINE,
    TRAINER,
    DroppedRollout,
    EngineProgress,
    ProbeReading,
    StageState,
    TrainerProgress,
    TrainingSample,
    WeightTransfer,
)

PRODUCTS = (
    "WARNING: log_product_sd is above 1 since step {}: under correction.sequence: truncate a few rollouts have most of the "
    "weight. Use correction.token: tv instead"
)


@dataclass(frozen=True, kw_only=True)
class TrainerOutput:
    """Where the trainer publishes its status and writes its records.

    `record` writes the record of a step. Records contain the time since `started_s` (of `time.monotonic`). `on_begin` is
    called before the first step, when all else has loaded. `weighs_products`: the weight of a rollout is the product of its
    ratios, and the user is warned when that is unreliable.
    """

    board: Board
    record: Callable[[StepRecord], object]
    trained_log: Lines
    published_log: Lines
    started_s: float
    on_begin: Callable[[], None] = lambda: None
    weighs_products: bool = False


class TrainerStatus:
    """Publishes the trainer's status, records its steps, and measures the time in which it works.

    `progress` returns the trainer's counts; times and the latest metrics are added here.
    """

    def __init__(self, output: TrainerOutput, progress: Callable[[], TrainerProgress]) -> None:
        self._output = output
        self._counts = progress
        self._begun = False
        self._ready_s = self._step_end_s = self._begin_s = time.monotonic()
        self._reporter = StatusReporter(output.board, TRAINER, time.monotonic)
        self._engine_before: tuple[float, int] | None = None
        self._busy_s = self._step_end_busy_s = 0.0
        self._spent_s = dict.fromkeys(("step", "publish", "saving"), 0.0)
        self._spent_cpu_s, self._step_end_cpu_s = dict(self._spent_s), 0.0
        self._latest: dict[str, float] = {}
        self._collapse = CollapseWatch()
        self._warnings: tuple[str, ...] = ()

    def report(self, state: StageState, detail: str, *, now: bool = False, waits_for: tuple[str, ...] = ()) -> None:
        self._reporter.report(state, detail, self._progress, now=now, waits_for=waits_for)

    def begin_session(self) -> None:
        """Call `on_begin`, once."""
        if not self._begun:
            self._begun = True
            self._output.on_begin()

    def begin(self) -> None:
        """Start to measure the time of an iteration. CPU seconds count from the first one."""
        self._begin_s, self._spent_s["publish"] = time.monotonic(), 0.0
        if not self._step_end_cpu_s:
            self._step_end_cpu_s, self._spent_cpu_s = time.process_time(), dict.fromkeys(self._spent_cpu_s, 0.0)

    def count_as_busy(self) -> None:
        """Count the iteration as work. Without this, it counts as waiting."""
        self._busy_s += time.monotonic() - self._begin_s

    @contextmanager
    def spending(self, on: Literal["step", "publish", "saving"]) -> Iterator[None]:
        """The time inside is in the record of this step, and for `saving` of the next one, by both clocks."""
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        yield
        spent_s = time.monotonic() - begin_s
        self._spent_s[on] += spent_s
        self._spent_cpu_s[on] += time.process_time() - begin_cpu_s
        self._busy_s += spent_s if on == "saving" else 0.0  # which is between two iterations

    def published(self, version: int, checksum: str, digests: Mapping[str, str]) -> None:
        """Record weights that the engines get."""
        short = {name: digest[:16] for name, digest in digests.items()}
        self._output.published_log.write(PublishedRecord(version=version, checksum=checksum, digests=short))

    def record(
        self,
        samples: Sequence[TrainingSample],
        result: StepResult,
        queue: SampleQueue,
        *,
        version: int,
        update: WeightTransfer | None,
        ess_guard_trips: int,
        refused: Sequence[Sequence[TrainingSample]],
    ) -> None:
        """Write the records of the step to `version`, and count the iteration as work. `refused`: as in `TrainedRecord`."""
        self.count_as_busy()
        now_s = time.monotonic()
        wait_s = (now_s - self._step_end_s) - (self._busy_s - self._step_end_busy_s)
        self._step_end_s, self._step_end_busy_s = now_s, self._busy_s
        now_cpu_s, spent_cpu_s = time.process_time(), self._spent_cpu_s
        other_cpu_s = now_cpu_s - self._step_end_cpu_s - sum(spent_cpu_s.values())
        self._step_end_cpu_s, self._spent_cpu_s = now_cpu_s, dict.fromkeys(spent_cpu_s, 0.0)
        output = self._output
        statuses = last_statuses(output.board)
        engine, actor, dropped = engine_total(statuses), actor_total(statuses), queue.take_dropped()
        record = StepRecord(
            version=version,
            time_s=now_s - output.started_s,
            train_s=now_s - self._begin_s,
            wait_s=max(0.0, wait_s),
            publish_s=self._spent_s["publish"],
            update=update,
            saving_s=self._spent_s["saving"],
            cpu_s=spent_cpu_s | {"other": other_cpu_s},
            queued=queue.queued,
            dropped=queue.dropped,
            sampled_length_mean=queue.sampled_length_mean,
            started_length_mean=actor.started_length_mean if actor else None,
            actor_dropped=dict(actor.rollouts_dropped) if actor else {},
            actor_dropped_tokens=dict(actor.dropped_tokens) if actor else {},
            ess_guard_trips=ess_guard_trips,
            engine=None if engine is None else self._engine_record(engine, now_s),
            **result.measured(),
            **batch_statistics(samples, dropped, version - 1),
        )
        self._spent_s["saving"] = 0.0
        output.record(record)
        self._collapse.observe(record)
        if output.weighs_products and not self._warnings and (record.log_product_sd or 0.0) > 1:
            self._warnings = (PRODUCTS.format(version),)
        # The number of an environment's metrics is unbounded, and the status board has little room.
        self._latest = msgspec.structs.replace(record, metrics={}, metric_counts={}).numbers()
        trained, *before = (tuple(trained_sample(sample, version - 1) for sample in one) for one in (samples, *refused))
        output.trained_log.write(
            TrainedRecord(version=version, samples=trained, refused=tuple(before), dropped=tuple(dropped))
        )

    def _engine_record(self, engine: EngineProgress, now_s: float) -> EngineRecord:
        """With the token rate since the previous record, unless engines were started again since then."""
        (before_s, before), rate = self._engine_before or (now_s, 0), None
        if now_s > before_s and engine.tokens_generated >= before:
            rate = (engine.tokens_generated - before) / (now_s - before_s)
        self._engine_before = (now_s, engine.tokens_generated)
        return EngineRecord(
            version=engine.version,
            in_progress=engine.in_progress,
            tokens_generated=engine.tokens_generated,
            tokens_per_s=rate,
            update_pause_s=engine.pauses_s[-1] if engine.pauses_s else None,
        )

    def probe_readings(self) -> Iterator[ProbeReading]:
        """The weight probes that the engines have published."""
        board = self._output.board
        for stage in board.stages():  # asked for at every turn: the others are not read
            if stage.startswith(ENGINE) and (status := board.read(stage)) and isinstance(status.progress, EngineProgress):
                yield from status.progress.probes

    def _progress(self) -> TrainerProgress:
        ready_s = time.monotonic() - self._ready_s
        notes = (*(f"COLLAPSED: {note}" for note in [self._collapse.now] if note), *self._warnings)
        return msgspec.structs.replace(
            self._counts(), busy_s=self._busy_s, ready_s=ready_s, latest=self._latest, notes=notes
        )


# ---- The records of an optimizer step


def batch_statistics(samples: Sequence[TrainingSample], dropped: Sequence[DroppedRollout], version: int) -> dict[str, Any]:
    """The fields of a `StepRecord` that follow from the batch. `version`: before the step; `dropped`: since the last one."""
    rewards = [sample.reward for sample in samples]
    lengths = [sample.sampled_count for sample in samples]
    lags = [version - min(sample.versions) for sample in samples]
    vary = len(set(lengths)) > 1 and len(set(lags)) > 1
    averaged = mean_metrics(sample.metrics for sample in samples)
    return {
        "reward_mean": fmean(rewards),
        "reward_read_mean": fmean([*rewards, *(one.reward for one in dropped)]),
        "reward_std": pstdev(rewards),
        "versions_in_batch": len({version for sample in samples for version in sample.versions}),
        "crossing_fraction": fmean(min(sample.versions) < max(sample.versions) for sample in samples),
        "completion_length_mean": fmean(lengths),
        "completion_length_max": max(lengths),
        "length_lag_correlation": correlation(lengths, lags) if vary else None,
        "metrics": averaged.means,
        "metric_counts": averaged.counts,
    }


def trained_sample(sample: TrainingSample, version: int) -> TrainedSample:
    """The record of a rollout that the weights of `version` were trained on."""
    segments = [msgspec.structs.replace(one, supervised=()) if one.supervised else one for one in sample.segments]
    content, credit = msgspec.msgpack.encode((segments, sample.versions)), sample.advantage
    by_token = isinstance(credit, tuple)
    return TrainedSample(
        id=sample.id,
        group_index=sample.group_index,
        tokens=sample.sampled_count,
        lag_min=version - max(sample.versions),
        lag_max=version - min(sample.versions),
        advantage=fmean(credit or [0.0]) if isinstance(credit, tuple) else credit,
        advantages_digest=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(credit)) if by_token else "",
        tokens_digest=xxhash.xxh3_64_hexdigest(content),
        logprobs_digest=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(sample.behaviour_logprobs)),
    )

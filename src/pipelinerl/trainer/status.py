"""What the trainer publishes about itself: its status on the board, and the records of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from pipelinerl.files import Lines
from pipelinerl.interfaces import Board, Verdict
from pipelinerl.metrics.records import CollapseWatch, EngineRecord, StepRecord
from pipelinerl.metrics.sinks import Sink
from pipelinerl.metrics.statistics import actor_total, engine_total
from pipelinerl.status.board import StatusReporter, last_statuses
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.records import PublishedRecord, TrainedRecord, TrainedSample, batch_statistics
from pipelinerl.trainer.step import StepResult
from pipelinerl.types import (
    ENGINE,
    TRAINER,
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

    Records contain the time since `started_s` (of `time.monotonic`; by default the trainer's start). `on_begin` is called
    before the first step, when all else has loaded. `weighs_products`: the weight of a rollout is the product of its ratios,
    and the user is warned when that is unreliable.
    """

    board: Board
    sink: Sink
    trained_log: Lines | None = None
    published_log: Lines | None = None
    on_begin: Callable[[], None] = lambda: None
    started_s: float | None = None
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
        self._started_s = self._ready_s if output.started_s is None else output.started_s
        self._reporter = StatusReporter(output.board, TRAINER, time.monotonic)
        self._engine_before: tuple[float, int] | None = None
        self._busy_s = self._step_end_busy_s = self._saving_s = self._publish_s = 0.0
        self._latest: dict[str, float] = {}
        self._collapse = CollapseWatch()
        self._refused: list[Sequence[TrainingSample]] = []
        self._warnings: tuple[str, ...] = ()

    def report(self, state: StageState, detail: str, *, now: bool = False) -> None:
        self._reporter.report(state, detail, self._progress, now=now)

    def report_wait(self, verdict: Verdict) -> None:
        self._reporter.report("waiting", verdict.waiting_for, self._progress, waits_for=verdict.waits_for)

    def begin_session(self) -> None:
        """Call `on_begin`, once."""
        if not self._begun:
            self._begun = True
            self._output.on_begin()

    def begin(self) -> None:
        """Start to measure the time of an iteration."""
        self._begin_s, self._publish_s = time.monotonic(), 0.0

    def count_as_busy(self) -> None:
        """Count the iteration as work. Without this, it counts as waiting."""
        self._busy_s += time.monotonic() - self._begin_s

    def published(self, version: int, checksum: str, digests: Mapping[str, str]) -> None:
        """Record weights that the engines get."""
        if self._output.published_log is not None:
            short = {name: digest[:16] for name, digest in digests.items()}
            self._output.published_log.write(PublishedRecord(version=version, checksum=checksum, digests=short))

    def refused(self, samples: Sequence[TrainingSample]) -> None:
        """A batch that the ESS guard rejected; it is in the record of the next step."""
        self._refused.append(samples)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """The time inside is in the record of this step."""
        begin_s = time.monotonic()
        yield
        self._publish_s = time.monotonic() - begin_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The time inside is in the record of the next step."""
        begin_s = time.monotonic()
        yield
        self._saving_s = time.monotonic() - begin_s
        self._busy_s += self._saving_s

    def record(
        self,
        samples: Sequence[TrainingSample],
        result: StepResult,
        queue: SampleQueue,
        *,
        version: int,
        update: WeightTransfer | None,
        ess_guard_trips: int,
    ) -> None:
        """Write the records of the step to `version`, and count the iteration as work."""
        now_s = time.monotonic()
        self._busy_s += now_s - self._begin_s
        wait_s = (now_s - self._step_end_s) - (self._busy_s - self._step_end_busy_s)
        self._step_end_s, self._step_end_busy_s = now_s, self._busy_s
        output = self._output
        statuses = last_statuses(output.board)
        engine, actor, drops = engine_total(statuses), actor_total(statuses), queue.take_drops()
        record = StepRecord(
            version=version,
            time_s=now_s - self._started_s,
            train_s=now_s - self._begin_s,
            wait_s=max(0.0, wait_s),
            publish_s=self._publish_s,
            update=update,
            saving_s=self._saving_s,
            queued=queue.queued,
            dropped=queue.dropped,
            sampled_length_mean=queue.sampled_length_mean,
            started_length_mean=actor.started_length_mean if actor else None,
            actor_dropped=dict(actor.rollouts_dropped) if actor else {},
            actor_dropped_tokens=dict(actor.dropped_tokens) if actor else {},
            ess_guard_trips=ess_guard_trips,
            engine=None if engine is None else self._engine_record(engine, now_s),
            **result.measured(),
            **batch_statistics(samples, drops, version - 1),
        )
        self._saving_s = 0.0
        output.sink.write(record)
        self._collapse.observe(record)
        if output.weighs_products and not self._warnings and (record.log_product_sd or 0.0) > 1:
            self._warnings = (PRODUCTS.format(version),)
        self._latest = record.headline()
        if output.trained_log is not None:
            batch, *refused = [
                tuple(TrainedSample.of(sample, version - 1) for sample in one) for one in (samples, *self._refused)
            ]
            output.trained_log.write(
                TrainedRecord(
                    version=version,
                    samples=batch,
                    refused=tuple(refused),
                    dropped_lengths=drops.lengths,
                    dropped_ids=drops.ids,
                )
            )
        self._refused = []

    def _engine_record(self, engine: EngineProgress, now_s: float) -> EngineRecord:
        """With the token rate since the previous record, unless engines were started again since then."""
        (before_s, before), rate = self._engine_before or (now_s, 0), None
        if now_s > before_s and engine.tokens_generated >= before:
            rate = (engine.tokens_generated - before) / (now_s - before_s)
        self._engine_before = (now_s, engine.tokens_generated)
        return EngineRecord.of(engine, rate)

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

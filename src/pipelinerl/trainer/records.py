"""The records of an optimizer step: its metrics, the rollouts that it trained on, and the weights that it published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import correlation, fmean, pstdev

import msgspec
import xxhash

from pipelinerl.metrics.records import EngineRecord, StepRecord
from pipelinerl.metrics.statistics import mean_metrics
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.step import StepResult
from pipelinerl.types import ActorProgress, EngineProgress, TrainingSample, WeightTransfer


def step_record(
    samples: Sequence[TrainingSample],
    result: StepResult,
    queue: SampleQueue,
    *,
    version: int,
    time_s: float,
    train_s: float,
    wait_s: float,
    publish_s: float,
    update: WeightTransfer | None,
    saving_s: float,
    ess_guard_trips: int,
    engine: EngineRecord | None,
    actor: ActorProgress | None,
) -> StepRecord:
    """The metrics record. `version`: the weights after the step; `reward_std` is the population's."""
    metrics = result.metrics
    rewards = [sample.reward for sample in samples]
    lengths = [sample.sampled_count for sample in samples]
    averaged = mean_metrics(sample.metrics for sample in samples)
    record = StepRecord(
        version=version,
        time_s=time_s,
        samples=result.samples,
        samples_skipped=result.samples_skipped,
        tokens_trained=result.tokens_trained,
        tokens_context=result.tokens_context,
        loss=result.loss,
        reward_mean=fmean(rewards),
        reward_read_mean=fmean(rewards + queue.dropped_rewards()),
        reward_std=pstdev(rewards),
        versions_in_batch=len({version for sample in samples for version in sample.versions}),
        crossing_fraction=fmean(min(sample.versions) < max(sample.versions) for sample in samples),
        completion_length_mean=fmean(lengths),
        completion_length_max=max(lengths),
        sampled_length_mean=queue.sampled_length_mean,
        started_length_mean=actor.started_length_mean if actor else None,
        length_lag_correlation=length_lag_correlation(samples, version - 1),
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        train_s=train_s,
        wait_s=wait_s,
        publish_s=publish_s,
        update=update,
        saving_s=saving_s,
        micro_batches=result.micro_batches,
        packing_efficiency=result.padding_free,
        queued=queue.queued,
        dropped=queue.dropped,
        ess_guard_trips=ess_guard_trips,
        actor_dropped=dict(actor.rollouts_dropped) if actor else {},
        actor_dropped_tokens=dict(actor.dropped_tokens) if actor else {},
        engine=engine,
        metrics=averaged.means,
        metric_counts=averaged.counts,
    )
    if metrics is None:
        return record
    measured = asdict(metrics)
    del measured["tokens"]  # recorded as `tokens_trained`
    return msgspec.structs.replace(record, **measured)


def length_lag_correlation(samples: Sequence[TrainingSample], version: int) -> float | None:
    """Pearson correlation over `samples` of the number of sampled tokens and the oldest token's lag.

    Lags are relative to `version`, the trainer's version before the step. None if all lengths or all lags are equal.
    """
    lengths = [sample.sampled_count for sample in samples]
    lags = [version - min(sample.versions) for sample in samples]
    return correlation(lengths, lags) if len(set(lengths)) > 1 and len(set(lags)) > 1 else None


class EngineWatch:
    """Computes the engine's token rate between records."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def record(self, progress: EngineProgress, time_s: float) -> EngineRecord:
        rate = None
        if self._last is not None and time_s > self._last[0] and progress.tokens_generated >= self._last[1]:
            rate = (progress.tokens_generated - self._last[1]) / (time_s - self._last[0])
        self._last = (time_s, progress.tokens_generated)
        return EngineRecord.of(progress, rate)


# ---- which rollouts were trained on: one line per optimizer step in `rollouts/trained.jsonl`


class TrainedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a step: its number of sampled tokens, their smallest and largest lag, and its advantage.

    The digests are of what was trained on: `tokens_digest` of the token ids, which of them were sampled, and their versions;
    `logprobs_digest` of the behaviour log-probabilities. With them a replay finds a rollout whose record was changed.
    """

    id: str
    group_index: int
    tokens: int
    lag_min: int
    lag_max: int
    advantage: float = 0.0
    tokens_digest: str = ""
    logprobs_digest: str = ""

    @classmethod
    def of(cls, sample: TrainingSample, version: int) -> TrainedSample:
        """`version`: the weights before the step."""
        content = msgspec.msgpack.encode((sample.segments, sample.versions))
        return cls(
            id=sample.id,
            group_index=sample.group_index,
            tokens=sample.sampled_count,
            lag_min=version - max(sample.versions),
            lag_max=version - min(sample.versions),
            advantage=sample.advantage,
            tokens_digest=xxhash.xxh3_64_hexdigest(content),
            logprobs_digest=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(sample.behaviour_logprobs)),
        )


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. `version`: the weights after it, and `samples` are in the order of the batch.

    `refused` are the batches that the ESS guard rejected since the previous record. `dropped_lengths` are the sampled tokens
    of each rollout that the trainer dropped since then, by reason; `dropped_ids` are the ids of these rollouts. A resumed
    run repeats the steps after its checkpoint: if several lines have the same version, the last one counts.
    """

    version: int
    samples: tuple[TrainedSample, ...]
    refused: tuple[tuple[TrainedSample, ...], ...] = ()
    dropped_lengths: dict[str, list[int]] = {}
    dropped_ids: dict[str, list[str]] = {}


def trained_record(
    samples: Sequence[TrainingSample],
    *,
    version: int,
    refused: Sequence[Sequence[TrainingSample]] = (),
    dropped_lengths: Mapping[str, list[int]],
    dropped_ids: Mapping[str, list[str]],
) -> TrainedRecord:
    """The record of the step from the weights of `version` to `version + 1`."""
    return TrainedRecord(
        version=version + 1,
        samples=tuple(TrainedSample.of(sample, version) for sample in samples),
        refused=tuple(tuple(TrainedSample.of(sample, version) for sample in batch) for batch in refused),
        dropped_lengths=dict(dropped_lengths),
        dropped_ids=dict(dropped_ids),
    )


class PublishedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `published.jsonl`: weights that the engines got. `digests`: the first 16 hex digits of each tensor's.

    A resumed run publishes the weights of its checkpoint again: if several lines have the same version, the last one counts.
    """

    version: int
    checksum: str
    digests: dict[str, str]

    @classmethod
    def of(cls, version: int, checksum: str, digests: Mapping[str, str]) -> PublishedRecord:
        return cls(version=version, checksum=checksum, digests={name: digest[:16] for name, digest in digests.items()})

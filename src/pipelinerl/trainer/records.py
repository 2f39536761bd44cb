"""The records of an optimizer step: its metrics, the rollouts that it trained on, and the weights that it published."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation, fmean, pstdev
from typing import Any

import msgspec
import xxhash

from pipelinerl.metrics.statistics import mean_metrics
from pipelinerl.trainer.queue import Drops
from pipelinerl.types import TrainingSample


def batch_statistics(samples: Sequence[TrainingSample], drops: Drops, version: int) -> dict[str, Any]:
    """The fields of a `StepRecord` that follow from the batch. `version`: before the step; `drops`: since the last one."""
    rewards = [sample.reward for sample in samples]
    lengths = [sample.sampled_count for sample in samples]
    lags = [version - min(sample.versions) for sample in samples]
    vary = len(set(lengths)) > 1 and len(set(lags)) > 1
    averaged = mean_metrics(sample.metrics for sample in samples)
    return {
        "reward_mean": fmean(rewards),
        "reward_read_mean": fmean(rewards + drops.rewards),
        "reward_std": pstdev(rewards),
        "versions_in_batch": len({version for sample in samples for version in sample.versions}),
        "crossing_fraction": fmean(min(sample.versions) < max(sample.versions) for sample in samples),
        "completion_length_mean": fmean(lengths),
        "completion_length_max": max(lengths),
        "length_lag_correlation": correlation(lengths, lags) if vary else None,
        "metrics": averaged.means,
        "metric_counts": averaged.counts,
    }


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


class PublishedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `published.jsonl`: weights that the engines got. `digests`: the first 16 hex digits of each tensor's.

    A resumed run publishes the weights of its checkpoint again: if several lines have the same version, the last one counts.
    """

    version: int
    checksum: str
    digests: dict[str, str]

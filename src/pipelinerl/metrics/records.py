"""The records that a run writes: one `StepRecord` per optimizer step, one `EvaluationRecord` per evaluation.

Times are seconds. Every measured number is `float | None`: None means that there was nothing to measure (a step whose
samples all have zero gradient has no ESS) or that the number was not finite, which JSON cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import read_json_lines
from pipelinerl.types import EngineProgress, FinishReason, VersionSpan, WeightTransfer

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
REWARD = "/reward"
"""Suffix of an environment's reward among the metrics of a mixture's rollouts: `NAME/reward`."""

When = Literal["before", "online", "after"]
"""When an evaluation takes place; `online` evaluations run during training."""


class MetricMeans(NamedTuple):
    """Means of rollouts' metrics by name, each over the `counts` rollouts that have it."""

    means: dict[str, float]
    counts: dict[str, int]


def mean_metrics(rollouts: Iterable[Mapping[str, float]]) -> MetricMeans:
    """Means of the metrics of these rollouts, sorted by name. A mean that overflows a float is left out."""
    values: dict[str, list[float]] = {}
    for metrics in rollouts:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    means: dict[str, float] = {}
    for name in sorted(values):
        with suppress(OverflowError):
            means[name] = fmean(values[name])
    return MetricMeans(means, {name: len(values[name]) for name in means})


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's status as read by the trainer at the end of a step; counters are over the session.

    `tokens_per_s` is the rate since the previous step, `update_pause_s` the latest pause for a weight update.
    """

    version: int
    in_progress: int
    tokens_generated: int
    tokens_per_s: float | None = None
    update_pause_s: float | None = None

    @classmethod
    def of(cls, progress: EngineProgress, tokens_per_s: float | None = None) -> EngineRecord:
        return cls(
            version=progress.version,
            in_progress=progress.in_progress,
            tokens_generated=progress.tokens_generated,
            tokens_per_s=tokens_per_s,
            update_pause_s=progress.pauses_s[-1] if progress.pauses_s else None,
        )


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. Batch statistics are over the rollouts (`samples`) or sampled tokens of that step alone.

    version                 version of the weights after the step (1 after the first step)
    time_s                  end of the step, since the run started; a resumed run continues from its last record
    samples                 rollouts in the step, including `samples_skipped` without gradient (advantage 0)
    tokens_trained          sampled tokens with a gradient; `tokens_context` counts prompt tokens computed by the model
    completion_length_*     sampled tokens per rollout of the batch, including skipped rollouts
    sampled_length_mean     the same over all rollouts that the actor delivered recently, trained on or not. If dropping
                            biases training to some lengths, this mean differs from completion_length_mean
    started_length_mean     the same in order of *start*: over the latest groups that started before the oldest unfinished
                            one. Not biased to short completions, which finish first; includes attempts that the actor
                            dropped
    length_lag_correlation  correlation, over the rollouts of the batch, of sampled tokens and lag of the oldest token
    ess                     effective sample size (sum w)^2 / (N sum w^2), in (0, 1]
    kl_behaviour_policy     KL(mu || pi) per token in nats: mean of log mu - log pi (the k1 estimate; `_k3` is the k3 one)
    lag_*                   optimizer steps between the weights that sampled a token and the weights being trained
    versions_in_batch       number of weight versions that sampled the batch; 1 if weights change between rounds only
    masked_fraction         share of tokens that get no gradient from their advantage because of a mask or the loss's clip
    truncated_fraction      share of tokens whose importance weight was replaced by a limit
    longest_*               over the tokens of the longest quarter of the rollouts: lag_mean, and share masked or truncated
    weight_*                importance weights pi/mu before any limit
    on_policy_gap           largest |log pi - log mu| over tokens of lag 0. Zero up to numerics if engine and trainer agree,
                            except in sequences that span an update with kept KV entries
    train_s, wait_s         time in the step, and time that the trainer waited for its data before the step
    publish_s               part of train_s: copying the weights for the engines. Includes waiting for the answers to the
                            previous update
    update                  the latest weight update that every engine has. It can be the previous step's: a broadcast
                            goes on during the next step
    saving_s                time to write a checkpoint or a copy of the weights between the previous step and this one
    packing_efficiency      tokens / (rows x row length) over the step's micro-batches
    queued                  rollouts queued at the trainer after the step
    dropped                 rollouts dropped at the trainer so far, by reason
    actor_dropped           rollouts dropped by the actors in this session, by reason; `actor_dropped_tokens` counts their
                            sampled tokens
    ess_guard_trips         batches rejected so far because of their ESS
    metrics                 means of the rollouts' metrics by name; `metric_counts`: number of rollouts that have each
    """

    version: int
    time_s: float
    samples: int
    samples_skipped: int = 0
    tokens_trained: int = 0
    tokens_context: int = 0
    loss: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    completion_length_mean: float | None = None
    completion_length_max: int | None = None
    sampled_length_mean: float | None = None
    started_length_mean: float | None = None
    length_lag_correlation: float | None = None
    ess: float | None = None
    kl_behaviour_policy: float | None = None
    kl_behaviour_policy_k3: float | None = None
    lag_mean: float | None = None
    lag_max: int | None = None
    lag_p50: int | None = None
    lag_p99: int | None = None
    versions_in_batch: int | None = None
    masked_fraction: float | None = None
    truncated_fraction: float | None = None
    longest_lag_mean: float | None = None
    longest_limited_fraction: float | None = None
    entropy_mean: float | None = None
    weight_mean: float | None = None
    weight_max: float | None = None
    on_policy_gap: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    train_s: float = 0.0
    wait_s: float = 0.0
    publish_s: float = 0.0
    update: WeightTransfer | None = None
    saving_s: float = 0.0
    micro_batches: int = 0
    packing_efficiency: float | None = None
    queued: int = 0
    dropped: dict[str, int] = {}
    actor_dropped: dict[str, int] = {}
    actor_dropped_tokens: dict[str, int] = {}
    ess_guard_trips: int = 0
    engine: EngineRecord | None = None
    metrics: dict[str, float] = {}
    metric_counts: dict[str, int] = {}

    def numbers(self) -> dict[str, float]:
        """All finite numbers by field name; nested names are `engine/version`, `dropped/stale`, `metrics/words/reward`."""
        flat: dict[str, float] = {}
        _flatten("", msgspec.to_builtins(self), flat)
        return flat

    def headline(self) -> dict[str, float]:
        """`numbers` without environment metrics, whose number is unbounded; for the status board, which has little room."""
        return msgspec.structs.replace(self, metrics={}, metric_counts={}).numbers()


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: each held-out problem is attempted once.

    version           version of the weights at the start; during an `online` evaluation the weights change
    version_*         lowest, highest and mean version over all sampled tokens; None without tokens
    time_s            end of the evaluation
    reward_mean       mean over all problems, counting failed attempts as 0; `failed` counts them by reason
    completion_*      sampled tokens per attempt, without failed attempts
    skipped           evaluations that were due since the previous record but skipped: another was running, or training ended
    metrics           means of the attempts' metrics by name; `metric_counts`: number of attempts that have each
    """

    when: When
    version: int
    time_s: float
    problems: int
    reward_mean: float | None = None
    reward_standard_error: float | None = None
    completion_length_mean: float | None = None
    completion_length_p50: float | None = None
    completion_length_p99: float | None = None
    version_min: int | None = None
    version_max: int | None = None
    version_mean: float | None = None
    failed: dict[str, int] = {}
    skipped: int = 0
    metrics: dict[str, float] = {}
    metric_counts: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        rewards: Sequence[float],
        completion_lengths: Sequence[int],
        *,
        when: When,
        version: int,
        time_s: float,
        tokens_by_version: Mapping[int, int] | None = None,
        failed: Mapping[str, int] | None = None,
        skipped: int = 0,
        metrics: Iterable[Mapping[str, float]] = (),
    ) -> EvaluationRecord:
        """Statistics of one evaluation: one reward for each problem, one number of sampled tokens for each success.

        The standard error is s / sqrt(n) with the sample standard deviation s; None for fewer than two problems.
        """
        count = len(rewards)
        tokens = tokens_by_version or {}
        averaged = mean_metrics(metrics)
        return cls(
            when=when,
            version=version,
            time_s=time_s,
            problems=count,
            reward_mean=fmean(rewards) if count else None,
            reward_standard_error=stdev(rewards) / math.sqrt(count) if count > 1 else None,
            completion_length_mean=fmean(completion_lengths) if completion_lengths else None,
            completion_length_p50=quantile(completion_lengths, 0.5),
            completion_length_p99=quantile(completion_lengths, 0.99),
            version_min=min(tokens, default=None),
            version_max=max(tokens, default=None),
            version_mean=fmean(tokens, tokens.values()) if tokens else None,
            failed=dict(failed or {}),
            skipped=skipped,
            metrics=averaged.means,
            metric_counts=averaged.counts,
        )

    @property
    def newest_version(self) -> int:
        """The newest version of weights that was used."""
        return max(self.version, self.version_max or 0)

    def numbers(self) -> dict[str, float]:
        """The results as `evaluation/NAME`, without the time and the versions, which are the position on the axis."""
        fields = msgspec.structs.asdict(self)
        axis = {"when", "version", "version_min", "version_max", "version_mean", "time_s", "skipped"}
        flat: dict[str, float] = {}
        _flatten("evaluation/", {key: fields[key] for key in fields if key not in axis}, flat)
        return flat


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and its answer.

    With several turns, `prompt` is that of the first turn and `completion` the model's texts in order; `token_ids`,
    `weight_versions` and `length` cover all sampled tokens. A failed attempt has reward 0, and `failure` says why.
    """

    problem_id: str
    reward: float
    prompt: str = ""
    completion: str = ""
    token_ids: tuple[int, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    length: int = 0
    finish_reason: FinishReason | None = None
    failure: str | None = None
    metrics: dict[str, float] = {}


class TimelineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine at `time_s`, on the axis of `StepRecord.time_s`; `tokens_generated` is over the session.

    `in_progress` sequences have a slot, `queued` requests wait for one. Includes requests of evaluations.
    """

    worker: int
    time_s: float
    in_progress: int
    queued: int
    tokens_generated: int
    version: int


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile with linear interpolation between order statistics; None if `values` is empty."""
    return float(np.quantile(values, q)) if len(values) else None


T = TypeVar("T")
Record = StepRecord | EvaluationRecord
RecordT = TypeVar("RecordT", StepRecord, EvaluationRecord)


def read_lines(path: Path, kind: type[T], repeats: Callable[[T, T], bool] = lambda _old, _new: False) -> list[T]:
    """The records of a JSON lines file of a run, without those that a later record `repeats(old, new)`.

    A run that resumes from a checkpoint repeats the steps after it: the later lines count. A last line without a line break
    is left out: it was being written when the process died.

    Raises FileNotFoundError, and RunDirectoryError for a file that can't be read and for any other line that is not such a
    record.
    """
    try:
        written = read_json_lines(path, kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(f"damaged records: {error}; repair or delete the line") from error
    records: list[T] = []
    for record in written:
        while records and repeats(records[-1], record):
            records.pop()
        records.append(record)
    return records


def read_records(path: Path, kind: type[RecordT]) -> list[RecordT]:
    """The records of a JSONL file, in order of version; empty if the file is missing or empty.

    Of equal versions the later line counts, and earlier lines with a later version than a repeated one are left out. The
    same holds for online evaluations that used weights after the checkpoint. Raises RunDirectoryError as `read_lines` does.
    """
    try:
        return read_lines(path, kind, _superseded)
    except FileNotFoundError:
        return []


def _superseded(old: Record, new: Record) -> bool:
    if isinstance(old, StepRecord) or isinstance(new, StepRecord):
        return old.version >= new.version
    return old.when == new.when and (old.version >= new.version or old.newest_version > new.version)


def _flatten(prefix: str, values: dict[str, object], into: dict[str, float]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _flatten(f"{prefix}{key}/", value, into)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            into[prefix + key] = value

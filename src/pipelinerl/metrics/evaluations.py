"""The records of evaluations: one `EvaluationRecord` each, and one `EvaluatedProblem` for each held-out problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

import msgspec

from pipelinerl.metrics.statistics import flat_numbers, mean_metrics, quantile
from pipelinerl.types import FinishReason, VersionSpan

When = Literal["before", "online", "after"]
"""When an evaluation takes place; `online` evaluations run during training."""


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
        return flat_numbers({key: fields[key] for key in fields if key not in axis}, "evaluation/")


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and its answer.

    With several turns, `prompt` is that of the first turn, and `completion` is the rest of the conversation: the model's
    texts, and what the environment added between them (not if the last prompt does not continue the first). `token_ids`,
    `weight_versions` and `length` are of sampled tokens only. A failed attempt has reward 0, and `failure` says why.
    `evaluation_set` is the name of the further set that the problem belongs to, if any.
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
    evaluation_set: str = ""

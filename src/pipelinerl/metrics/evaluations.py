"""The records of evaluations: one `EvaluationRecord` each, and one `EvaluatedProblem` for each held-out problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

import msgspec

from pipelinerl.metrics.statistics import REWARD, flat_numbers, mean_metrics, quantile
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
        cls, problems: Sequence[EvaluatedProblem], *, when: When, version: int, time_s: float, skipped: int = 0
    ) -> EvaluationRecord:
        """Statistics of one evaluation, over the problems that belong to no further set; those of a set have a metric.

        The standard error is s / sqrt(n) with the sample standard deviation s; None for fewer than two problems.
        """
        own = [one for one in problems if not one.evaluation_set]
        answered = [one for one in own if one.failure is None]
        rewards, lengths = [one.reward for one in own], [one.length for one in answered]
        tokens: Counter[int] = Counter()
        for span in (span for one in problems for span in one.weight_versions):
            tokens[span.version] += span.end - span.start
        of_sets = [{f"{one.evaluation_set}{REWARD}": one.reward} for one in problems if one.evaluation_set]
        averaged = mean_metrics([*(one.metrics for one in answered), *of_sets])
        return cls(
            when=when,
            version=version,
            time_s=time_s,
            problems=len(own),
            reward_mean=fmean(rewards) if rewards else None,
            reward_standard_error=stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
            completion_length_mean=fmean(lengths) if lengths else None,
            completion_length_p50=quantile(lengths, 0.5),
            completion_length_p99=quantile(lengths, 0.99),
            version_min=min(tokens, default=None),
            version_max=max(tokens, default=None),
            version_mean=fmean(tokens, tokens.values()) if tokens else None,
            failed=dict(Counter(one.failure.partition(":")[0] for one in own if one.failure is not None)),
            skipped=skipped,
            metrics=averaged.means,
            metric_counts=averaged.counts,
        )

    @property
    def name(self) -> str:
        """`before`, `after`, or `v20`: online, begun with the weights of version 20."""
        return f"v{self.version}" if self.when == "online" else self.when

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

    With several turns, `prompt` is the first turn's, and `completion` is the rest of the conversation: the model's
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

"""The records that an evaluation writes: attempts, pass rates, and the summary over all models."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pipelinerl.actor.evaluation import EvaluatedProblem
from pipelinerl.experiments.statistics import Interval

Status = Literal["unfinished", "interrupted", "finished"]


class AttemptRecord(EvaluatedProblem, frozen=True, kw_only=True):
    """A line of `attempts.jsonl`: attempt number `attempt` (0, 1, ...) at problem number `number` of the evaluation."""

    number: int
    attempt: int
    passed: bool


class PassRate(msgspec.Struct, frozen=True):
    """A line of `pass_rates.jsonl`. A failed attempt counts as one that did not pass."""

    id: str
    attempts: int
    passes: int


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an evaluation. An environment may request fewer than `max_tokens`."""

    environment: str
    environment_args: dict[str, Any]
    environment_seed: int
    problems: int
    training_problems: bool
    attempts: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    pass_at: float
    seed: int
    resamples: int
    level: float


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over problems: the reward (mean@K), and pass@k by k."""

    reward: Interval
    passes: dict[int, Interval]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one model.

    `problems` counts the problems with all K attempts; `estimates` are over these only (None if there are none).
    `attempts` counts all attempts, `failed` those that gave no rollout, by reason. Failed attempts count as reward 0 and
    not passed. `length_mean` (sampled tokens) and `cut` (the share that ended at the token limit) are over the attempts
    that did not fail. `metrics` are means of the environment's metrics, each over the `metric_counts` attempts that have
    it. `minus_first` is this model minus the first one, paired by problem.
    """

    name: str
    path: str
    version: int | None
    folder: str
    problems: int
    attempts: int
    estimates: Estimates | None
    length_mean: float | None
    cut: float | None
    failed: dict[str, int]
    metrics: dict[str, float] = {}
    metric_counts: dict[str, int] = {}
    minus_first: Estimates | None = None


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Status `unfinished`: the evaluation is still running, or its process was killed."""

    status: Status
    settings: EvaluationSettings
    models: tuple[ModelResult, ...] = ()

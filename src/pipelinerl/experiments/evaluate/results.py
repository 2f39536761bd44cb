"""The results of an evaluation: its records, the estimates of one model, and the table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from pipelinerl.experiments.evaluate.models import Target
from pipelinerl.experiments.statistics import Floats, Interval, mean_intervals, pass_at_k, powers_of_two
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.metrics.statistics import mean_metrics
from pipelinerl.report import PageSection, number, table
from pipelinerl.types import Problem

Status = Literal["unfinished", "interrupted", "finished"]


class AttemptRecord(EvaluatedProblem, frozen=True, kw_only=True):
    """A line of `attempts.jsonl`: attempt number `attempt` (0, 1, ...) at problem number `number` of the evaluation."""

    number: int
    attempt: int
    passed: bool


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
    resamples: int = 2000
    level: float = 0.95


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over problems: the reward (mean@K), and pass@k by k."""

    reward: Interval
    passes: dict[int, Interval]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one model.

    `problems` counts the problems with all K attempts; `estimates` are over these only (None if there are none).
    `attempts` counts all attempts, `failed` those that gave no rollout, by reason. Failed attempts count as reward 0 and
    not passed. `length_mean` (sampled tokens) and `cut` (the share that ended at the token limit) are over the attempts
    that did not fail. `metrics` are means of the environment's metrics, each over the attempts that have it. `minus_first`
    is this model minus the first one, paired by problem.
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
    metrics: dict[str, float]
    minus_first: Estimates | None


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Status `unfinished`: the evaluation is still running, or its process was killed."""

    status: Status
    settings: EvaluationSettings
    models: tuple[ModelResult, ...] = ()


# ---- the estimates of one model


class PassRate(msgspec.Struct, frozen=True):
    """A line of `pass_rates.jsonl`. A failed attempt counts as one that did not pass."""

    id: str
    attempts: int
    passes: int


class Tally:
    """The attempts of one model at `problems`, without their texts and tokens, by the number of the problem."""

    def __init__(self, problems: Sequence[Problem], settings: EvaluationSettings) -> None:
        self._problems = problems
        self._settings = settings
        self._found: defaultdict[int, list[AttemptRecord]] = defaultdict(list)

    def add(self, record: AttemptRecord) -> None:
        short = msgspec.structs.replace(record, prompt="", completion="", token_ids=(), weight_versions=())
        self._found[record.number].append(short)

    @property
    def attempts(self) -> list[AttemptRecord]:
        return [one for records in self._found.values() for one in records]

    def pass_rates(self) -> list[PassRate]:
        """The pass rate of every attempted problem, in order: lines of `pass_rates.jsonl`."""
        return [
            PassRate(self._problems[number].id, len(records), sum(one.passed for one in records))
            for number, records in sorted(self._found.items())
        ]

    def values(self) -> dict[int, Floats]:
        """Problem number -> mean reward, pass@1, pass@2, pass@4, ..., for problems with all of their attempts."""
        wanted = self._settings.attempts
        found: dict[int, Floats] = {}
        for place, records in sorted(self._found.items()):
            if len(records) == wanted:
                passes = sum(one.passed for one in records)
                at_k = [pass_at_k(wanted, passes, k) for k in powers_of_two(wanted)]
                found[place] = np.array([sum(one.reward for one in records) / wanted, *at_k])
        return found

    def result(self, target: Target, version: int | None, first: Tally | None) -> ModelResult:
        """The model's results. `first`: the attempts of the first model, to compare with; None for that model itself."""
        values, attempts = self.values(), self.attempts
        others = first.values() if first else {}
        answered = [one for one in attempts if one.failure is None]
        failed = Counter(one.failure.partition(":")[0] for one in attempts if one.failure is not None)
        difference = {number: values[number] - others[number] for number in values if number in others}
        return ModelResult(
            name=target.name,
            path=target.model.path,
            version=version,
            folder=target.folder,
            problems=len(values),
            attempts=len(attempts),
            estimates=self._estimates(values),
            length_mean=sum(one.length for one in answered) / len(answered) if answered else None,
            cut=sum(one.finish_reason == "length" for one in answered) / len(answered) if answered else None,
            failed=dict(sorted(failed.items())),
            metrics=mean_metrics(one.metrics for one in answered).means,
            minus_first=self._estimates(difference),
        )

    def _estimates(self, values: Mapping[int, Floats]) -> Estimates | None:
        if not values:
            return None
        settings = self._settings
        reward, *passes = mean_intervals(
            np.array(list(values.values())), resamples=settings.resamples, seed=settings.seed, level=settings.level
        )
        return Estimates(reward=reward, passes=dict(zip(powers_of_two(settings.attempts), passes, strict=True)))


# ---- the table: one row per model, with intervals below the estimates


def evaluation_sections(summary: EvaluationSummary) -> list[PageSection]:
    """The results, and the means of the environment's metrics, if there are any."""
    settings, models = summary.settings, summary.models
    compared = len(models) > 1
    title = f"{settings.environment}: {settings.attempts} attempts at each problem, temperature {settings.temperature:g}"
    title += ", training problems" if settings.training_problems else ""
    notes = [f"in brackets: {settings.level:.0%} intervals over problems" + ("; differences are paired" if compared else "")]
    if summary.status == "interrupted":
        notes.append("INTERRUPTED: short answers end first, so the counted problems are not typical")
    sections = [table(title, [_cells(model, settings.attempts, compared) for model in models], *notes)]
    if metrics := sorted({metric for model in models for metric in model.metrics}):
        means = [
            {"metric": metric} | {model.name: number(model.metrics.get(metric), ".4g") for model in models}
            for metric in metrics
        ]
        sections.append(table("Metrics", means, "means over the attempts that have the metric"))
    return sections


def _cells(model: ModelResult, attempts: int, compared: bool) -> dict[str, str]:
    mean, ks = f"mean@{attempts}", powers_of_two(attempts)
    cells = {"model": model.name, "problems": str(model.problems), mean: "-"} | {f"pass@{k}": "-" for k in ks}
    if found := model.estimates:
        cells |= {mean: _cell(found.reward, ".3f")} | {f"pass@{k}": _cell(one, ".3f") for k, one in found.passes.items()}
    if compared:
        paired = model.minus_first
        cells[f"{mean} - first"] = _cell(paired.reward, "+.3f") if paired else ""
        cells["pass@1 - first"] = _cell(paired.passes[1], "+.3f") if paired else ""
    failed = "\n".join(f"{amount} {reason}" for reason, amount in model.failed.items())
    return cells | {
        "tokens": number(model.length_mean, ".1f"),
        "cut": number(model.cut, ".1%"),
        "failed": failed or "0",
    }


def _cell(interval: Interval, pattern: str) -> str:
    return f"{interval.mean:{pattern}}\n({interval.low:{pattern}}, {interval.high:{pattern}})"

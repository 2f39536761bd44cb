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
from pipelinerl.report import number
from pipelinerl.report.sections import PageSection
from pipelinerl.types import Problem

Status = Literal["unfinished", "interrupted", "finished"]


class AttemptRecord(EvaluatedProblem, frozen=True, kw_only=True):
    """A line of `attempts.jsonl`: attempt number `attempt` (0, 1, ...) at problem number `number` of the evaluation."""

    number: int
    attempt: int
    passed: bool


class ProblemPassRate(msgspec.Struct, frozen=True):
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


# ---- the estimates of one model


class Tally:
    """Running counts over the attempts of one model at `problems`."""

    def __init__(self, problems: Sequence[Problem], settings: EvaluationSettings) -> None:
        self._ids = [problem.id for problem in problems]
        self._settings = settings
        self._rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._passes: Counter[int] = Counter()
        self._failed: Counter[str] = Counter()
        self._metrics: list[dict[str, float]] = []
        self._tokens = 0
        self._cut = 0
        self.attempts = 0
        self.last_failure = ""

    def add(self, record: AttemptRecord) -> None:
        self.attempts += 1
        self._rewards[record.number].append(record.reward)
        self._passes[record.number] += record.passed
        if record.failure is not None:
            self.last_failure = record.failure
            self._failed[record.failure.partition(":")[0]] += 1
        else:
            self._metrics.append(record.metrics)
        self._tokens += record.length
        self._cut += record.finish_reason == "length"

    @property
    def reward(self) -> float | None:
        """Mean over all attempts so far."""
        return sum(map(sum, self._rewards.values())) / self.attempts if self.attempts else None

    @property
    def all_failed(self) -> bool:
        return 0 < self.attempts == self._failed.total()

    def pass_rates(self) -> list[ProblemPassRate]:
        """The pass rate of every attempted problem, in order."""
        return [ProblemPassRate(self._ids[n], len(self._rewards[n]), self._passes[n]) for n in sorted(self._rewards)]

    def values(self) -> dict[int, Floats]:
        """Problem number -> mean reward, pass@1, pass@2, pass@4, ..., for problems with all of their attempts."""
        wanted = self._settings.attempts
        ks = powers_of_two(wanted)
        return {
            number: np.array([sum(rewards) / wanted, *(pass_at_k(wanted, self._passes[number], k) for k in ks)])
            for number, rewards in sorted(self._rewards.items())
            if len(rewards) == wanted
        }

    def result(self, target: Target, version: int | None, first: Mapping[int, Floats] | None) -> ModelResult:
        """The model's results. `first`: the values of the first model, to compare with; None for that model itself."""
        values, answered = self.values(), self.attempts - self._failed.total()
        difference = {number: values[number] - first[number] for number in values if number in first} if first else {}
        averaged = mean_metrics(self._metrics)
        return ModelResult(
            name=target.name,
            path=target.model.path,
            version=version,
            folder=target.folder,
            problems=len(values),
            attempts=self.attempts,
            estimates=self._estimates(values),
            length_mean=self._tokens / answered if answered else None,
            cut=self._cut / answered if answered else None,
            failed=dict(sorted(self._failed.items())),
            metrics=averaged.means,
            metric_counts=averaged.counts,
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
    ks = powers_of_two(settings.attempts)
    compared = len(models) > 1
    title = f"{settings.environment}: {settings.attempts} attempts at each problem, temperature {settings.temperature:g}"
    title += ", training problems" if settings.training_problems else ""
    notes = [f"in brackets: {settings.level:.0%} intervals over problems" + ("; differences are paired" if compared else "")]
    if summary.status == "interrupted":
        notes.append("INTERRUPTED: short answers end first, so the counted problems are not typical")
    columns = ["problems", f"mean@{settings.attempts}", *(f"pass@{k}" for k in ks)]
    columns += [f"{name} - first" for name in columns[1:3]] if compared else []
    columns += ["tokens", "cut", "failed"]
    cells = [[model.name, *_cells(model, ks, compared)] for model in models]
    sections = [PageSection(title=title, texts=notes, header=["model", *columns], rows=cells)]
    if metrics := sorted({metric for model in models for metric in model.metrics}):
        rows = [[metric, *(number(model.metrics.get(metric), ".4g") for model in models)] for metric in metrics]
        note = "means over the attempts that have the metric"
        sections.append(
            PageSection(title="Metrics", texts=[note], header=["metric", *(one.name for one in models)], rows=rows)
        )
    return sections


def _cells(model: ModelResult, ks: tuple[int, ...], compared: bool) -> list[str]:
    found, difference = model.estimates, model.minus_first
    cells = [str(model.problems)]
    cells += [_cell(one, ".3f") for one in (found.reward, *found.passes.values())] if found else ["-"] * (1 + len(ks))
    if compared:
        cells += [_cell(one, "+.3f") for one in (difference.reward, difference.passes[1])] if difference else ["", ""]
    failed = "\n".join(f"{amount} {reason}" for reason, amount in model.failed.items())
    return [*cells, number(model.length_mean, ".1f"), number(model.cut, ".1%"), failed or "0"]


def _cell(interval: Interval, pattern: str) -> str:
    return f"{interval.mean:{pattern}}\n({interval.low:{pattern}}, {interval.high:{pattern}})"

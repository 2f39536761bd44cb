"""Computes the results of one model from its attempts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from pipelinerl.experiments.evaluate.records import AttemptRecord, Estimates, EvaluationSettings, ModelResult, PassRate
from pipelinerl.experiments.evaluate.targets import Target
from pipelinerl.experiments.statistics import Floats, mean_intervals, pass_at_k, powers_of_two
from pipelinerl.metrics.records import mean_metrics
from pipelinerl.types import Problem


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

    def pass_rates(self) -> list[PassRate]:
        """The pass rate of every attempted problem, in order."""
        return [PassRate(self._ids[n], len(self._rewards[n]), self._passes[n]) for n in sorted(self._rewards)]

    def values(self) -> dict[int, Floats]:
        """Problem number -> mean reward, pass@1, pass@2, pass@4, ..., for problems with all of their attempts."""
        wanted = self._settings.attempts
        return {
            number: np.array(
                [
                    sum(rewards) / wanted,
                    *(pass_at_k(wanted, self._passes[number], k) for k in powers_of_two(wanted)),
                ]
            )
            for number, rewards in sorted(self._rewards.items())
            if len(rewards) == wanted
        }

    def result(self, target: Target, version: int | None, first: Mapping[int, Floats] | None) -> ModelResult:
        """The model's results. `first`: the values of the first model, to compare with; None for that model itself."""
        values, answered = self.values(), self.attempts - self._failed.total()
        difference = None
        if first is not None:
            difference = {number: values[number] - first[number] for number in values if number in first}
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
            minus_first=None if difference is None else self._estimates(difference),
        )

    def _estimates(self, values: Mapping[int, Floats]) -> Estimates | None:
        if not values:
            return None
        settings = self._settings
        reward, *passes = mean_intervals(
            np.array(list(values.values())), resamples=settings.resamples, seed=settings.seed, level=settings.level
        )
        return Estimates(reward=reward, passes=dict(zip(powers_of_two(settings.attempts), passes, strict=True)))

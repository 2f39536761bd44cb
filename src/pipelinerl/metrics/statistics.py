"""Statistics of a record: means, quantiles, and its finite numbers by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

import numpy as np

REWARD = "/reward"
"""Suffix of an environment's reward among the metrics of a mixture's rollouts: `NAME/reward`."""

LOW_ESS = 0.5
"""Views mark a step whose effective sample size is lower: it learns no more than from half of its batch."""


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


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile with linear interpolation between order statistics; None if `values` is empty."""
    return float(np.quantile(values, q)) if len(values) else None


def flat_numbers(values: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """All finite numbers in `values`, which may be nested, by `PREFIX` + `KEY/...`."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found[prefix + key] = value
    return found

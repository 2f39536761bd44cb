"""Means and sums: of rollouts' metrics, of the finite numbers of a record, and over processes that are shown as one.

Without `engine.processes`, there is one engine and one actor, and nothing to add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipelinerl.types import ActorProgress, EngineProgress, StageStatus

REWARD = "/reward"
"""Suffix of an environment's reward among the metrics of a mixture's rollouts: `NAME/reward`."""

LOW_ESS = 0.5
"""Views mark a step whose effective sample size is lower: it learns no more than from half of its batch."""


ProgressT = TypeVar("ProgressT", EngineProgress, ActorProgress)


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


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean of values with weights, without None; None if nothing is left."""
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    return fmean([value for value, _ in known], [weight for _, weight in known]) if known else None


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


# ---- the progress of all engines, and of all actors


def engine_total(statuses: Mapping[str, StageStatus]) -> EngineProgress | None:
    """The total over all engines; None if there is none.

    Counts and times are summed, so that `busy_s / ready_s` is the mean over the engines. `version` is the oldest version
    that any engine holds, and `weight_updates` the largest count of one engine. The last of `pauses_s` is the longest of
    the engines' latest pauses.
    """
    engines = [one.progress for one in statuses.values() if isinstance(one.progress, EngineProgress)]
    if len(engines) < 2:
        return engines[0] if engines else None
    by_latest_pause = sorted(engines, key=lambda engine: engine.pauses_s[-1:])
    return _summed(
        engines,
        version=min((engine.version for engine in engines if engine.slots), default=0),  # an ended one has no slots
        weight_updates=max(engine.weight_updates for engine in engines),
        pauses_s=tuple(pause_s for engine in by_latest_pause for pause_s in engine.pauses_s),
    )


def actor_total(statuses: Mapping[str, StageStatus]) -> ActorProgress | None:
    """The total over all actors; None if there is none. Counts are summed, and `started_length_mean` is the mean over the
    actors that have one, weighted by `started_lengths`.
    """
    actors = [one.progress for one in statuses.values() if isinstance(one.progress, ActorProgress)]
    if len(actors) < 2:
        return actors[0] if actors else None
    return _summed(
        actors,
        started_length_mean=weighted_mean((actor.started_length_mean, actor.started_lengths) for actor in actors),
        evaluations={when: reward for actor in actors for when, reward in actor.evaluations.items()},
    )


def _summed(parts: Sequence[ProgressT], **other: object) -> ProgressT:
    """Numbers, and counts by name, are summed. Everything else is as in the first part, unless it is among `other`."""
    total: dict[str, Any] = {}
    for name in parts[0].__struct_fields__:
        first, *_ = values = [getattr(part, name) for part in parts]
        if isinstance(first, Mapping):
            counts: Counter[object] = Counter()
            for value in values:
                counts.update(value)
            total[name] = dict(counts)
        else:
            total[name] = sum(values) if isinstance(first, (int, float)) and name not in other else first
    return type(parts[0])(**total | other)

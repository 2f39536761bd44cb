"""Confidence intervals by resampling problems. Pure maths.

Neither the tokens of a sequence nor the attempts at a problem are independent, so problems are drawn with replacement, each
with all of its tokens (the cluster bootstrap; Davison and Hinkley, Bootstrap Methods and their Application, 1997, section
3.8). Every quantity is a mean over tokens: a ratio of two sums over problems. All quantities share one set of draws, so the
differences of quantities measured on the same problems have paired intervals.

Shapes: U problems, R resamples.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its percentile interval, `low` to `high`."""

    mean: float
    low: float
    high: float


def draw_counts(units: int, resamples: int, seed: int) -> Ints:
    """How often each problem is in each resample, [R, U]. Every row sums to U. Raises ValueError if U or R is 0."""
    if units < 1 or resamples < 1:
        raise ValueError(f"can't draw {resamples} resamples of {units} units")
    generator = np.random.default_rng(seed)
    counts: Ints = generator.multinomial(units, np.full(units, 1 / units), size=resamples)
    return counts


def mean_interval(sums_U: Floats, tokens_U: Floats, counts_RU: Ints, level: float = 0.95) -> Interval | None:
    """The mean over tokens, given each problem's sum and number of tokens. None if there are no tokens.

    Resamples without tokens are ignored.
    """
    if not tokens_U.sum():
        return None
    return _interval(float(sums_U.sum() / tokens_U.sum()), _resampled(sums_U, tokens_U, counts_RU), level)


def difference_interval(
    one: tuple[Floats, Floats], other: tuple[Floats, Floats], counts_RU: Ints, level: float = 0.95
) -> Interval | None:
    """Mean of `one` minus mean of `other`; each is (sums_U, tokens_U) over the same problems, resampled together."""
    if not one[1].sum() or not other[1].sum():
        return None
    point = float(one[0].sum() / one[1].sum() - other[0].sum() / other[1].sum())
    return _interval(point, _resampled(*one, counts_RU) - _resampled(*other, counts_RU), level)


def _resampled(sums_U: Floats, tokens_U: Floats, counts_RU: Ints) -> Floats:
    """The mean over tokens in each resample, [R]; NaN for a resample without tokens."""
    tokens_R = counts_RU @ tokens_U
    means_R: Floats = np.full(len(tokens_R), math.nan)
    np.divide(counts_RU @ sums_U, tokens_R, out=means_R, where=tokens_R > 0)
    return means_R


def _interval(point: float, values_R: Floats, level: float) -> Interval:
    tail = (1 - level) / 2
    low, high = np.nanquantile(values_R, [tail, 1 - tail])
    return Interval(point, float(low), float(high))

"""pass@k, and confidence intervals by resampling problems. Pure maths.

pass@k is the probability that at least one of k attempts at a problem passes. If c of n attempts pass, its unbiased
estimator is 1 - C(n - c, k) / C(n, k): the share of the subsets of k attempts that contain a pass (Chen et al., "Evaluating
Large Language Models Trained on Code", 2021, arXiv 2107.03374, section 2.1).

Neither the tokens of a sequence nor the attempts at a problem are independent, so problems are drawn with replacement, each
with all of its tokens or attempts (the cluster bootstrap; Davison and Hinkley, Bootstrap Methods and their Application,
1997, section 3.8). Quantities measured on the same problems share their draws, so the interval of a difference is paired.

Shapes: U problems, Q quantities, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

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


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """The estimator above, for 0 <= passes <= attempts and 1 <= k <= attempts."""
    subsets = math.comb(attempts, k)
    return (subsets - math.comb(attempts - passes, k)) / subsets


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`."""
    return tuple(1 << exponent for exponent in range(most.bit_length()))


def mean_intervals(values_UQ: Floats, *, resamples: int, seed: int, level: float) -> tuple[Interval, ...]:
    """The mean over problems of each quantity, with its interval. There is at least one problem."""
    generator = np.random.default_rng(seed)
    draws = range(resamples)
    # One resample at a time: all R x U indices at once would take too much memory for a large data set.
    means_RQ = np.array([values_UQ[generator.integers(0, len(values_UQ), len(values_UQ))].mean(axis=0) for _ in draws])
    points_Q = values_UQ.mean(axis=0)
    return tuple(_interval(float(point), means_R, level) for point, means_R in zip(points_Q, means_RQ.T, strict=True))


def mean_of_runs(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """The mean over independent runs, with Student's interval, whose limits are NaN for a single run. None without runs.

    Of a handful of values resampling finds too little spread: three have an interval from the lowest to the highest, which
    contains the mean of a normal distribution in three cases of four only.
    """
    if len(values) < 2:
        return Interval(values[0], math.nan, math.nan) if values else None
    point, error = fmean(values), stdev(values) / math.sqrt(len(values))
    half = student_quantile(level, len(values) - 1) * error
    return Interval(point, point - half, point + half)


def student_quantile(level: float, freedom: int) -> float:
    """The t for which a variable of Student's distribution lies between -t and t with probability `level`.

    By bisection, with the finite sums for the probability (Abramowitz and Stegun, Handbook of Mathematical Functions, 1964,
    26.7.3 and 26.7.4): x is the angle with tan x = t / sqrt(freedom).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        x = (low + high) / 2
        term, total = (1.0 if freedom % 2 == 0 else math.cos(x)), 0.0
        for power in range(freedom % 2, freedom - 1, 2):
            total += term
            term *= math.cos(x) ** 2 * (power + 1) / (power + 2)
        inside = total * math.sin(x) if freedom % 2 == 0 else (x + total * math.sin(x)) * 2 / math.pi
        low, high = (x, high) if inside < level else (low, x)
    return math.sqrt(freedom) * math.tan(low)


# ---- means over tokens: ratios of two sums over problems


def draw_counts(units: int, resamples: int, seed: int) -> Ints:
    """How often each problem is in each resample, [R, U]. Every row sums to U."""
    counts: Ints = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
    return counts


def mean_interval(sums_U: Floats, tokens_U: Floats, counts_RU: Ints, level: float = 0.95) -> Interval:
    """The mean over tokens, given each problem's sum and number of tokens. NaN if there are no tokens.

    Resamples without tokens are ignored.
    """
    once_RU = np.ones((1, len(sums_U)), dtype=np.int64)
    return _interval(float(_means(sums_U, tokens_U, once_RU)[0]), _means(sums_U, tokens_U, counts_RU), level)


def difference_interval(
    one: tuple[Floats, Floats], other: tuple[Floats, Floats], counts_RU: Ints, level: float = 0.95
) -> Interval:
    """Mean of `one` minus mean of `other`; each is (sums_U, tokens_U) over the same problems, resampled together."""
    point = float(one[0].sum() / one[1].sum() - other[0].sum() / other[1].sum())
    return _interval(point, _means(*one, counts_RU) - _means(*other, counts_RU), level)


def _means(sums_U: Floats, tokens_U: Floats, counts_RU: Ints) -> Floats:
    """The mean over tokens in each resample, [R]; NaN for a resample without tokens."""
    with np.errstate(invalid="ignore"):
        means_R: Floats = (counts_RU @ sums_U) / (counts_RU @ tokens_U)
    return means_R


def _interval(point: float, values_R: Floats, level: float) -> Interval:
    tail = (1 - level) / 2
    low, high = (math.nan, math.nan) if math.isnan(point) else np.nanquantile(values_R, [tail, 1 - tail])
    return Interval(point, float(low), float(high))

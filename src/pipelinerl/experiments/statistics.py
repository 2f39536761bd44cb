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
LEVEL = 0.95


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its percentile interval, `low` to `high`."""

    mean: float
    low: float
    high: float

    def text(self, pattern: str) -> str:
        """The estimate, with its interval below; limits of NaN are left out."""
        limits = "" if math.isnan(self.low) else f"\n({self.low:{pattern}}, {self.high:{pattern}})"
        return f"{self.mean:{pattern}}{limits}"


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """The estimator above, for 0 <= passes <= attempts and 1 <= k <= attempts."""
    subsets = math.comb(attempts, k)
    return (subsets - math.comb(attempts - passes, k)) / subsets


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`."""
    return tuple(1 << exponent for exponent in range(most.bit_length()))


def resampled_means(sums_UQ: Floats, counts_UQ: Floats, *, resamples: int, seed: int) -> Floats:
    """The mean of each quantity, its sum over problems divided by its count, [1 + R, Q]: over all problems, then in each
    resample of them. NaN where nothing is counted. Quantities with the same seed share their resamples.
    """
    generator, problems = np.random.default_rng(seed), len(sums_UQ)
    times_U, means = np.ones(problems), []
    with np.errstate(invalid="ignore"):
        for _ in range(1 + resamples):  # one at a time: a large data set has R x U indices
            means.append((times_U @ sums_UQ) / (times_U @ counts_UQ))
            times_U = np.bincount(generator.integers(0, problems, problems), minlength=problems).astype(np.float64)
    return np.array(means)


def intervals(means_RQ: Floats, level: float = LEVEL) -> tuple[Interval, ...]:
    """Percentile intervals from means as of `resampled_means`, or differences of them. Resamples with NaN are ignored."""
    found, tail = [], (1 - level) / 2
    for point, *values in means_RQ.T.tolist():
        low, high = (math.nan, math.nan) if math.isnan(point) else np.nanquantile(values, [tail, 1 - tail])
        found.append(Interval(point, float(low), float(high)))
    return tuple(found)


def mean_intervals(values_UQ: Floats, *, resamples: int, seed: int, level: float = LEVEL) -> tuple[Interval, ...]:
    """The mean over problems of each quantity, with its interval. There is at least one problem."""
    return intervals(resampled_means(values_UQ, np.ones_like(values_UQ), resamples=resamples, seed=seed), level)


def mean_of_runs(values: Sequence[float]) -> Interval | None:
    """The mean over independent runs, with Student's interval, whose limits are NaN for a single run. None without runs.

    Of a handful of values resampling finds too little spread: three have an interval from the lowest to the highest, which
    contains the mean of a normal distribution in three cases of four only.
    """
    if len(values) < 2:
        return Interval(values[0], math.nan, math.nan) if values else None
    point, error = fmean(values), stdev(values) / math.sqrt(len(values))
    half = student_quantile(LEVEL, len(values) - 1) * error
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

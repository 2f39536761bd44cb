"""pass@k and confidence intervals over problems. Pure maths.

pass@k is the probability that at least one of k attempts at a problem passes. If c of n attempts pass, its unbiased
estimator is 1 - C(n - c, k) / C(n, k): the share of the subsets of k attempts that contain a pass (Chen et al., "Evaluating
Large Language Models Trained on Code", 2021, arXiv 2107.03374, section 2.1).

Attempts at one problem are not independent, so intervals resample problems, each with all of its attempts. The draws depend
only on the seed and the number of problems, so quantities measured on the same problems are resampled together and the
interval of their difference is paired.

Shapes: U problems, Q quantities, R resamples.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its percentile interval, `low` to `high`."""

    mean: float
    low: float
    high: float


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """The estimator above. Raises ValueError unless 0 <= passes <= attempts and 1 <= k <= attempts."""
    if not 0 <= passes <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"no pass@{k} of {passes} passes in {attempts} attempts")
    subsets = math.comb(attempts, k)
    return (subsets - math.comb(attempts - passes, k)) / subsets


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`."""
    return tuple(1 << exponent for exponent in range(most.bit_length()))


def mean_intervals(values_UQ: Floats, *, resamples: int, seed: int, level: float) -> tuple[Interval, ...]:
    """The mean over problems of each quantity, with its interval. Raises ValueError if there are no problems."""
    if not len(values_UQ):
        raise ValueError("no problems to take a mean over")
    generator = np.random.default_rng(seed)
    draws = range(resamples)
    # One resample at a time: all R x U indices at once would take too much memory for a large data set.
    means_RQ = np.array([values_UQ[generator.integers(0, len(values_UQ), len(values_UQ))].mean(axis=0) for _ in draws])
    tail = (1 - level) / 2
    low_Q, high_Q = np.quantile(means_RQ, [tail, 1 - tail], axis=0)
    points_Q = values_UQ.mean(axis=0)
    return tuple(Interval(*map(float, numbers)) for numbers in zip(points_Q, low_Q, high_Q, strict=True))

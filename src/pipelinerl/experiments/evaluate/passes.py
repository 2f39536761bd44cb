"""How often a model is right, with intervals. Pure maths.

Of n attempts at a problem c pass. pass@k, the chance that at least one of k attempts passes, has the unbiased estimator
1 - C(n - c, k) / C(n, k): the share of all choices of k of the n attempts that hold a pass (Chen et al., "Evaluating Large
Language Models Trained on Code", 2021, arXiv 2107.03374, section 2.1).

Attempts at one problem are not independent, so what intervals resample is problems, each with all of its attempts. The draws
depend on the seed and the number of problems alone: quantities measured on the same problems are resampled together, and
the interval of their difference is a paired one.

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
    every = math.comb(attempts, k)
    return (every - math.comb(attempts - passes, k)) / every


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`."""
    return tuple(1 << exponent for exponent in range(most.bit_length()))


def mean_intervals(values_UQ: Floats, *, resamples: int, seed: int, level: float) -> tuple[Interval, ...]:
    """The mean over problems of each quantity. Raises ValueError without problems."""
    if not len(values_UQ):
        raise ValueError("no problems to take a mean over")
    generator = np.random.default_rng(seed)
    places = range(resamples)
    # One resample at a time: all at once would be R x U numbers, too many for a large data set.
    means_RQ = np.array([values_UQ[generator.integers(0, len(values_UQ), len(values_UQ))].mean(axis=0) for _ in places])
    tail = (1 - level) / 2
    low_Q, high_Q = np.quantile(means_RQ, [tail, 1 - tail], axis=0)
    points_Q = values_UQ.mean(axis=0)
    return tuple(Interval(*map(float, numbers)) for numbers in zip(points_Q, low_Q, high_Q, strict=True))

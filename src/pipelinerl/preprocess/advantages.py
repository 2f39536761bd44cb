"""Advantages of the attempts at one problem: each reward minus a baseline computed from the group's rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

MAX_REWARD = 1e30
"""Rewards of a larger magnitude are rejected: the loss uses float32, whose largest number is 3e38."""

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing by it, so that tiny differences in reward are not amplified."""


def advantages(
    rewards: Sequence[float], *, baseline: Literal["group_mean", "leave_one_out"], normalize_std: bool = False
) -> list[float]:
    """The advantage of each of a group's K rewards; 0 for a group of one.

    `group_mean`: R_i - mean(R), as in the paper. `leave_one_out`: R_i - mean of the others, which does not depend on R_i.
    With `normalize_std`, they are divided by the rewards' population standard deviation plus `STD_EPSILON`. Sums are
    exact (rational arithmetic): a reward that equals its baseline gets exactly 0.0, which the filters rely on.

    Raises ValueError for a reward that is not finite or beyond `MAX_REWARD`.
    """
    exact = _exact(rewards)
    result = [float(value) for value in (_minus_mean(exact) if baseline == "group_mean" else _minus_mean_of_others(exact))]
    if not normalize_std:
        return result
    deviations = [float(value) for value in _minus_mean(exact)]
    scale = STD_EPSILON + (math.hypot(*deviations) / math.sqrt(len(deviations)) if deviations else 0.0)
    return [value / scale for value in result]


def _exact(rewards: Sequence[float]) -> list[Fraction]:
    for reward in rewards:
        if not abs(reward) <= MAX_REWARD:  # true for NaN too
            raise ValueError(f"reward {reward} is not a finite number between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    return [Fraction(reward) for reward in rewards]


def _minus_mean(rewards: Sequence[Fraction]) -> list[Fraction]:
    if not rewards:
        return []
    mean = sum(rewards) / Fraction(len(rewards))
    return [reward - mean for reward in rewards]


def _minus_mean_of_others(rewards: Sequence[Fraction]) -> list[Fraction]:
    """R_i - (sum - R_i) / (K - 1) = K / (K - 1) * (R_i - mean)."""
    size = len(rewards)
    if size == 1:
        return [Fraction(0)]
    return [value * size / (size - 1) for value in _minus_mean(rewards)]

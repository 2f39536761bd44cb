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
    for reward in rewards:
        if not abs(reward) <= MAX_REWARD:  # true for NaN too
            raise ValueError(f"reward {reward} is not a finite number between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    exact, size = [Fraction(reward) for reward in rewards], len(rewards)
    mean = sum(exact, Fraction()) / max(1, size)
    deviations = [reward - mean for reward in exact]
    # R_i - (sum - R_i) / (K - 1) = K / (K - 1) * (R_i - mean)
    factor = Fraction(size, size - 1) if baseline == "leave_one_out" and size > 1 else 1
    result = [float(deviation * factor) for deviation in deviations]
    if not normalize_std:
        return result
    scale = STD_EPSILON + math.hypot(*map(float, deviations)) / math.sqrt(max(1, size))
    return [value / scale for value in result]

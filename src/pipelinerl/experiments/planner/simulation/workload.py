"""Simulated workloads: drawn from a distribution of lengths, or replayed from a run's records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.simulation.scenario import GroupWork

BLOCK = 1024
"""Number of groups that are drawn together."""
RECENT = 64
"""Number of a run's last groups that replace groups without a record."""


class Lengths(Protocol):
    """A distribution of completion lengths, such as `planner.lengths.LengthDistribution`."""

    def sample(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]: ...


class DrawnWorkload:
    """K independent lengths per group. All attempts of a share `used_share` of the groups have a gradient, and no others.

    Each attempt waits a lognormal time for its reward, with median `wait_median_s` and standard deviation `wait_sigma` of
    the logarithm, cut at `wait_most_s`. With a median of 0 no attempt waits. A pure function of (seed, index).
    """

    def __init__(
        self,
        lengths: Lengths,
        group_size: int,
        *,
        seed: int,
        used_share: float = 1.0,
        prompt_tokens: float = 0.0,
        wait_median_s: float = 0.0,
        wait_sigma: float = 1.0,
        wait_most_s: float = math.inf,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._wait_median_s = wait_median_s
        self._wait_sigma = wait_sigma
        self._wait_most_s = wait_most_s
        self._lengths = lengths
        self._group_size = group_size
        self._seed = seed
        self._used_share = used_share
        self._block = -1
        self._drawn: list[GroupWork] = []

    def group(self, index: int) -> GroupWork:
        block, number = divmod(index, BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block)
        return self._drawn[number]

    def _draw(self, block: int) -> list[GroupWork]:
        rng = np.random.default_rng((self._seed, block))
        lengths_GK = self._lengths.sample(rng, BLOCK * self._group_size).reshape(BLOCK, self._group_size)
        used_G = rng.random(BLOCK) < self._used_share
        waits_G: list[tuple[float, ...]] = [()] * BLOCK
        if self._wait_median_s > 0:
            drawn_GK = rng.lognormal(math.log(self._wait_median_s), self._wait_sigma, lengths_GK.shape)
            waits_G = [tuple(waits) for waits in np.minimum(drawn_GK, self._wait_most_s).tolist()]
        return [
            GroupWork(tuple(lengths), (used,) * self._group_size, waits_s=waits)
            for lengths, used, waits in zip(lengths_GK.tolist(), used_G.tolist(), waits_G, strict=True)
        ]


class ReplayedWorkload:
    """The groups of a run, under their own indices. The prediction is then of the machine, not of the model's lengths.

    An index without a record (a group that was in progress when the run ended, or a later one) gets the work of one of the
    run's last groups. Raises ValueError if there are no groups.
    """

    def __init__(self, groups: Mapping[int, GroupWork], prompt_tokens: float) -> None:
        if not groups:
            raise ValueError("there is no group to replay")
        self.prompt_tokens = prompt_tokens
        self._groups = groups
        self._recent = [groups[index] for index in sorted(groups)[-RECENT:]]

    def group(self, index: int) -> GroupWork:
        recorded = self._groups.get(index)
        return self._recent[index % len(self._recent)] if recorded is None else recorded

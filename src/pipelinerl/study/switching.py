"""Which weights sample which token of the stale-KV study. Pure arithmetic.

A sequence of up to L tokens is sampled while g = g_max optimizer steps are taken, so an interval of L/g tokens is one step
long. The first update arrives after two intervals, then there is one at the end of each:

    token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
    weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2

so there are g - 2 switches, and no token is fresher than lag 2. Token t is by `C + max(0, floor(t g / L) - 1)`: where L/g is
not a whole number, a switch takes place at the first token at or after its point.

Source: PipelineRL, arXiv 2509.19128, section 5.1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Stretch(NamedTuple):
    """Tokens `start <= t < end` of every completion, sampled by one `version`."""

    start: int
    end: int
    version: int


def mixed_version(token: int, first: int, lag: int, length: int) -> int:
    """The weights that sample token number `token`, if `first` (C) samples the first and the trainer is at C + `lag`."""
    return first + max(0, token * lag // length - 1)


def mixed_policy(first: int, lag: int, length: int) -> tuple[Stretch, ...]:
    """The stretches of a mixed policy over `length` (L) tokens. Raises ValueError unless 1 <= lag <= length."""
    if not 1 <= lag <= length:
        raise ValueError(f"a lag of {lag} steps over {length} tokens: each step needs a token at least")
    edges = interval_edges(lag, length)
    starts = [0, *edges[2:-1]]
    return tuple(
        Stretch(start, end, mixed_version(start, first, lag, length)) for start, end in pairwise([*starts, edges[-1]])
    )


def lagged_policy(version: int, length: int) -> tuple[Stretch, ...]:
    """Conventional RL: one version samples all tokens."""
    return (Stretch(0, length, version),)


def interval_edges(lag: int, length: int) -> tuple[int, ...]:
    """0 = first edge < ... < last edge = length: the `lag` intervals, each between neighbours, that optimizer steps take.

    Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
    """
    return tuple(-(-i * length // lag) for i in range(lag + 1))

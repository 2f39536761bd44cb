"""U(h): the generation rate of one accelerator with h sequences in progress, and the sources of its figures.

A decode step at batch size h takes `step_time(h)` and produces h tokens, so `U(h) = h / step_time(h)`. In flashes (the time
of one token's forward at peak FLOPs) U is a utilisation in [0, 1]. In seconds it is tokens per second. Every formula of the
model holds in either unit, if the training time `tau` is in the same unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
TimeUnit = Literal["flash", "s"]

PAPER_TAU = 128 / 26.02
"""Training time per token in flashes: the case study trains 26.02 tokens per flash on 128 accelerators."""

PAPER_STEP_FLASHES = 451.8
PAPER_SEQUENCE_FLASHES = 0.251
"""The simplest curve through both generation figures of the paper's case study, U(192) = 0.384 and the conventional
r_gen = 18.3 tokens/flash at 134 sequences per accelerator (G = 134): a decode step takes 451.8 flashes for the weights and
0.251 for each sequence. Fitted to these two figures; not measured, and not read off a plot."""


@dataclass(frozen=True)
class Accelerator:
    """`peak_flops` (dense BF16) per second and memory bandwidth in bytes per second, from NVIDIA's data sheets."""

    name: str
    peak_flops: float
    bandwidth: float

    @property
    def weights_flashes(self) -> float:
        """Flashes to read BF16 weights once at full bandwidth: (2P / bandwidth) / (2P / peak), for any P."""
        return self.peak_flops / self.bandwidth


H100 = Accelerator("h100", peak_flops=989.4e12, bandwidth=3.35e12)
H200 = Accelerator("h200", peak_flops=989.4e12, bandwidth=4.8e12)
ACCELERATORS = {accelerator.name: accelerator for accelerator in (H100, H200)}

BANDWIDTH_EFFICIENCY = H100.weights_flashes / PAPER_STEP_FLASHES
"""Share of the H100's bandwidth that the fit to the paper implies: 0.65."""
SEQUENCE_SHARE = PAPER_SEQUENCE_FLASHES / PAPER_STEP_FLASHES
"""Time that a sequence adds to a decode step, over the time to read the weights: 5.6e-4 (8 MB for a model of 7B)."""
COMPUTE_CEILING = 3 / PAPER_TAU
"""Highest U: compute-bound decoding is assumed as efficient as the paper's training (3 forwards in tau)."""


@dataclass(frozen=True)
class Utilisation:
    """Seconds or flashes of a decode step at some batch sizes, with linear interpolation between them.

    `active` (sequences, ascending) and `step_times` have equal lengths. Below the first entry the step time is constant.
    Above the last entry U is constant, as if the additional sequences took turns.
    Raises ValueError for a table that is empty, not ascending, or has a step time that is not above 0.
    """

    active: tuple[float, ...]
    step_times: tuple[float, ...]
    unit: TimeUnit = "flash"
    source: str = "a table"

    def __post_init__(self) -> None:
        h, times = np.asarray(self.active, dtype=np.float64), np.asarray(self.step_times, dtype=np.float64)
        if not len(h) or h.shape != times.shape or (np.diff(h) <= 0).any() or h[0] < 0 or h[-1] <= 0:
            raise ValueError(f"batch sizes must ascend, with a step time each: {self.active}, {self.step_times}")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise ValueError(f"step times must be above 0: {self.step_times}")

    @property
    def largest(self) -> float:
        """The largest batch size in the table."""
        return self.active[-1]

    def step_time(self, active: npt.ArrayLike) -> Floats:
        """Time of a decode step with `active` sequences (any shape; may be fractional, as an average over accelerators)."""
        h = np.asarray(active, dtype=np.float64)
        within = np.interp(h, self.active, self.step_times)
        return np.asarray(within * np.maximum(h / self.largest, 1.0), dtype=np.float64)

    def __call__(self, active: npt.ArrayLike) -> Floats:
        """U(h): tokens per unit of time of one accelerator. In flashes this is a share of its peak."""
        return np.asarray(np.asarray(active, dtype=np.float64) / self.step_time(active), dtype=np.float64)

    def with_overhead(self, time_per_token: float) -> Utilisation:
        """The same table with `time_per_token` added for every token, e.g. a rollout's fixed cost over its mean length."""
        times = tuple(time + time_per_token * h for h, time in zip(self.active, self.step_times, strict=True))
        return Utilisation(self.active, times, self.unit, self.source)


def roofline(
    accelerator: Accelerator,
    *,
    sequence_share: float = SEQUENCE_SHARE,
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    ceiling: float = COMPUTE_CEILING,
    largest: float = 8192,
) -> Utilisation:
    """U of a dense BF16 model. The time of a decode step is the longer of reading (weights and caches) and computing.

    step_time(h) = max(w (1 + s h), h / ceiling) flashes, with w = weights_flashes / bandwidth_efficiency and
    s = `sequence_share`, the bytes read per sequence over those of the weights. With the defaults, the H100 has the curve
    fitted to the paper, and the H200 the same curve at its own bandwidth. The model's size cancels out, except in
    `sequence_share` (see `cache_share`).
    """
    weights = accelerator.weights_flashes / bandwidth_efficiency
    slope = 1 / ceiling - weights * sequence_share  # slope of the compute line minus slope of the memory line
    knee = weights / slope if slope > 0 else largest
    active = tuple(sorted({0.0, min(knee, largest), largest}))
    times = tuple(max(weights * (1 + sequence_share * h), h / ceiling) for h in active)
    return Utilisation(
        active, times, "flash", f"roofline of the {accelerator.name.upper()}, fitted to the paper's case study"
    )


def cache_share(parameters: float, kv_bytes_per_token: float, context_tokens: float) -> float:
    """`sequence_share` of a BF16 model whose sequences have `context_tokens` in the KV cache on average."""
    return kv_bytes_per_token * context_tokens / (2 * parameters)


def flash_s(parameters: float, peak_flops: float) -> float:
    """Seconds per flash: one token's forward, 2 FLOPs per parameter, at peak FLOPs."""
    return 2 * parameters / peak_flops


def tau_from_mfu(mfu: float) -> float:
    """Training time per token in flashes at this model FLOPs utilisation: a forward, and a backward of twice its cost."""
    if not 0 < mfu <= 1:
        raise ValueError(f"MFU is a share of peak FLOPs, above 0 and at most 1: {mfu}")
    return 3 / mfu


def powers_of_two(largest: int) -> Sequence[int]:
    """1, 2, 4, ... and `largest` itself: the batch sizes at which step times are measured."""
    sizes = [1]
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return [*sizes, largest] if largest > 1 else sizes

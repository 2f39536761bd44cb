"""The learning rate of each optimizer step: by its number, and by how on-policy its batch is."""

from __future__ import annotations

import math
from typing import Literal

FLOOR = 0.1
"""Decaying schedules end at this share of the peak."""


def learning_rate(
    step: int, *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, total_steps: int
) -> float:
    """The rate of optimizer step `step` (0 is the first; it makes version `step + 1`).

    Warm-up rises linearly over steps 0 to `warmup_steps` - 1, all of them between 0 and the peak, both excluded, so that
    no step is wasted on a rate of 0. Step `warmup_steps` is the first at the peak. From there the rate stays, or falls to
    `FLOOR` of the peak, which the last step (`total_steps` - 1) reaches and later ones keep.

    Raises ValueError for a negative step or warm-up, or for less than one step in total.
    """
    if step < 0 or warmup_steps < 0 or total_steps < 1:
        raise ValueError(f"no learning rate for step {step}, {warmup_steps} warm-up steps and {total_steps} steps in total")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    decay_steps = total_steps - 1 - warmup_steps
    progress = min(1.0, (step - warmup_steps) / decay_steps) if decay_steps > 0 else 0.0
    match schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (FLOOR + (1.0 - FLOOR) * left)


def ess_factor(kind: Literal["off", "sqrt"], ess: float) -> float:
    """What `trainer.ess_lr` multiplies the learning rate with: sqrt(ESS) or 1, where ESS in (0, 1] is the batch's.

    The variance of an importance-weighted gradient is that of an on-policy batch of ESS times the size, and AdamW's
    learning rate goes with the square root of the batch size (VCPO, arXiv 2602.17616). VCPO divides by the ESS of
    on-policy data, which is 1 for the weights pi / mu.
    """
    return math.sqrt(ess) if kind == "sqrt" else 1.0

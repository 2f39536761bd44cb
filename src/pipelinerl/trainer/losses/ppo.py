"""PPO's clipped surrogate (arXiv 1707.06347); with group advantages this is GRPO's objective."""

from __future__ import annotations

import torch

from pipelinerl.trainer.losses.inputs import LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20, which no healthy run comes near. PPO leaves the ratio of a token with a negative advantage
unbounded, and a single overflow would turn the gradient of the whole step into NaN. A saturated token has no gradient
and counts as clipped."""


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A) for each token, with r = pi / mu of that token."""
    return clipped_surrogate(inputs.log_ratio_N, inputs.advantages_N, clip_low=clip_low, clip_high=clip_high)


def clipped_surrogate(
    log_ratio_N: torch.Tensor, advantages_N: torch.Tensor, *, clip_low: float, clip_high: float
) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A) for r = exp(log_ratio_N), which carries the gradient.

    The minimum takes the clipped side exactly when going further would still improve the surrogate: above 1 + high for
    A > 0, below 1 - low for A < 0. Such tokens have no gradient.
    """
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    limit_N = ratio_N.detach().clamp(1 - clip_low, 1 + clip_high)
    takes_limit_N = ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))
    weight_N = torch.where(takes_limit_N, limit_N, ratio_N)
    return LossOutput(-weight_N * advantages_N, weight_N.detach(), takes_limit_N | (log_ratio_N > MAX_LOG_RATIO))

"""Importance-weighted REINFORCE with a clamp (PipelineRL, arXiv 2509.19128)."""

from __future__ import annotations

from pipelinerl.trainer.losses.inputs import LossInputs, LossOutput


def reinforce(inputs: LossInputs, *, clamp: float) -> LossOutput:
    """-sg(min(c, pi / mu)) * A * log pi for each token, where sg stops the gradient and `clamp` is c.

    The weight is a constant: a token whose weight was clamped is still learned from, with weight c.
    """
    ratio_N = inputs.log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(max=clamp)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return LossOutput(loss_N, weight_N, ratio_N > clamp)

"""CISPO: importance weights clipped on both sides (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from pipelinerl.trainer.losses.inputs import LossInputs, LossOutput


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """-sg(clip(pi / mu, 1 - low, 1 + high)) * A * log pi for each token, where sg stops the gradient.

    Unlike in `ppo`, a clipped token keeps a gradient: only the weight of that gradient is bounded. `clip_low` >= 1
    means no lower bound, which is how the algorithm was first used.
    """
    ratio_N = inputs.log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return LossOutput(loss_N, weight_N, weight_N != ratio_N)

"""GSPO: one ratio for a whole sequence (arXiv 2507.18071)."""

from __future__ import annotations

import torch

from pipelinerl.trainer.losses.inputs import LossInputs, LossOutput
from pipelinerl.trainer.losses.ppo import clipped_surrogate


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """PPO's surrogate with the length-normalised ratio of the sequence, s = exp(mean_t log(pi_t / mu_t)).

    The sequence is a rollout: all of its sampled tokens, over all turns and segments. A token's term is

        l_t = -min(s_t * A, clip(s_t, 1 - low, 1 + high) * A),   s_t = sg(s) * pi_t / sg(pi_t)

    (the paper's token-level form): the value of s, with the gradient of the token's own log-probability. Over a rollout y,

        sum_t l_t = -|y| * min(s * A, clip(s) * A),   with gradient   -s * A * sum_t grad log pi_t   where not clipped,

    that is, |y| times the paper's term for the sequence and its exact gradient. The factor |y| puts the terms on the scale
    of the other losses, so that both of the caller's divisors keep their meaning: at pi = mu the gradient is REINFORCE's,
    a sum over tokens per rollout (`sequences`) or a mean over tokens (`tokens`). Either way a rollout counts in proportion
    to its length; the paper's own 1 / |y| is left out.
    """
    mean_S = _mean_by_sequence(inputs.log_ratio_N.detach(), inputs.sequence_N, inputs.sequence_count)
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_surrogate(mean_S[inputs.sequence_N] + own_N, inputs.advantages_N, clip_low=clip_low, clip_high=clip_high)


def _mean_by_sequence(values_N: torch.Tensor, sequence_N: torch.Tensor, sequence_count: int) -> torch.Tensor:
    """The mean of each sequence's values, shape (sequence_count,); 0 for a sequence without tokens."""
    zeros_S = values_N.new_zeros(sequence_count)
    sums_S = zeros_S.index_add(0, sequence_N, values_N)
    counts_S = zeros_S.index_add(0, sequence_N, torch.ones_like(values_N))
    return sums_S / counts_S.clamp(min=1)

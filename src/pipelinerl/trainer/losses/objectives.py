"""The objectives, with one term per token.

r = pi / mu is a token's ratio, A its advantage, sg stops the gradient. At pi = mu all of them have the gradient of plain
REINFORCE, -A * grad log pi for each token.
"""

from __future__ import annotations

import dataclasses

import torch

from pipelinerl.config.correction import Correction
from pipelinerl.trainer.losses.corrections import importance_weights
from pipelinerl.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, LossOutput


def reinforce(inputs: LossInputs, *, correction: Correction) -> LossOutput:
    """-sg(w) * A * log pi for each token, where the importance weight w is r, limited as `correction` says.

    With `token: truncate` and token_high 5, w = min(5, r): the method of the PipelineRL paper (arXiv 2509.19128). w is a
    constant, so a token with a truncated weight still has a gradient.
    """
    weight_N, truncated_N = importance_weights(inputs.log_ratio_N, inputs, correction)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return LossOutput(loss_N, torch.zeros_like(truncated_N), truncated_N)


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A), for A < 0 at most -dual_clip * A (PPO, arXiv 1707.06347).

    With group advantages this is GRPO's objective (arXiv 2402.03300).
    """
    return clipped_surrogate(
        inputs.log_ratio_N, inputs.advantages_N, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def decoupled(
    inputs: LossInputs, *, correction: Correction, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    """Decoupled PPO: sg(w) times the clipped surrogate of pi / prox, where w is prox / mu, limited as `correction` says.

        log prox = log mu / d + (1 - 1 / d) * sg(log pi),    d = max(1, lag of the token)

    The proximal policy prox precedes the last optimizer step. Computing it would cost a forward pass; A-3PO (arXiv
    2512.06547) interpolates it from the token's lag instead. Hence w = r^(1 - 1/d), and pi / prox has the value r^(1/d). At
    lag 1, prox is mu. At lag 0, where mu equals pi up to numerical error, prox is also mu, as in the authors' code.
    Decoupling the two policies is from AReaL (arXiv 2505.24298).
    """
    log_ratio_N = inputs.log_ratio_N
    share_N = 1.0 - 1.0 / inputs.lags_N.clamp(min=1).to(log_ratio_N.dtype)
    log_weight_N = share_N * log_ratio_N.detach()
    weight_N, truncated_N = importance_weights(log_weight_N, inputs, correction)
    surrogate = clipped_surrogate(
        log_ratio_N - log_weight_N, inputs.advantages_N, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return dataclasses.replace(
        surrogate,
        loss_N=weight_N * surrogate.loss_N,
        truncated_N=truncated_N & ~surrogate.masked_N,
    )


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """PPO's surrogate with the length-normalised ratio of the sequence, s = exp(mean_t log r_t) (arXiv 2507.18071).

    The sequence is a rollout: all of its sampled tokens, over all turns and segments. A token's term is

        l_t = -min(s_t * A, clip(s_t, 1 - low, 1 + high) * A),   s_t = sg(s) * pi_t / sg(pi_t)

    (the paper's token-level form): the value of s, with the gradient of the token's own log-probability. Over a rollout y,

        sum_t l_t = -|y| * min(s * A, clip(s) * A),   with gradient   -s * A * sum_t grad log pi_t   where not clipped,

    that is, |y| times the paper's term for the sequence, with its exact gradient. The factor |y| puts the terms on the scale
    of the other losses, so that both of the caller's divisors keep their meaning: at pi = mu the gradient is REINFORCE's,
    a sum over tokens per rollout (`sequences`) or a mean over tokens (`tokens`). In both cases a rollout's weight is
    proportional to its length; the paper's factor 1 / |y| is omitted. As in the paper, there is no dual clip.
    """
    mean_S = inputs.means_by_sequence(inputs.log_ratio_N.detach())
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_surrogate(mean_S[inputs.sequence_N] + own_N, inputs.advantages_N, clip_low=clip_low, clip_high=clip_high)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) * A * log pi for each token (CISPO: MiniMax-M1, arXiv 2506.13585).

    Unlike in `ppo`, a clipped token keeps its gradient; only its weight is bounded. `clip_low` >= 1 means no lower bound, as
    in the first use of the algorithm.
    """
    ratio_N = inputs.log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    truncated_N = weight_N != ratio_N
    return LossOutput(loss_N, torch.zeros_like(truncated_N), truncated_N)


def clipped_surrogate(
    log_ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A) for r = exp(log_ratio_N), which carries the gradient.

    The minimum selects the clipped term exactly where moving further would still improve the surrogate: above 1 + high for
    A > 0, below 1 - low for A < 0. For A < 0 and large r, r * A is unbounded; `dual_clip` (c > 1; Ye et al., arXiv
    1912.09729) then limits the term to at most -c * A. Without it, r saturates at e^`MAX_LOG_RATIO`. A token beyond any of
    these limits has no gradient and counts as masked.
    """
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    limit_N = ratio_N.detach().clamp(1 - clip_low, 1 + clip_high)
    masked_N = ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))
    weight_N = torch.where(masked_N, limit_N, ratio_N)
    if dual_clip is not None:
        bounded_N = (advantages_N < 0) & (ratio_N > dual_clip)
        weight_N = torch.where(bounded_N, dual_clip, weight_N)
        masked_N = masked_N | bounded_N
    masked_N = masked_N | (log_ratio_N > MAX_LOG_RATIO)
    return LossOutput(-weight_N * advantages_N, masked_N, torch.zeros_like(masked_N))


def kl_penalty(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(pi || reference) at each token: q - 1 - log q with q = reference / pi (Schulman 2020).

    It is never negative, 0 where the two agree, and unbiased if the tokens are sampled from pi. As a loss, its gradient
    (1 - q) * grad log pi is then in expectation the gradient of KL(reference || pi), which has the same minimum. No
    importance weight is applied, as in GRPO (arXiv 2402.03300). q saturates at e^`MAX_LOG_RATIO`; its gradient is then 0.
    """
    log_q_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_q_N) - log_q_N

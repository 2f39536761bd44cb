"""A penalty that keeps the policy near a reference model."""

from __future__ import annotations

import dataclasses

import torch

from pipelinerl.trainer.losses.inputs import Loss, LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""Reference-to-policy ratios saturate at e^20, so that one token can't overflow the step; its KL gradient is then 0."""


def kl_penalty(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(pi || reference) at each token: q - 1 - log q with q = reference / pi (Schulman 2020).

    Never negative, and 0 where the two agree. Unbiased when the tokens come from pi. As a loss, its gradient
    (1 - q) * grad log pi is, over tokens from pi, that of KL(reference || pi): it has the same minimum. No importance
    weight is applied, as in GRPO (arXiv 2402.03300).
    """
    log_q_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_q_N) - log_q_N


def with_kl_penalty(inputs: LossInputs, *, policy_loss: Loss, coefficient: float) -> LossOutput:
    """`policy_loss` plus `coefficient` times the KL penalty of each token. Raises ValueError without reference logprobs."""
    if inputs.reference_logprobs_N is None:
        raise ValueError(f"a KL coefficient of {coefficient} needs reference log-probabilities, and the samples have none")
    output = policy_loss(inputs)
    kl_N = kl_penalty(inputs.logprobs_N, inputs.reference_logprobs_N)
    return dataclasses.replace(output, loss_N=output.loss_N + coefficient * kl_N, kl_N=kl_N.detach())

"""Off-policy corrections: importance weights, masks and the drift penalty.

mu sampled a token, pi is trained, r = pi / mu is the token's ratio, A its advantage. No gradient flows through weights and
masks. Settings and defaults are in `config/correction.py`; `docs/corrections.md` compares the corrections.

    correction            what it does                                                           source
    token: truncate       weight min(high, r)                                                    TIS; PipelineRL: high = 5
    token: mask           no gradient where r > high                                             masked importance sampling
    token: band           no gradient where r < low or r > high                                  IcePop
    token: tv             none where A > 0 and pi - mu > high, or A < 0 and mu - pi > low        DPPO, binary TV
    sequence: truncate    weight min(high, product of r) for all tokens of a rollout             sequence-level TIS
    sequence: geo_truncate weight min(high, exp(mean log r)) for all tokens of a rollout         geometric-mean weight
    sequence: geo_mask    no gradient from a rollout with exp(mean log r) outside [low, high]    geometric-mean mask
    drift                 + drift * (log r)^2 for every token, masked or not                     prime-rl, Kimi K2.5

A token that a mask keeps has its full weight r, limited only by e^`MAX_LOG_RATIO`. A masked token still counts in the
divisor Z of the step. Sequence masks and weights need whole rollouts, which a micro-batch never splits.
"""

from __future__ import annotations

import dataclasses

import torch

from pipelinerl.config.correction import SEQUENCE_WEIGHTS, Correction
from pipelinerl.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, LossOutput


def importance_weights(
    log_weights_N: torch.Tensor, inputs: LossInputs, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, whether a limit replaced the weight): exp(log_weights_N), limited as `correction` says.

    `log_weights_N` is log r, or for a decoupled objective log(prox / mu). Both results have shape (N,) and no gradient.
    """
    logs_N = log_weights_N.detach()
    if correction.sequence in SEQUENCE_WEIGHTS:
        by_sequence = inputs.sums_by_sequence if correction.sequence == "truncate" else inputs.means_by_sequence
        logs_N = by_sequence(logs_N)[inputs.sequence_N]
        limit = correction.sequence_high
    else:
        limit = correction.token_high if correction.token == "truncate" else float("inf")
    weights_N = logs_N.clamp(max=MAX_LOG_RATIO).exp()
    limited_N = weights_N.clamp(max=limit)
    return limited_N, (weights_N > limit) | (logs_N > MAX_LOG_RATIO)


def kept_tokens(inputs: LossInputs, correction: Correction) -> torch.Tensor | None:
    """bool (N,): tokens that keep their gradient under the masks of `correction`; None if it has no masks."""
    kept_N = _kept_by_token(inputs, correction)
    if correction.sequence == "geo_mask":
        means_S = inputs.means_by_sequence(inputs.log_ratio_N.detach()).exp()
        kept_S = (means_S >= correction.sequence_low) & (means_S <= correction.sequence_high)
        by_sequence_N = kept_S[inputs.sequence_N]
        kept_N = by_sequence_N if kept_N is None else kept_N & by_sequence_N
    return kept_N


def masked(output: LossOutput, kept_N: torch.Tensor) -> LossOutput:
    """`output` with only the terms of tokens in `kept_N`."""
    return dataclasses.replace(
        output,
        loss_N=torch.where(kept_N, output.loss_N, 0.0),
        masked_N=output.masked_N | ~kept_N,
        truncated_N=output.truncated_N & kept_N,
    )


def _kept_by_token(inputs: LossInputs, correction: Correction) -> torch.Tensor | None:
    log_ratio_N = inputs.log_ratio_N.detach()
    match correction.token:
        case "none" | "truncate":
            return None
        case "mask":
            return log_ratio_N.exp() <= correction.token_high
        case "band":
            ratio_N = log_ratio_N.exp()
            return (ratio_N >= correction.token_low) & (ratio_N <= correction.token_high)
        case "tv":
            rise_N = inputs.logprobs_N.detach().exp() - inputs.behaviour_logprobs_N.exp()
            too_high_N = (inputs.advantages_N > 0) & (rise_N > correction.token_high)
            too_low_N = (inputs.advantages_N < 0) & (-rise_N > correction.token_low)
            return ~(too_high_N | too_low_N)

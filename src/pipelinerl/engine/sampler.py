"""From logits to tokens, with the log-probability of each under the very distribution it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row parameters [n]."""

    temperature_n: Tensor
    top_p_n: Tensor
    top_k_n: Tensor


def sample(logits_nV: Tensor, rows: SamplingRows | None, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row: ids [n] and log-probs [n] in float32. Without `rows`: temperature 1 and no truncation for all.

    The token is the inverse of the cumulative distribution at the row's uniform number, which costs one pass over the
    vocabulary. Temperature 0 takes the likeliest token, with log-prob under the distribution at temperature 1. Where top-k
    or top-p truncate, log-probs are those of the truncated, renormalised distribution.
    """
    logits_nV = logits_nV.float()
    if rows is None:
        return _draw(logits_nV.softmax(-1), uniforms_n)
    greedy_n = rows.temperature_n <= 0
    scale_n = torch.where(greedy_n, torch.ones_like(rows.temperature_n), rows.temperature_n)
    logprobs_nV = truncate((logits_nV / scale_n[:, None]).log_softmax(-1), rows.top_p_n, rows.top_k_n)
    ids_n, picked_n = _draw(logprobs_nV.exp(), uniforms_n)
    if bool(greedy_n.any()):
        best_n = logits_nV.argmax(-1)
        ids_n = torch.where(greedy_n, best_n, ids_n)
        picked_n = torch.where(greedy_n, logits_nV.log_softmax(-1).gather(1, best_n[:, None])[:, 0], picked_n)
    return ids_n, picked_n


def truncate(logprobs_nV: Tensor, top_p_n: Tensor, top_k_n: Tensor) -> Tensor:
    """Keep the k likeliest tokens (0: all), of those the fewest whose mass reaches top_p; renormalise. Others get -inf."""
    cut_n = (top_p_n < 1) | (top_k_n > 0)
    if not bool(cut_n.any()):
        return logprobs_nV
    rows_m = cut_n.nonzero()[:, 0]
    sorted_mV, order_mV = logprobs_nV[rows_m].sort(-1, descending=True)
    vocabulary = sorted_mV.shape[-1]
    limit_m = torch.where(top_k_n[rows_m] > 0, top_k_n[rows_m], torch.full_like(top_k_n[rows_m], vocabulary))
    rank_V = torch.arange(vocabulary, device=logprobs_nV.device)
    sorted_mV = sorted_mV.masked_fill(rank_V >= limit_m[:, None], float("-inf")).log_softmax(-1)
    probabilities_mV = sorted_mV.exp()
    mass_before_mV = probabilities_mV.cumsum(-1) - probabilities_mV
    # The first token always stays, whatever rounding does to the sums.
    beyond_mV = (mass_before_mV >= top_p_n[rows_m, None]) & (rank_V > 0)
    sorted_mV = sorted_mV.masked_fill(beyond_mV, float("-inf")).log_softmax(-1)
    kept = logprobs_nV.clone()
    kept[rows_m] = torch.empty_like(sorted_mV).scatter_(1, order_mV, sorted_mV)
    return kept


def _draw(probabilities_nV: Tensor, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    cumulative_nV = probabilities_nV.cumsum(-1)
    # Strictly below the total, whatever rounding does, and the search goes to the right: a token of probability 0 can't
    # be hit.
    target_n1 = (uniforms_n * (1 - 2e-7)).to(cumulative_nV.dtype)[:, None] * cumulative_nV[:, -1:]
    ids_n1 = torch.searchsorted(cumulative_nV, target_n1, right=True)
    return ids_n1[:, 0], probabilities_nV.gather(1, ids_n1)[:, 0].log()

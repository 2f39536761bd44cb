"""The distribution that tokens are drawn from with a temperature, top-k and top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipelinerl.engine.sampler import SamplingRows


def distribution(logits_nV: Tensor, rows: SamplingRows) -> Tensor:
    """The log-probs [n, V] that tokens are drawn with, of float32 logits of at most 0. Temperature 0 counts as 1."""
    scale_n = torch.where(rows.temperature_n <= 0, torch.ones_like(rows.temperature_n), rows.temperature_n)
    return truncate((logits_nV / scale_n[:, None]).log_softmax(-1), rows.top_p_n, rows.top_k_n)


def truncate(logprobs_nV: Tensor, top_p_n: Tensor, top_k_n: Tensor) -> Tensor:
    """Keep the k likeliest tokens (0: all), and of these the fewest that reach mass top_p; renormalise. Others get -inf."""
    cut_n = (top_p_n < 1) | (top_k_n > 0)
    if not bool(cut_n.any()):
        return logprobs_nV
    rows_m = cut_n.nonzero()[:, 0]
    kept = logprobs_nV.clone()
    kept[rows_m] = keep_likeliest(logprobs_nV[rows_m], top_p_n[rows_m], top_k_n[rows_m])
    return kept


def keep_likeliest(logprobs_mV: Tensor, top_p_m: Tensor, top_k_m: Tensor) -> Tensor:
    """`truncate`, with a sort of every row."""
    sorted_mV, order_mV = logprobs_mV.sort(-1, descending=True)
    vocabulary = sorted_mV.shape[-1]
    limit_m = torch.where(top_k_m > 0, top_k_m, torch.full_like(top_k_m, vocabulary))
    rank_V = torch.arange(vocabulary, device=logprobs_mV.device)
    sorted_mV = sorted_mV.masked_fill(rank_V >= limit_m[:, None], float("-inf")).log_softmax(-1)
    probabilities_mV = sorted_mV.exp()
    mass_before_mV = probabilities_mV.cumsum(-1) - probabilities_mV
    # The first token is always kept, despite rounding errors in the sums.
    beyond_mV = (mass_before_mV >= top_p_m[:, None]) & (rank_V > 0)
    sorted_mV = sorted_mV.masked_fill(beyond_mV, float("-inf")).log_softmax(-1)
    return torch.empty_like(sorted_mV).scatter_(1, order_mV, sorted_mV)

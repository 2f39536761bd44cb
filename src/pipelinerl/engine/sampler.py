"""Samples tokens from logits. Log-probs are those under the exact distribution that a token was drawn from.

`advance` is a program of tensors with fixed shapes: it never waits for the device, so that a CUDA graph can record it.
Random numbers are the same on every device, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from pipelinerl.models.state import GOLDEN, MIX_1, Bits, splitmix64

Ints = npt.NDArray[np.int64]

_BLOCK = 256
# Block search is used from these sizes on: elements in all rows, and vocabulary. Smaller inputs would be slower with it
# (benchmarks/sampler.py, CPU).
_BLOCKS_FROM, _BLOCKS_FROM_VOCABULARY = 1 << 17, 4096
_BELOW_ONE = 1 - 2**-50


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row [n]."""

    temperature_n: Tensor
    top_p_n: Tensor
    top_k_n: Tensor


def sample(logits_nV: Tensor, rows: SamplingRows | None, uniforms_n: Tensor, *, waits: bool = True) -> tuple[Tensor, Tensor]:
    """Sample one token per row: ids [n] and float32 log-probs [n]. `rows` None means temperature 1 without truncation.

    If not `waits`, nothing waits for the device, which costs a sort of all rows if there are parameters.

    The token is the inverse of the cumulative distribution at the row's uniform number in [0, 1), which costs one pass over
    the vocabulary. Temperature 0 takes the likeliest token, with its log-prob at temperature 1. With top-k or top-p,
    log-probs are under the truncated, renormalised distribution.

    Ids are always within the vocabulary. A row without a distribution (NaN, +inf, or -inf everywhere) gets log-prob NaN.
    """
    logits_nV = logits_nV.float()
    if rows is None:
        return _draw(logits_nV, uniforms_n)
    best_n1, best_ids_n1 = logits_nV.max(-1, keepdim=True)
    logits_nV = logits_nV - best_n1  # at most 0, so that no temperature causes an overflow
    greedy_n = rows.temperature_n <= 0
    ids_n, picked_n = _draw(distribution(logits_nV, rows, waits=waits), uniforms_n)
    if not waits or bool(greedy_n.any()):
        ids_n = torch.where(greedy_n, best_ids_n1[:, 0], ids_n)
        picked_n = torch.where(greedy_n, -logits_nV.exp().sum(-1, dtype=torch.float64).log().float(), picked_n)
    return ids_n, picked_n


def _draw(logits_nV: Tensor, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    """Sample ids [n], and their log-probs [n], from softmax(logits).

    The float32 softmax of 150,000 logits sums to 1 with an error of up to 4e-5. Probabilities are therefore divided by the
    float64 sum that the token was drawn from.
    """
    probabilities_nV = logits_nV.softmax(-1)
    ids_n1, total_n1 = invert(probabilities_nV, uniforms_n.unsqueeze(1))
    return ids_n1.squeeze(1), probabilities_nV.gather(1, ids_n1).div_(total_n1).log_().squeeze(1)


def invert(weights_nV: Tensor, uniforms_nm: Tensor) -> tuple[Tensor, Tensor]:
    """Map m uniform numbers per row to token ids [n, m]. Also returns the total weight of each row [n, 1].

    A token is chosen with probability weight / total, and never if its weight is 0. Sums are in float64: the resolution of
    float32 just below 1 is 6e-8, more than the probability of most tokens of a large vocabulary. Large inputs are searched
    by blocks, then within a block: a float64 running sum over the whole vocabulary would take as long as everything else.

    Ids are always within the row: rounding can't raise a target to the total, and the search takes the rightmost insertion
    point, so that a weight of 0 is never chosen. If weights are NaN, the last token is chosen.
    """
    vocabulary = weights_nV.shape[1]
    if weights_nV.numel() < _BLOCKS_FROM or vocabulary < _BLOCKS_FROM_VOCABULARY:
        cumulative_nV = weights_nV.cumsum(-1, dtype=torch.float64)
        total_n1 = cumulative_nV.narrow(1, vocabulary - 1, 1)
        target_nm = (total_n1 * uniforms_nm).mul_(_BELOW_ONE)
        return torch.searchsorted(cumulative_nV, target_nm, right=True).clamp_(max=vocabulary - 1), total_n1
    whole = vocabulary // _BLOCK * _BLOCK
    blocks_nC = weights_nV[:, :whole].view(len(weights_nV), -1, _BLOCK).sum(-1)
    if whole < vocabulary:
        blocks_nC = torch.cat([blocks_nC, weights_nV[:, whole:].sum(-1, keepdim=True)], 1)
    cumulative_nC = blocks_nC.cumsum(-1, dtype=torch.float64)
    total_n1 = cumulative_nC[:, -1:]
    target_nm = (total_n1 * uniforms_nm).mul_(_BELOW_ONE)
    block_nm = torch.searchsorted(cumulative_nC, target_nm, right=True).clamp_(max=cumulative_nC.shape[1] - 1)
    inside_nm = target_nm - (cumulative_nC - blocks_nC).gather(1, block_nm)
    columns_nmb = block_nm[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=weights_nV.device)
    block_nmb = weights_nV.gather(1, columns_nmb.clamp(max=vocabulary - 1).flatten(1)).view(columns_nmb.shape)
    block_nmb = block_nmb.masked_fill_(columns_nmb >= vocabulary, 0).cumsum(-1, dtype=torch.float64)
    # The float32 sum of a block may be slightly larger than the float64 sum of its weights.
    inside_nm1 = torch.minimum(inside_nm[:, :, None], block_nmb[:, :, -1:] * _BELOW_ONE)
    ids_nm = block_nm * _BLOCK + torch.searchsorted(block_nmb, inside_nm1, right=True)[:, :, 0]
    return ids_nm.clamp_(max=vocabulary - 1), total_n1


# ---- Random numbers: a function of (request, position), independent of the other requests in the batch

_MOST_AHEAD = 1024


def request_key(request_id: str, seed: int | None) -> int:
    """The key of a request, derived from its seed, or from its id if it has no seed: 64 bits, as a signed number."""
    name = f"id:{request_id}" if seed is None else f"seed:{seed}"
    key = xxhash.xxh3_64_intdigest(name.encode())
    return key - 2**64 if key >= 2**63 else key


def uniforms(keys_n: Bits, positions_n: Bits) -> Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, from a counter-based generator. The two shapes (int64) are broadcast.

    Applies SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) twice to key and position, so that the streams
    of related keys are unrelated.
    """
    mixed_n = splitmix64(keys_n + GOLDEN * (positions_n + 1))
    mixed_n = splitmix64(mixed_n ^ (keys_n * MIX_1))
    bits_n = (mixed_n >> 11) & (2**53 - 1)
    return torch.as_tensor(bits_n).double().mul_(2.0**-53)


class StepsAhead:
    """Positions [R] and uniform numbers [R] of the next steps, computed for several steps at once: the cost is per call.

    Valid while the same rows decode, one token per step. The longer that lasts, the more steps are computed at once.
    """

    def __init__(self, keys_R: Ints, counts_R: Ints, positions_R: Ints) -> None:
        """`counts_R`: tokens sampled so far; `positions_R`: where the next one goes in the cache."""
        self._steps = 8
        self._most_steps = max(8, _MOST_AHEAD // max(1, len(keys_R)))
        self._keys_R, self._counts_R, self._positions_R = keys_R.copy(), counts_R.copy(), positions_R.copy()
        self._prepared: list[tuple[Tensor, Tensor]] = []

    def next(self) -> tuple[Tensor, Tensor]:
        """Positions and uniform numbers of the rows' next tokens."""
        if not self._prepared:
            steps_S1 = np.arange(self._steps)[::-1, None]  # the next step is last, where `pop` takes it
            drawn_SR = uniforms(self._keys_R, self._counts_R + steps_S1)
            positions_SR = torch.from_numpy(self._positions_R + steps_S1)
            self._prepared = list(zip(positions_SR.unbind(), drawn_SR.unbind(), strict=True))
            self._counts_R += self._steps
            self._positions_R += self._steps
            self._steps = min(2 * self._steps, self._most_steps)
        return self._prepared.pop()


# ---- The distribution that tokens are drawn from with a temperature, top-k and top-p


def distribution(logits_nV: Tensor, rows: SamplingRows, *, waits: bool = True) -> Tensor:
    """The log-probs [n, V] that tokens are drawn with, of float32 logits of at most 0. Temperature 0 counts as 1."""
    scale_n = torch.where(rows.temperature_n <= 0, torch.ones_like(rows.temperature_n), rows.temperature_n)
    return truncate((logits_nV / scale_n[:, None]).log_softmax(-1), rows.top_p_n, rows.top_k_n, waits=waits)


def truncate(logprobs_nV: Tensor, top_p_n: Tensor, top_k_n: Tensor, *, waits: bool = True) -> Tensor:
    """Keep the k likeliest tokens (0: all), and of these the fewest that reach mass top_p; renormalise. Others get -inf."""
    cut_n = (top_p_n < 1) | (top_k_n > 0)
    if not waits:
        return torch.where(cut_n[:, None], keep_likeliest(logprobs_nV, top_p_n, top_k_n), logprobs_nV)
    if not bool(cut_n.any()):
        return logprobs_nV
    rows_m = cut_n.nonzero()[:, 0]
    changed_nV = logprobs_nV.clone()
    changed_nV[rows_m] = keep_likeliest(logprobs_nV[rows_m], top_p_n[rows_m], top_k_n[rows_m])
    return changed_nV


def keep_likeliest(logprobs_mV: Tensor, top_p_m: Tensor, top_k_m: Tensor) -> Tensor:
    """`truncate`, with a sort of every row."""
    sorted_mV, order_mV = logprobs_mV.sort(-1, descending=True)
    vocabulary = sorted_mV.shape[-1]
    limit_m = torch.where(top_k_m > 0, top_k_m, torch.full_like(top_k_m, vocabulary))
    rank_V = torch.arange(vocabulary, device=logprobs_mV.device)
    sorted_mV = sorted_mV.masked_fill(rank_V >= limit_m[:, None], float("-inf")).log_softmax(-1)
    probabilities_mV = sorted_mV.exp()
    mass_before_mV = probabilities_mV.cumsum(-1) - probabilities_mV
    # The first token always stays, despite rounding errors in the sums.
    beyond_mV = (mass_before_mV >= top_p_m[:, None]) & (rank_V > 0)
    sorted_mV = sorted_mV.masked_fill(beyond_mV, float("-inf")).log_softmax(-1)
    return torch.empty_like(sorted_mV).scatter_(1, order_mV, sorted_mV)


# ---- A token for each row of a static decode step


def advance(logits_RV: Tensor, stops_RS: Tensor, reals_2R: Tensor | None, *state: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each active row: the rows' next state [7, R] and the results [R, 2], as in `static.DeviceRows`.

    `state`: the integers of `DeviceRows`. Without `reals_2R`, all sample at temperature 1, without truncation.
    """
    positions, ids, counts, budgets, top_k, keys, active = state
    rows = None if reals_2R is None else SamplingRows(reals_2R[0], reals_2R[1], top_k)
    new, logprobs = sample(logits_RV, rows, uniforms(keys, counts), waits=False)
    decodes, counts = active.bool(), counts + active
    ended = (new[:, None] == stops_RS).any(1) | (counts >= budgets)
    ids = torch.where(decodes, new, ids)
    next_7R = torch.stack([positions + active, ids, counts, budgets, top_k, keys, active * ~ended])
    return next_7R, torch.stack([torch.where(decodes, new, -1).double(), logprobs.double()], 1)

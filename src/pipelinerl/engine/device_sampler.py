"""Sampling as a program of tensors with fixed shapes: it never waits for the device, so that a CUDA graph can record it.

Random numbers are the same as by `sampler.uniforms`, to the bit, so a request draws the same numbers on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelinerl.engine.sampler import SamplingRows, invert, keep_likeliest

_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants as int64: products and sums of int64 wrap, so their bits are the same as with uint64."""


def device_uniforms(keys_n: Tensor, positions_n: Tensor) -> Tensor:
    """`sampler.uniforms` of int64 tensors; `keys_n` holds the bits of the 64-bit keys."""
    mixed_n = _finalize(keys_n + _GOLDEN * (positions_n + 1))
    mixed_n = _finalize(mixed_n ^ (keys_n * _MIX_1))
    return _shifted(mixed_n, 11).double().mul_(2.0**-53)


def draw(logits_nV: Tensor, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits): ids [n] and float32 log-probs [n], NaN for a row without a distribution."""
    logits_nV = logits_nV.float()
    best_n1 = logits_nV.amax(-1, keepdim=True)
    ids_n1, total_n1 = invert((logits_nV - best_n1).exp_(), uniforms_n[:, None])
    logprobs_n1 = (logits_nV.gather(1, ids_n1) - best_n1).double() - total_n1.log()
    return ids_n1[:, 0], logprobs_n1[:, 0].float()


def advance(logits_RV: Tensor, stops_RS: Tensor, reals_2R: Tensor | None, *state: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each active row: the rows' next state [7, R] and the results [R, 2], as in `static.DeviceRows`.

    `state`: the integers of `DeviceRows`. Without `reals_2R`, all sample at temperature 1, without truncation.
    """
    positions, ids, counts, budgets, top_k, keys, active = state
    uniforms_R = device_uniforms(keys, counts)
    if reals_2R is None:
        new, logprobs = draw(logits_RV, uniforms_R)
    else:
        temperature, top_p = reals_2R.unbind()
        new, logprobs = draw_with(logits_RV, SamplingRows(temperature, top_p, top_k), uniforms_R)
    decodes, counts = active.bool(), counts + active
    ended = (new[:, None] == stops_RS).any(1) | (counts >= budgets)
    ids = torch.where(decodes, new, ids)
    next_7R = torch.stack([positions + active, ids, counts, budgets, top_k, keys, active * ~ended])
    return next_7R, torch.stack([torch.where(decodes, new, -1).double(), logprobs.double()], 1)


def draw_with(logits_nV: Tensor, rows: SamplingRows, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    """As `sampler.sample` with parameters; costs a sort of all rows, also of rows without top-k and top-p."""
    logits_nV = logits_nV.float()
    best_n1, best_ids_n1 = logits_nV.max(-1, keepdim=True)
    logits_nV = logits_nV - best_n1
    greedy_n = rows.temperature_n <= 0
    scale_n = rows.temperature_n.masked_fill(greedy_n, 1)
    logprobs_nV = (logits_nV / scale_n[:, None]).log_softmax(-1)
    cut_n1 = ((rows.top_p_n < 1) | (rows.top_k_n > 0))[:, None]
    kept_nV = torch.where(cut_n1, keep_likeliest(logprobs_nV, rows.top_p_n, rows.top_k_n), logprobs_nV)
    ids_n, picked_n = draw(kept_nV, uniforms_n)
    likeliest_n = -logits_nV.exp().sum(-1, dtype=torch.float64).log().float()
    return torch.where(greedy_n, best_ids_n1[:, 0], ids_n), torch.where(greedy_n, likeliest_n, picked_n)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """`z >> bits` of the unsigned number: int64 shifts copy the sign."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _finalize(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)

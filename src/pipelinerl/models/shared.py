"""Attention over a `PackedRow` whose sequences share prefixes: each shared token is in the row once.

    row     [ a a a a | b b b | c c | d ]     a: a prefix that b, c and d continue
    parts   a by a, b by b, ...               blocks: the length buckets, as without a shared prefix
            (b c d) by a                      all that continues a prefix attends to all of it, in one call

A token's attention is the mean of its outputs in these parts, weighted by exp(log-sum-exp of the part's scores). The
backward pass of a part needs only the output and the log-sum-exp over *all* keys of its queries, and the gradients of the
parts add up (FlashAttention computes its blocks like this, arXiv 2205.14135, B.2).

Shapes as in `packed.py`; a part has queries [S, h, n, D], keys and values [S, h, m, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from pipelinerl.models.packed import Bucket, PackedRow


class ScoreRule(NamedTuple):
    """How a layer computes the scores of keys: see `attention.attend`."""

    scale: float
    window: int | None
    softcap: float | None


def attend_shared(row: PackedRow, projected: Sequence[Tensor], scores: ScoreRule, sinks: Tensor | None) -> Tensor:
    """`projected`: query, key and value; shapes as in `packed.packed_attention`; `sinks` [Hq].

    Values of fewer numbers than keys (latent attention) are padded.
    """
    query, key, value = projected
    groups, size = query.shape[1] // key.shape[1], value.shape[-1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if size < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - size))
    of_tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    attended: Tensor = _Attention.apply(*of_tokens, sinks, row, scores)  # type: ignore[no-untyped-call]
    return attended[None, ..., :size]


class _Attention(torch.autograd.Function):
    """Query, key and value [T, h, D] -> [T, h, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, sinks, row, scores = inputs
        dtype = torch.promote_types(query.dtype, torch.float32)
        out_ThD = torch.zeros_like(query, dtype=dtype)
        log_z_Th1 = torch.full_like(query[..., :1], float("-inf"), dtype=dtype)
        if sinks is not None:
            log_z_Th1.copy_(sinks[:, None])  # a key whose value is 0
        for queries, keys, part in _parts(row, scores, query):
            found = part.forward(_batch(queries, query), _batch(keys, key), _batch(keys, value))
            out_nhD, log_z_nh1 = map(queries.tokens, found)
            before_nh1 = log_z_Th1[queries.start : queries.end]
            all_nh1 = torch.logaddexp(before_nh1, log_z_nh1)
            merged_nhD = out_ThD[queries.start : queries.end].mul_((before_nh1 - all_nh1).exp_())
            merged_nhD.addcmul_(out_nhD, (log_z_nh1 - all_nh1).exp_())
            before_nh1.copy_(all_nh1)
        out_ThD = out_ThD.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out_ThD, log_z_Th1)
        ctx.how = row, scores
        return out_ThD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out_ThD, log_z_Th1 = ctx.saved_tensors
        row, scores = ctx.how
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        for queries, keys, part in _parts(row, scores, query):
            grad, of_query, out, log_z = (_batch(queries, x) for x in (grads[0], query, out_ThD, log_z_Th1))
            grad = grad * _real(queries, grad)
            found = part.backward(grad, of_query, _batch(keys, key), _batch(keys, value), out, log_z)
            for gradient, bucket, of_part in zip(gradients, (queries, keys, keys), found, strict=True):
                gradient[bucket.start : bucket.end] += bucket.tokens(of_part)
        d_sinks = None
        if sinks is not None:
            share_Th = (sinks - log_z_Th1[..., 0]).exp()
            d_sinks = -(share_Th * (grads[0] * out_ThD).sum(-1)).sum(0).to(sinks.dtype)
        return *gradients, d_sinks, None, None


class _AttentionPart(NamedTuple):
    """Some queries and keys. `mask` is added to the scores; without one, attention is full, or `causal`.

    `fused`: PyTorch's kernel for CPUs computes them, otherwise the scores exist as a tensor.
    """

    scores: ScoreRule
    fused: bool
    causal: bool
    mask: Tensor | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output [S, h, n, D], and the log-sum-exp of the scores [S, h, n, 1], -inf for a query without keys."""
        if not self.fused:
            scores, _ = self._scores(query, key)
            log_z = scores.logsumexp(-1, keepdim=True)
            return (scores - log_z.clamp_min(torch.finfo(scores.dtype).min)).exp().to(value.dtype) @ value, log_z
        attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_z = attention(query, key, value, 0.0, self.causal, attn_mask=self.mask, scale=self.scores.scale)
        if self.mask is not None:
            log_z = log_z.masked_fill(self.mask.amax(-1) < 0, float("-inf"))
        return out, log_z[..., None]

    def backward(self, grad: Tensor, *of_all: Tensor) -> Sequence[Tensor]:
        """The gradients of query, key and value, from the output's. `of_all`: query, key, value, and the output and
        log-sum-exp of all keys of these queries.
        """
        query, key, value, out, log_z = of_all
        if self.fused:
            attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            given = (grad, query, key, value, out, log_z[..., 0], 0.0, self.causal)
            found: Sequence[Tensor] = attention(*given, attn_mask=self.mask, scale=self.scores.scale)
            return found
        scores, slope = self._scores(query, key)
        weights = (scores - log_z).exp()
        d_weights = (grad @ value.transpose(-1, -2)) - (grad * out).sum(-1, keepdim=True)
        d_products = (weights * d_weights * slope).to(query.dtype)
        return d_products @ key, d_products.transpose(-1, -2) @ query, weights.to(value.dtype).transpose(-1, -2) @ grad

    def _scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | float]:
        """The scores [S, h, n, m], and their derivatives by the product of a query and a key."""
        scale, _, softcap = self.scores
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
        slope: Tensor | float = scale
        if softcap is not None:
            bounded = torch.tanh(scores / softcap)
            scores, slope = bounded * softcap, (1 - bounded**2) * scale
        return scores if self.mask is None else scores + self.mask, slope


def _parts(row: PackedRow, scores: ScoreRule, query: Tensor) -> Iterator[tuple[Bucket, Bucket, _AttentionPart]]:
    fused = query.device.type == "cpu" and scores.softcap is None
    for queries, keys in [*zip(row.buckets, row.buckets, strict=True), *row.prefixes]:
        own, mask = queries is keys, None
        window = scores.window if (scores.window or row.longest) < (queries.length if own else row.longest) else None
        if window is not None or (own and (queries.branched or not fused)):
            make = partial(_mask, row, queries, keys, window, query.dtype)
            mask = row.cached((queries.start, keys.start, window, query.dtype), make)
        yield queries, keys, _AttentionPart(scores, fused, own and mask is None, mask)


def _mask(row: PackedRow, queries: Bucket, keys: Bucket, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend to a key, else -inf [S, 1, n, m]."""
    position_T11, stop_T11 = (x.view(-1, 1, 1) for x in (row.position_ids_1T, cast("Tensor", row.stops_T)))
    place_T11 = torch.arange(row.length, device=stop_T11.device).view(-1, 1, 1)
    query_S1n1, key_S11m = _batch(queries, place_T11), _batch(keys, place_T11).mT
    visible = (key_S11m <= query_S1n1) & (query_S1n1 < (_batch(keys, stop_T11) * _real(keys, stop_T11)).mT)
    if window is not None:
        visible &= _batch(keys, position_T11).mT > _batch(queries, position_T11) - window
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, float("-inf"))


def _batch(bucket: Bucket, x_ThD: Tensor) -> Tensor:
    return bucket.batch(x_ThD[bucket.start : bucket.end].transpose(0, 1))


def _real(bucket: Bucket, like: Tensor) -> Tensor | int:
    """1 for the cells [S, 1, L, 1] of tokens, 0 for padding."""
    if bucket.cell_index is None:
        return 1
    cells = like.new_zeros(bucket.count * bucket.length).index_fill_(0, bucket.cell_index, 1)
    return cells.view(bucket.count, 1, bucket.length, 1)

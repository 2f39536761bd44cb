"""Attention with other scores than products: soft caps (Gemma 2), and sinks (gpt-oss).

A sink is a further key of each query, whose score is learned and whose value is 0. No fused kernel knows either, so
scores are computed as a tensor. On a CPU, sinks alone need only what the fused kernel returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """As `attention.attend`, with sinks [h, 1] or [h, L]. Queries and keys have equally many heads."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    fused = softcap is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    if fused and sinks is not None:
        attended: Tensor = _SinkAttention.apply(query, key, value, mask, sinks, scale)  # type: ignore[no-untyped-call]
        return attended
    scores = query @ key.transpose(-1, -2)
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(scores.shape[:3])[..., None]), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value


class _SinkAttention(torch.autograd.Function):
    """Attention with sinks by the fused CPU kernel, which knows none: query, key, value, mask, sinks, scale.

    With the kernel's output o and its log-sum-exp z over the keys, the log-sum-exp over keys and sink is
    t = logaddexp(z, s), and the output is o exp(z - t). The kernel's backward computes probabilities as exp(score - z), and
    subtracts the sum over (gradient x output). Given t and the corrected output, it computes the exact gradients with the
    sink. That of the sink is -exp(s - t) (gradient x output), summed over queries: its value is 0.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, mask, sinks, scale = inputs
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, log_z = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        total = torch.logaddexp(log_z, sinks.to(log_z.dtype))
        attended: Tensor = output * (log_z - total).exp().unsqueeze(-1).to(output.dtype)
        ctx.save_for_backward(query, key, value, attended, total, sinks, mask)
        ctx.scale = scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, total, sinks, mask = ctx.saved_tensors
        gradient = grads[0].contiguous()
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for_query, for_key, for_value = kernel(
            gradient, query, key, value, attended, total, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        per_query = (gradient.to(total.dtype) * attended.to(total.dtype)).sum(-1)
        share = (sinks.to(total.dtype) - total).exp()
        for_sinks = -(share * per_query).sum(0).sum_to_size(sinks.shape).to(sinks.dtype)
        return for_query, for_key, for_value, None, for_sinks, None

"""A linear layer with an adapter that computes with merged weights: the ones that engines get, to the bit.

peft's own layer computes W x + scale * B (A x). With weights in bfloat16 that is not what an engine computes, whose merged
weights are rounded: an adapter's change that is smaller than the rounding would be trained on and never be sampled from.
Here the forward is that of the rounded weights, and the gradient passes through the rounding unchanged, as it does to the
float32 master copies of full training. It is exact otherwise. Merging costs as much as r/2 tokens' forward, and saves
the two products per token.

Shapes: O and I features of the layer, r the rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable


class LoraLinear(Linear):  # type: ignore[misc]
    """In place of a `torch.nn.Linear`, which it keeps as `base_layer`. It has one adapter."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        if self.disable_adapters:
            output: Tensor = base(x)
        else:
            output = _MergedLinear.apply(x, base.weight, base.bias, *self._adapter())  # type: ignore[no-untyped-call]
        return output

    def merged_weight(self) -> Tensor:
        """W + scale * B A [O, I], a new tensor in the type of W."""
        return merge(self.base_layer.weight, *self._adapter())

    def _adapter(self) -> tuple[Tensor, Tensor, float]:
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]


def merge(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """W + scale * B A, computed in the adapter's type and rounded once to that of W. Exactly W where B is 0."""
    return torch.addmm(weight_OI.to(a_rI.dtype), b_Or, a_rI, alpha=scale).to(weight_OI.dtype)


class _MergedLinear(torch.autograd.Function):
    """Merged weights are made anew in each direction: only x is kept in between, and no gradient is as large as W."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_rI: Tensor, b_Or: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_rI, b_Or)
        ctx.scale = scale
        return F.linear(x, merge(weight_OI, a_rI, b_Or, scale), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With y = x (W + s B A)^T: dx = dy (W + s B A), dA = s (dy B)^T x, dB = s dy^T (x A^T)."""
        x, weight_OI, a_rI, b_Or = ctx.saved_tensors
        dx = grads[0] @ merge(weight_OI, a_rI, b_Or, ctx.scale) if ctx.needs_input_grad[0] else None
        dy_NO, x_NI = grads[0].flatten(0, -2).to(a_rI.dtype), x.flatten(0, -2).to(a_rI.dtype)
        da_rI = ctx.scale * (dy_NO @ b_Or).T @ x_NI
        db_Or = ctx.scale * dy_NO.T @ (x_NI @ a_rI.T)
        return dx, None, None, da_rI, db_Or, None

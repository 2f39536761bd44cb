"""A linear layer with an adapter that computes with merged weights, bit for bit the weights that engines get.

peft's own layer computes W x + scale * B (A x). With bfloat16 weights an engine computes something else, because its merged
weights are rounded: a change of the adapter that is smaller than the rounding would be trained on but never sampled from.
Here the forward uses the rounded weights, and the gradient passes through the rounding unchanged, as it does to the float32
master copies of full training. Everything else is exact. Merging costs as much as the forward of r/2 tokens, and saves the
two products per token.

Shapes: O output and I input features of the layer, r the rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable


class LoraLinear(Linear):  # type: ignore[misc]
    """Replaces a `torch.nn.Linear`, which it keeps as `base_layer`. It has one adapter."""

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
    """W + scale * B A, computed in the adapter's type and rounded once to the type of W. Exactly W if B is 0."""
    return torch.addmm(weight_OI.to(a_rI.dtype), b_Or, a_rI, alpha=scale).to(weight_OI.dtype)


class _MergedLinear(torch.autograd.Function):
    """Computes the merged weights in forward and again in backward, to save memory: no gradient is as large as W."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes positional arguments
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

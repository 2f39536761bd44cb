"""The output head in float32.

The rounding of engine and trainer differs most in the logits, since bfloat16 has 8 bits for numbers that are then
exponentiated (MiniMax-M1, arXiv 2506.13585, found the gap between log-probabilities there).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.state import is_narrow


def multiplies_wide(weight: Tensor) -> bool:
    """Whether narrow matrices have a product in float32, which needs no float32 copies of them."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and hasattr(torch.ops.aten.mm, "dtype")


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of two narrow matrices in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


class _WideLinear(torch.autograd.Function):
    """x [T, H], weight [V, H] -> x weight^T in float32. Gradients are computed in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_VH)
        return wide_product(x_TH, weight_VH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_VH = ctx.saved_tensors
        gradient_TV = grads[0].to(weight_VH.dtype)
        of_x = gradient_TV @ weight_VH if ctx.needs_input_grad[0] else None
        return of_x, gradient_TV.t() @ x_TH if ctx.needs_input_grad[1] else None


class Float32Head(nn.Linear):
    """A linear layer that shares the parameters of `head` and computes in float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is not None or not multiplies_wide(self.weight):
            return F.linear(input.float(), self.weight.float(), None if bias is None else bias.float())
        narrow_TH = input.flatten(0, -2)
        if torch.is_grad_enabled():
            wide_TV: Tensor = _WideLinear.apply(narrow_TH, self.weight)  # type: ignore[no-untyped-call]
        else:
            wide_TV = wide_product(narrow_TH, self.weight.t())
        return wide_TV.view(*input.shape[:-1], wide_TV.shape[-1])


def use_float32_head(model: Any) -> None:
    """Make `model` compute its logits in float32. Parameters and names do not change. Does nothing to float32 weights.

    Raises UnsupportedModelError if the output head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output head; set model.head_dtype to null")
    if is_narrow(head.weight.dtype):
        model.set_output_embeddings(Float32Head(head))

"""The output head in float32.

The rounding of engine and trainer differs most in the logits, since bfloat16 has 8 bits for numbers that are then
exponentiated (MiniMax-M1, arXiv 2506.13585, found the gap between log-probabilities there).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError


class Float32Head(nn.Linear):
    """A linear layer that shares the parameters of `head` and computes in float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: Any) -> None:
    """Make `model` compute its logits in float32. Parameters and names do not change. Does nothing to float32 weights.

    Raises UnsupportedModelError if the output head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output head; set model.head_dtype to null")
    if head.weight.dtype not in (torch.float32, torch.float64):
        model.set_output_embeddings(Float32Head(head))

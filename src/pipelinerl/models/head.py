"""The output head in float32, whatever the type of the weights.

Logits are the one place where an engine's rounding and a trainer's differ most: bfloat16 has 8 bits for numbers that are
then exponentiated (MiniMax-M1, arXiv 2506.13585, found the gap of log-probabilities there).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError


class Float32Head(nn.Linear):
    """Shares the parameters of `head`; product and result are in float32."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: Any) -> None:
    """Make `model` compute its logits in float32; nothing changes if its weights are. Parameters and names stay as they are.

    Raises UnsupportedModelError if the output head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output head; set model.head_dtype to null")
    if head.weight.dtype not in (torch.float32, torch.float64):
        model.set_output_embeddings(Float32Head(head))

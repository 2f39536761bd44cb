"""Copying named tensors with the sharing between them kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipelinerl.models.state import first_names


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type a tensor is sent in: floating-point tensors may be converted, integers and booleans stay."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies on the CPU; names that shared one tensor share one copy."""
    copies: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, first in first_names(tensors).items():
            if name == first:
                tensor = tensors[name]
                copies[name] = torch.empty(tensor.shape, dtype=sent_dtype(tensor, dtype)).copy_(tensor)
            else:
                copies[name] = copies[first]
    return copies

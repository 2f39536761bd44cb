"""Adapters as tensors, and merged into the weights of a model, without peft.

Shapes: O output and I input features of a linear layer, r the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import not_finite, summary_of

Adapter = Mapping[str, tuple[Tensor, Tensor, float]]
"""A (r, I), B (O, r) and the scale of each layer with an adapter, by the layer's path."""
_PARTS = (".A", ".B", ".scale")


def merge(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """W + scale * B A, computed in the adapter's type and rounded once to the type of W. Exactly W if B is 0."""
    return torch.addmm(weight_OI.to(a_rI.dtype), b_Or, a_rI, alpha=scale).to(weight_OI.dtype)


def tensors_of(adapter: Adapter) -> dict[str, Tensor]:
    """An adapter as named tensors: what an update of weights has if the engine merges."""
    parts = {path: (a_rI.detach(), b_Or.detach(), a_rI.new_tensor(scale)) for path, (a_rI, b_Or, scale) in adapter.items()}
    return {f"{path}{part}": one for path, own in parts.items() for part, one in zip(_PARTS, own, strict=True)}


@torch.no_grad()
def load_adapter(weights: Mapping[str, Tensor], base: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Merge the adapter in `tensors` into a model's own weights, in place of the one that was merged before.

    `base` keeps a layer's own weights from the first time on; a layer that `tensors` leaves out gets them back. Raises
    WeightUpdateError before anything is changed if the model has no such layers, or a value is not finite.
    """
    names = {f"{name.removesuffix('.A')}.weight" for name in tensors if name.endswith(".A")}
    problems = summary_of("unknown", sorted(names - weights.keys()))
    if problems := problems + summary_of("with values that are not finite", not_finite(tensors)):
        raise WeightUpdateError("the adapter does not fit the model: " + "; ".join(problems))
    for name in names - base.keys():
        base[name] = weights[name].clone()
    for name, own_OI in base.items():
        parts = [tensors[f"{name.removesuffix('.weight')}{part}"].to(own_OI.device) for part in _PARTS if name in names]
        weights[name].copy_(merge(own_OI, parts[0], parts[1], float(parts[2])) if parts else own_OI)

"""Copies of weights in the dtype or layout in which the operations of an exported graph (`flat.py`) use them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_ATEN = torch.ops.aten
_PACK_FOR_ROWS = 16


class ConvertedWeight:
    """A copy of a weight in another dtype, so that it is not converted at every step (as for a float32 head)."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._weight = weight
        with torch.inference_mode(False):  # because it is later written to outside of inference mode
            self.copy = torch.empty_like(weight, dtype=dtype, requires_grad=False)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        self.copy.copy_(self._weight)


def hoist_conversions(graph: fx.Graph, inputs: list[Tensor]) -> list[ConvertedWeight]:
    """Convert the graph's own tensors once: the converted copies are appended to `inputs` as further inputs of the graph."""
    own = dict(zip([node for node in graph.nodes if node.op == "placeholder"], inputs, strict=False))
    found: list[ConvertedWeight] = []
    last = list(own)[-1]
    for node in [node for node in graph.nodes if node.target is _ATEN.to.dtype and node.args[0] in own]:
        found.append(ConvertedWeight(own[node.args[0]], node.meta["val"].dtype))
        inputs.append(found[-1].copy)
        with graph.inserting_after(last):
            last = graph.placeholder(f"converted_{len(found)}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    return found


class PackedLinear:
    """`F.linear` with a copy of the weight packed for the CPU's kernels: 1.2 to 2.3 times as fast for 1 to 64 rows.

    Packing takes longer than an update: `refresh` only drops the copy, and the plain weight is used until `pack`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.__name__ = self.__qualname__ = "packed_linear"
        self.__module__ = __name__
        self.pack()

    def refresh(self) -> None:
        self._copy: Tensor | None = None

    @torch.no_grad()
    def pack(self) -> int:
        """Returns the number of elements."""
        self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACK_FOR_ROWS)
        return self._weight.numel()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._copy is None:
            return F.linear(x, weight, bias)
        product: Tensor = self._multiply(x, self._copy, bias, "none", [], "")
        return product


def pack_linears(graph: fx.Graph, inputs: list[Tensor], smallest: int) -> list[PackedLinear]:
    """Replace float32 linear layers on a CPU, with weights of at least `smallest` elements, by `PackedLinear`."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    own = dict(zip(placeholders, inputs, strict=False))
    packed: dict[fx.Node, PackedLinear] = {}
    for node in graph.nodes:
        if node.target is not _ATEN.linear.default or not _packable(own.get(node.args[1]), smallest):
            continue
        weight = node.args[1]
        if weight not in packed:
            packed[weight] = PackedLinear(own[weight])
        node.target = packed[weight]
    return list(packed.values())


def _packable(weight: Tensor | None, smallest: int) -> bool:
    if weight is None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= smallest

"""The slots' keys and values: one preallocated tensor for all layers of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = Sequence[int] | npt.NDArray[np.int64]


class LayerShape(NamedTuple):
    """Key/value heads of a layer and the sizes of one head's key and value."""

    heads: int
    key_dim: int
    value_dim: int


class Move(NamedTuple):
    """Copy the first `length` positions of row `sources[i]` to row `targets[i]`."""

    sources: Rows
    targets: Rows
    length: int


class KVCache:
    """Keys [layers, H, heads, max_length, key_dim] and values likewise, for H slots (rows) of `max_length` tokens.

    Layers of different shapes get tensors of their own. All of it is there from the start, so an engine that could be built
    does not run out of memory later.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_length = max_length
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._blocks: list[tuple[Tensor, Tensor]] = []
        by_shape: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            by_shape.setdefault(shape, []).append(layer)
        views: dict[int, tuple[Tensor, Tensor]] = {}
        for shape, layers in by_shape.items():
            size = (len(layers), rows, shape.heads, max_length)
            keys = torch.zeros((*size, shape.key_dim), dtype=dtype, device=device)
            values = torch.zeros((*size, shape.value_dim), dtype=dtype, device=device)
            self._blocks.append((keys, values))
            views |= {layer: (keys[i], values[i]) for i, layer in enumerate(layers)}
        self._layers = [views[layer] for layer in range(len(shapes))]

    @property
    def kv_bytes(self) -> int:
        return sum(block.numel() * block.element_size() for pair in self._blocks for block in pair)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, heads, max_length, dim] of one layer, to read and write."""
        return self._layers[index]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy contents of rows, all at once: a row may be both source and target, and a permutation is fine."""
        contents = [
            (block, move, block[:, move.sources, :, : move.length])
            for move in moves
            for pair in self._blocks
            for block in pair
            if move.length and len(move.sources)
        ]
        for block, move, content in contents:
            block[:, move.targets, :, : move.length] = content

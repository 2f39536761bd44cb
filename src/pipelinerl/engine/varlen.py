"""Attention over slots in one call per layer, whatever the lengths: for devices where a call costs more than its padding.

The keys of a row lie one after the other, position by position, so decoding rows and chunks of prompts are all sequences of
one call (`models/packed.py`): a decoding row has one query, a chunk has several. There are no masks and no length buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.engine.attention import KVCache, LayerCall, LayerShape, Move, PackedTokens
from pipelinerl.engine.fused import fuse_norms, in_pieces, join_products
from pipelinerl.engine.runner import ModelRunner
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.device import to_device, try_compiler
from pipelinerl.models.varlen import attention_of, has_kernel

COMPILERS: dict[str, Any] = {"cuda": "inductor"}
"""What compiles graphs, by type of device."""


class SlotKV(KVCache):
    """Keys [layers, H * max_length + 1, heads, dim] and values likewise. The last place is for tokens that nobody reads."""

    @property
    def spare(self) -> int:
        return self.rows * self.max_length

    def _size(self, shape: LayerShape) -> tuple[int, ...]:
        if shape.key_dim != shape.value_dim:
            raise UnsupportedModelError(
                f"keys of {shape.key_dim} numbers and values of {shape.value_dim} can't share a cache"
            )
        return self.spare + 1, shape.heads

    def parts(self, length: int) -> list[Tensor]:
        sizes = self.rows, self.max_length
        return [block[:, :-1].view(len(block), *sizes, *block.shape[2:])[:, :, :length] for block in self._blocks]

    def move(self, moves: Sequence[Move]) -> None:
        """As of `Slots`. The host does not wait for the transfer of the rows' numbers."""
        device = self._blocks[0].device
        super().move(
            [Move(to_device(a, device), to_device(b, device), length) for a, b, length in moves if length and len(a)]
        )


@dataclass(slots=True)
class VarlenBatch:
    """The slots and positions of one forward: an `AttentionSite`.

    places_T             places in the cache of the forward's tokens
    cu_q, cu_k           begin of each sequence's tokens in the packed batch, and of its keys in the cache (int32)
    used                 number of keys of each sequence, this forward's included (int32)
    longest              length that a sequence may grow to
    """

    kv: SlotKV
    places_T: Tensor
    cu_q: Tensor
    cu_k: Tensor
    used: Tensor
    max_q: int
    max_k: int
    longest: int
    checked: bool

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the tokens' keys and values to the cache and attend. Shapes as in `attention.slot_attention`."""
        if call.softcap is not None or call.sinks is not None:
            raise UnsupportedModelError("soft caps and sinks need scores, which attention with variable lengths has not")
        query, key, value = (projected[0].transpose(0, 1) for projected in (query, key, value))
        keys, values = self.kv.layer(call.layer)
        keys.index_copy_(0, self.places_T, key)
        values.index_copy_(0, self.places_T, value)
        cu_k, used, window = self.cu_k, self.used, (-1 if call.window is None else call.window - 1, 0)
        if self.max_q == 1:  # the last position sees all keys: without a window, FlashAttention reads each of them once
            if call.window is not None:
                hidden = (used - call.window).clamp(min=0)
                cu_k, used = cu_k + F.pad(hidden, (0, 1)), used - hidden
            window = (-1, -1)
        attended = attention_of(query)(
            query,
            keys,
            values,
            self.cu_q,
            cu_k,
            self.max_q,
            self.max_k,
            scale=call.scale,
            window_size=window,
            seqused_k=used,
        )
        return attended[None]


class VarlenRunner(ModelRunner):
    """`ModelRunner` over a `SlotKV`. The same check at load time compares it with the model's own forward."""

    kv: SlotKV
    _kv_class = SlotKV
    _passes = (join_products, fuse_norms)
    compiled = False

    def _received_shapes(self, ids_T: Tensor) -> dict[int, LayerShape]:
        shapes = super()._received_shapes(ids_T)
        for size in {shape.key_dim for shape in shapes.values()}:
            if not has_kernel(size, self.device, self.dtype):
                raise UnsupportedModelError(f"FlashAttention has no heads of {size} numbers in {self.dtype}")
        return shapes

    def _check_flat(self, ids_T: Tensor, reference_TV: Tensor) -> None:
        """As in `ModelRunner`; then the same of the graph in compiled pieces."""
        super()._check_flat(ids_T, reference_TV)
        flat: Any = self._flat
        if self.device.type not in COMPILERS:
            return

        def compile_it() -> None:
            begin_s = time.perf_counter()
            flat.compiled, count = in_pieces(flat.module, COMPILERS[self.device.type])
            self._compare(ids_T, reference_TV)
            self._how = f" of {count} compiled pieces (made in {time.perf_counter() - begin_s:.0f} s)"

        failure = try_compiler(type(self.model).__name__, compile_it)
        self.compiled = not failure
        if failure:
            self._how, flat.compiled = failure, None

    def forward(self, tokens: PackedTokens) -> Tensor:
        """As in `ModelRunner`, for tokens that the host knows. Length buckets are not needed."""
        positions, decoding, chunks = np.asarray(tokens.positions).tolist(), tokens.decoding, tokens.chunks
        rows = [*range(decoding), *(chunk.row for chunk in chunks)]
        counts = [*[1] * decoding, *(chunk.count for chunk in chunks)]
        used = [*(position + 1 for position in positions[:decoding]), *(chunk.offset + chunk.count for chunk in chunks)]
        row_T = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        slot = self.kv.max_length
        integers = (
            [row * slot + position for row, position in zip(row_T, positions, strict=True)],
            [0, *accumulate(counts)],
            [row * slot for row in [*rows, rows[-1] + 1]],
            used,
        )
        places_T, cu_q, cu_k, used_N = (to_device(part, self.device) for part in integers)
        batch = VarlenBatch(
            kv=self.kv,
            places_T=places_T,
            cu_q=cu_q.int(),
            cu_k=cu_k.int(),
            used=used_N.int(),
            max_q=max(counts),
            max_k=max(used),
            longest=self._max_length,
            checked=self.checked,
        )
        ids_T, positions_T = to_device(tokens.ids, self.device), to_device(positions, self.device)
        keep_P = None if tokens.keep is None else to_device(tokens.keep, self.device).long()
        return self.run(ids_T, positions_T, keep_P, batch)


def row_buckets(rows: int, smallest: int = 8) -> tuple[int, ...]:
    """Numbers of rows that a decode step may compute, ascending: `rows`, and its halves down to `smallest`."""
    sizes = [rows]
    while sizes[0] > smallest:
        sizes.insert(0, max(smallest, math.ceil(sizes[0] / 2)))
    return tuple(sizes)

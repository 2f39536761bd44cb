"""The attention of the slot engine, called by any Hugging Face model that has a pluggable attention function.

The model runs on one ragged row of tokens, `[1, T]`: first one token for each decoding slot, then chunks of prompts. It
knows nothing of slots: our function receives the projected queries, keys and values of each layer together with the
`StepBatch` that was passed through the forward's keyword arguments, writes the keys and values into the slots, and
attends to exactly what each token may see. There is no mask and no cache on the model's side to go wrong.

Shapes: Hq query heads, Hk key/value heads, G = Hq / Hk, D head size, R decoding rows, L length of a row class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipelinerl.engine.kv_cache import KVCache
from pipelinerl.models.attention import attend, refuse_unknown_features

ATTENTION_NAME = "pipelinerl_slots"


@dataclass(frozen=True, slots=True)
class RowClass:
    """Decoding rows `start <= row < end`, none of which holds more than `length` tokens, this step's included."""

    start: int
    end: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `begin <= t < begin + count` of the ragged row: positions `offset...` of the sequence in `row`."""

    begin: int
    count: int
    row: int
    offset: int


@dataclass(slots=True)
class StepBatch:
    """Everything that one forward needs to know about slots.

    `positions_R` are the decoding tokens' positions; `longest` is what a sequence may grow to.
    """

    kv: KVCache
    positions_R: Tensor
    rows_R: Tensor
    classes: tuple[RowClass, ...]
    chunks: tuple[Chunk, ...]
    longest: int
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> int:
        return int(self.positions_R.shape[0])

    def decode_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [r, 1, 1, L] of a row class, made once a step for each window size."""
        mask = self._masks.get((index, window))
        if mask is None:
            part = self.classes[index]
            last_r1 = self.positions_R[part.start : part.end, None]
            columns_L = torch.arange(part.length, device=last_r1.device)
            hidden = columns_L > last_r1
            if window is not None:
                hidden |= columns_L <= last_r1 - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None, :]
            self._masks[(index, window)] = mask
        return mask


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's call: what the model projected for this step, where it goes, and how to attend.

    query [T, Hq, D], key and value [T, Hk, D]; keys and values [H, Hk, max_length, D] are the layer's slots.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window: int | None
    softcap: float | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attend(query, key, value, mask, scale=self.scale, softcap=self.softcap)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    slot_batch: StepBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, Hq, T, D], key and value [1, Hk, T, D] -> output [1, T, Hq, D].

    Raises UnsupportedModelError if the model asks for something that this function would not honour.
    """
    refuse_unknown_features(module, attention_mask, sliding_window=sliding_window, longest=slot_batch.longest, other=other)
    index: int = module.layer_idx  # type: ignore[assignment]
    keys, values = slot_batch.kv.layer(index)
    layer = _Layer(
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        keys=keys,
        values=values,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    out = query.new_empty((query.shape[2], query.shape[1], value.shape[-1]))
    if slot_batch.decoding:
        _decode(slot_batch, layer, out)
    for chunk in slot_batch.chunks:
        _prefill(chunk, layer, out)
    return out[None], None


def _decode(batch: StepBatch, layer: _Layer, out: Tensor) -> None:
    rows, kv_heads = batch.decoding, layer.key.shape[1]
    layer.keys[batch.rows_R, :, batch.positions_R] = layer.key[:rows]
    layer.values[batch.rows_R, :, batch.positions_R] = layer.value[:rows]
    # The query heads that share a key/value head become the query positions of that head: no copy of keys or values.
    grouped = layer.query[:rows].reshape(rows, kv_heads, -1, layer.query.shape[-1])
    for index, part in enumerate(batch.classes):
        rows_r = slice(part.start, part.end)
        mask = batch.decode_mask(index, layer.window, layer.query.dtype)
        keys, values = layer.keys[rows_r, :, : part.length], layer.values[rows_r, :, : part.length]
        out[rows_r] = layer.attend(grouped[rows_r], keys, values, mask).reshape(part.end - part.start, *out.shape[1:])


def _prefill(chunk: Chunk, layer: _Layer, out: Tensor) -> None:
    tokens = slice(chunk.begin, chunk.begin + chunk.count)
    end = chunk.offset + chunk.count
    layer.keys[chunk.row, :, chunk.offset : end] = layer.key[tokens].transpose(0, 1)
    layer.values[chunk.row, :, chunk.offset : end] = layer.value[tokens].transpose(0, 1)
    query = layer.query[tokens].transpose(0, 1)
    keys, values = layer.keys[chunk.row, :, :end], layer.values[chunk.row, :, :end]
    mask = None
    if chunk.offset or layer.softcap is not None or (layer.window is not None and end > layer.window):
        positions_c1 = torch.arange(chunk.offset, end, device=query.device)[:, None]
        columns = torch.arange(end, device=query.device)
        hidden = columns > positions_c1
        if layer.window is not None:
            hidden |= columns <= positions_c1 - layer.window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    out[tokens] = layer.attend(query[None], keys[None], values[None], mask)[0].transpose(0, 1)

"""The attention of the slot engine, called by any Hugging Face model that has a pluggable attention function.

The model runs on one ragged row of tokens, `[1, T]`: first one token for each decoding slot, then chunks of prompts. It
knows nothing of slots: our function receives the projected queries, keys and values of each layer together with the
`StepBatch` that was passed through the forward's keyword arguments, writes the keys and values into the slots, and
attends to exactly what each token may see. There is no mask and no cache on the model's side to go wrong.

Shapes: Hq query heads, Hk key/value heads, G = Hq / Hk, D head size, R decoding rows, L length of a row class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pipelinerl.engine.kv_cache import KVCache
from pipelinerl.models.attention import attend, refuse_unknown_features

ATTENTION_NAME = "pipelinerl_slots"


@dataclass(frozen=True, slots=True)
class RowClass:
    """Decoding rows `start <= row < end`, none of which holds more than `length` tokens, this step's included.

    `equal` rows all hold exactly `length`: there is nothing to hide from them.
    """

    start: int
    end: int
    length: int
    equal: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `begin <= t < begin + count` of the ragged row: positions `offset...` of the sequence in `row`."""

    begin: int
    count: int
    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Neighbouring chunks of the same count and offset, attended to at once: `rows_N`, from token `begin` of the row on."""

    begin: int
    count: int
    offset: int
    rows_N: Tensor


def batch_chunks(chunks: Sequence[Chunk], device: torch.device) -> tuple[ChunkBatch, ...]:
    """Chunks in the order of the ragged row -> as few batches as there are runs of equal count and offset."""
    batches = []
    for (count, offset), run in groupby(chunks, key=lambda chunk: (chunk.count, chunk.offset)):
        members = list(run)
        rows_N = torch.tensor([chunk.row for chunk in members], device=device)
        batches.append(ChunkBatch(members[0].begin, count, offset, rows_N))
    return tuple(batches)


@dataclass(slots=True)
class StepBatch:
    """Everything that one forward needs to know about slots.

    `positions_R` are the decoding tokens' positions; `longest` is what a sequence may grow to. Once a model is `checked`
    its layers are not asked again whether they want what is not here.
    """

    kv: KVCache
    positions_R: Tensor
    rows_R: Tensor
    classes: tuple[RowClass, ...]
    chunks: tuple[ChunkBatch, ...]
    longest: int
    checked: bool = False
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> int:
        return int(self.positions_R.shape[0])

    @property
    def equal_length(self) -> int | None:
        """Tokens of every decoding row, this step's included, if it is the same number for all."""
        return self.classes[0].length if len(self.classes) == 1 and self.classes[0].equal else None

    def decode_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [r, 1, 1, L] of a row class, made once a step for each window size; None if nothing is hidden."""
        part = self.classes[index]
        if part.equal and (window is None or part.length <= window):
            return None
        mask = self._masks.get((index, window))
        if mask is None:
            last_r1 = self.positions_R[part.start : part.end, None]
            columns_L = torch.arange(part.length, device=last_r1.device)
            hidden = columns_L > last_r1
            if window is not None:
                hidden |= columns_L <= last_r1 - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None, :]
            self._masks[(index, window)] = mask
        return mask


@dataclass(slots=True)
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        return attend(query, key, value, mask, scale=self.scale, softcap=self.softcap, causal=causal)


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
    if not slot_batch.checked:
        refuse_unknown_features(
            module, attention_mask, sliding_window=sliding_window, longest=slot_batch.longest, other=other
        )
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
    parts = [_decode(slot_batch, layer)] if slot_batch.decoding else []
    parts += [_prefill(chunk, layer) for chunk in slot_batch.chunks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(batch: StepBatch, layer: _Layer) -> Tensor:
    """Attention of the decoding rows' tokens, [R, Hq, D]."""
    rows, kv_heads = batch.decoding, layer.key.shape[1]
    if batch.equal_length is not None:
        layer.keys[:rows, :, batch.equal_length - 1] = layer.key[:rows]
        layer.values[:rows, :, batch.equal_length - 1] = layer.value[:rows]
    else:
        layer.keys[batch.rows_R, :, batch.positions_R] = layer.key[:rows]
        layer.values[batch.rows_R, :, batch.positions_R] = layer.value[:rows]
    # The query heads that share a key/value head become the query positions of that head: no copy of keys or values.
    grouped = layer.query[:rows].reshape(rows, kv_heads, -1, layer.query.shape[-1])
    parts = []
    for index, part in enumerate(batch.classes):
        rows_r = slice(part.start, part.end)
        mask = batch.decode_mask(index, layer.window, layer.query.dtype)
        keys, values = layer.keys[rows_r, :, : part.length], layer.values[rows_r, :, : part.length]
        parts.append(layer.attend(grouped[rows_r], keys, values, mask, causal=False))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    return attended.reshape(rows, layer.query.shape[1], layer.value.shape[-1])


def _prefill(batch: ChunkBatch, layer: _Layer) -> Tensor:
    """Attention of a batch of chunks, [n * count, Hq, D]."""
    n, count, offset = len(batch.rows_N), batch.count, batch.offset
    tokens, end = slice(batch.begin, batch.begin + n * count), offset + count
    query, keys, values = (
        x[tokens].reshape(n, count, *x.shape[1:]).transpose(1, 2) for x in (layer.query, layer.key, layer.value)
    )
    layer.keys[batch.rows_N, :, offset:end] = keys
    layer.values[batch.rows_N, :, offset:end] = values
    if offset:
        keys, values = layer.keys[batch.rows_N, :, :end], layer.values[batch.rows_N, :, :end]
    mask = None
    if offset or layer.softcap is not None or (layer.window is not None and end > layer.window):
        positions_c1 = torch.arange(offset, end, device=query.device)[:, None]
        columns = torch.arange(end, device=query.device)
        hidden = columns > positions_c1
        if layer.window is not None:
            hidden |= columns <= positions_c1 - layer.window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return layer.attend(query, keys, values, mask, causal=True).transpose(1, 2).flatten(0, 1)

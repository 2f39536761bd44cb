"""The engine's attention, called by any Hugging Face model with a pluggable attention function.

The model runs on one packed batch of tokens, `[1, T]`: first one token for each decoding row, then chunks of prompts. It
needs no mask and no cache: for each layer it calls our function with the projected queries, keys and values, and with the
`StepBatch` that was passed through the forward's keyword arguments. The function writes keys and values to the KV cache
and attends to exactly the positions that each token may see.

Shapes: Hq query heads, Hk key/value heads, G = Hq / Hk, D head size, R decoding rows, L length of a length bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import attend, refuse_unknown_features

# ---- the KV cache


Rows = Sequence[int] | npt.NDArray[np.int64] | Tensor


class LayerShape(NamedTuple):
    """Number of key/value heads of a layer, and the key and value sizes of one head."""

    heads: int
    key_dim: int
    value_dim: int


class Move(NamedTuple):
    """Copy the first `length` positions of row `sources[i]` to row `targets[i]`."""

    sources: Rows
    targets: Rows
    length: int


class Slots:
    """What H sequences need of their past tokens, in tensors with a row per sequence.

    `has_states`: a row also holds what can't be cut to fewer tokens, such as the state of a recurrence.
    """

    has_states = False

    def parts(self, length: int) -> list[Tensor]:
        """Views [..., H, ...] of all tensors, with the rows in the second dimension: of the first `length` positions."""
        raise NotImplementedError

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows, as if all at once: a row may be both source and target, so permutations work."""
        work = [
            (part, move.targets, part[:, move.sources])
            for move in moves
            if move.length and len(move.sources)
            for part in self.parts(move.length)
        ]
        for part, targets, content in work:
            part[:, targets] = content


class KVCache(Slots):
    """Keys [layers, H, heads, max_length, key_dim] and values likewise, for H slots (rows) of `max_length` tokens.

    One tensor pair for all layers of the same shape; `shapes` are by layer. Everything is allocated at the start, so that an
    engine that could be built does not run out of memory later.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], rows: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.max_length = rows, max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocks: list[Tensor] = []
        by_shape: dict[LayerShape, list[int]] = {}
        for layer, shape in shapes.items():
            by_shape.setdefault(shape, []).append(layer)
        for shape, layers in by_shape.items():
            size = (len(layers), *self._size(shape))
            keys = torch.zeros((*size, shape.key_dim), dtype=dtype, device=device)
            values = torch.zeros((*size, shape.value_dim), dtype=dtype, device=device)
            self._blocks += [keys, values]
            self._layers |= {layer: (keys[i], values[i]) for i, layer in enumerate(layers)}

    def _size(self, shape: LayerShape) -> tuple[int, ...]:
        """The dimensions between the layers and the numbers of a head."""
        return self.rows, shape.heads, self.max_length

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, to read and write."""
        return self._layers[index]

    def parts(self, length: int) -> list[Tensor]:
        return [block[:, :, :, :length] for block in self._blocks]


# ---- attention

ATTENTION_NAME = "pipelinerl_slots"

_SMALL, _MANY = 4096, 24
"""Decoding uses two batched products instead of the fused kernel if the keys of a head have at most `_SMALL` elements and
there are at least `_MANY` rows (measured)."""


class LengthBucket(NamedTuple):
    """Decoding rows `start <= row < end` with at most `length` tokens each, this step's included.

    If `equal`, every row holds exactly `length` tokens, and no mask is needed.
    """

    start: int
    end: int
    length: int
    equal: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `begin <= t < begin + count` of the packed batch, at positions `offset...` of the sequence in `row`."""

    begin: int
    count: int
    row: int
    offset: int


class PackedTokens(NamedTuple):
    """The input of a forward over slots: one token for each of the rows `0 <= row < decoding`, then the chunks' tokens.

    keep       indices of the tokens whose logits are computed; None: all, if there are no chunks
    buckets    the decoding rows by length
    """

    ids: Sequence[int] | Tensor
    positions: Sequence[int] | Tensor
    keep: Sequence[int] | None
    decoding: int = 0
    buckets: tuple[LengthBucket, ...] = ()
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Adjacent chunks of equal count and offset, attended to in one call. `begin`: their first token in the packed batch."""

    begin: int
    count: int
    offset: int
    rows_N: Tensor


def batch_chunks(chunks: Sequence[Chunk], device: torch.device) -> tuple[ChunkBatch, ...]:
    """Group `chunks`, in packed order, into one batch per run of equal count and offset."""
    batches = []
    for (count, offset), run in groupby(chunks, key=lambda chunk: (chunk.count, chunk.offset)):
        members = list(run)
        rows_N = torch.tensor([chunk.row for chunk in members], device=device)
        batches.append(ChunkBatch(members[0].begin, count, offset, rows_N))
    return tuple(batches)


@dataclass(slots=True)
class StepBatch:
    """Slots, positions and chunks of one forward.

    positions_R     position of each decoding token, in the cache rows `rows_R`
    longest         length that a sequence may grow to
    checked         the model has been checked for unsupported attention features; its layers are not checked again
    equal_length    number of tokens in every decoding row, this step's included, if all are equal; else None
    places          index of the decoding tokens into a layer's keys and values
    """

    kv: KVCache
    positions_R: Tensor
    rows_R: Tensor
    buckets: tuple[LengthBucket, ...]
    chunks: tuple[ChunkBatch, ...]
    longest: int
    checked: bool = False
    decoding: int = field(init=False)
    equal_length: int | None = field(init=False)
    places: tuple[Tensor | slice, ...] = field(init=False)
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decoding = int(self.positions_R.shape[0])
        self.equal_length = self.buckets[0].length if len(self.buckets) == 1 and self.buckets[0].equal else None
        self.places = (self.rows_R, slice(None), self.positions_R)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write this step's keys and values to the cache and attend. Shapes as in `slot_attention`."""
        query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        if not self.chunks:
            return _decode(self, call, query, key, value)[None]
        parts = [_decode(self, call, query, key, value)] if self.decoding else []
        parts += [_prefill(self.kv, chunk, call, (query, key, value)) for chunk in self.chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def decode_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [r, 1, 1, L] of a bucket, made once per step and window size; None if nothing is masked."""
        bucket = self.buckets[index]
        if bucket.equal and (window is None or bucket.length <= window):
            return None
        mask = self._masks.get((index, window))
        if mask is None:
            mask = causal_mask(self.positions_R[bucket.start : bucket.end], bucket.length, window, dtype)[:, None, None]
            self._masks[(index, window)] = mask
        return mask


def causal_mask(positions_n: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """The additive mask [n, L]: which of `length` positions the tokens at `positions_n` see."""
    columns_L, last_n1 = torch.arange(length, device=positions_n.device), positions_n[:, None]
    hidden_nL = columns_L > last_n1
    if window is not None:
        hidden_nL |= columns_L <= last_n1 - window
    return torch.zeros(hidden_nL.shape, dtype=dtype, device=hidden_nL.device).masked_fill_(hidden_nL, float("-inf"))


class LayerCall(NamedTuple):
    """Attention settings of one layer: index, scale of its scores, sliding window, soft cap, and the heads' sinks [Hq]."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class AttentionSite(Protocol):
    """Computes attention for a model. Passed to the model's forward as `slot_batch`."""

    @property
    def checked(self) -> bool: ...

    @property
    def longest(self) -> int: ...

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class ShapeProbe:
    """Records the shapes of the keys and values that each layer's attention receives, in a forward of its own."""

    checked = True
    longest = 1

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if call.layer in self.shapes:
            raise UnsupportedModelError(f"attention layer {call.layer} is used twice in a forward")
        self.shapes[call.layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    slot_batch: AttentionSite | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, Hq, T, D], key and value [1, Hk, T, D] -> output [1, T, Hq, D]; `s_aux`: sinks [Hq].

    Raises UnsupportedModelError if the model asks for a feature that this function does not support.
    """
    if slot_batch is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without slots: its model does not pass keyword arguments on to its "
            "attention, so the embedded engine can't run it"
        )
    if not slot_batch.checked:
        refuse_unknown_features(
            module, attention_mask, sliding_window=sliding_window, longest=slot_batch.longest, other=other
        )
    index: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_batch.attend(LayerCall(index, scale, sliding_window, softcap, s_aux), query, key, value), None


def _decode(batch: StepBatch, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention output [R, Hq, D] of the decoding rows."""
    rows, heads, kv_heads = batch.decoding, query.shape[1], key.shape[1]
    keys, values = batch.kv.layer(call.layer)
    if batch.chunks:
        query, key, value = query[:rows], key[:rows], value[:rows]
    if batch.equal_length is not None:
        keys[:rows, :, batch.equal_length - 1] = key
        values[:rows, :, batch.equal_length - 1] = value
    else:
        keys[batch.places] = key
        values[batch.places] = value
    # Query heads that share a key/value head become query positions of that head, which avoids copying keys and values.
    query = query.unsqueeze(2) if heads == kv_heads else query.reshape(rows, kv_heads, -1, query.shape[-1])
    parts = []
    for index, (start, end, length, _) in enumerate(batch.buckets):
        rows_r = slice(start, end)
        query_r = query if end - start == rows else query[rows_r]
        mask = batch.decode_mask(index, call.window, query.dtype)
        parts.append(_attend_one(query_r, keys[rows_r, :, :length], values[rows_r, :, :length], mask, call))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    return attended.reshape(rows, heads, -1)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: LayerCall) -> Tensor:
    """One token per row: query [r, Hk, G, D], keys and values [r, Hk, L, D], mask [r, 1, 1, L] -> [r, Hk, G, D]."""
    sinks = None if call.sinks is None else call.sinks.view(query.shape[1:3])
    small = keys.shape[2] * keys.shape[3] <= _SMALL and keys.shape[0] >= _MANY
    if call.softcap is not None or sinks is not None or query.device.type != "cpu" or not small:
        return attend(query, keys, values, mask, scale=call.scale, softcap=call.softcap, causal=False, sinks=sinks)
    # With so little work per row, the fused kernel's overhead per row dominates; two batched products are faster.
    scores = torch.matmul(query, keys.transpose(2, 3)).mul_(call.scale)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(scores.softmax(-1), values)


def _prefill(kv: KVCache, chunk: ChunkBatch, call: LayerCall, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention output [n * count, Hq, D] of a batch of chunks; `projected` holds all tokens' queries, keys and values."""
    n, count, offset = len(chunk.rows_N), chunk.count, chunk.offset
    tokens, end = slice(chunk.begin, chunk.begin + n * count), offset + count
    query, new_keys, new_values = (x[tokens].reshape(n, count, *x.shape[1:]).transpose(1, 2) for x in projected)
    keys, values = kv.layer(call.layer)
    keys[chunk.rows_N, :, offset:end] = new_keys
    values[chunk.rows_N, :, offset:end] = new_values
    if offset:
        new_keys, new_values = keys[chunk.rows_N, :, :end], values[chunk.rows_N, :, :end]
    mask = None
    needs_mask = offset or call.softcap is not None or call.sinks is not None
    if needs_mask or (call.window is not None and end > call.window):
        mask = causal_mask(torch.arange(offset, end, device=query.device), end, call.window, query.dtype)
    sinks = None if call.sinks is None else call.sinks[:, None]
    attended = attend(query, new_keys, new_values, mask, scale=call.scale, softcap=call.softcap, sinks=sinks)
    return attended.transpose(1, 2).flatten(0, 1)

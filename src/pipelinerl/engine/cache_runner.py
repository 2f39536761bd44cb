"""Runs models that the packed runner can't run, by being their cache: models with recurrent states, and old classes.

The model's own layers compute everything. What they keep of past tokens is in tensors with one row per slot: keys and values
by position, recurrent and convolution states as a whole. For each forward, the layers of the model's cache get the rows of
its sequences. Decoding rows are adjacent, so they are views, and nothing is copied.

Sequences of different lengths share a decoding batch: the model asks for its masks by a function that knows each row's
positions. A model that doesn't ask for them runs one batch for each length. If a model can't continue a sequence by several
tokens at once, all tokens of a prompt except its first chunk run one by one. The check at load time finds what is needed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from pipelinerl.engine.attention import Chunk, ChunkBatch, LengthBucket, Move, PackedTokens, batch_chunks
from pipelinerl.engine.rounding import in_float32, require_same
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import choose_attention, returned_cache, unsupported
from pipelinerl.models.own_forward import accepts, logits_at, recurrence_chunk, use_configured_time_steps
from pipelinerl.models.state import is_narrow

ATTENTION_NAME = "pipelinerl_cache"

_INDEXER = "indexer_keys"
_PROBE_TOKENS = 5
_PROBE_ROWS = 3
_TOLERANCE = 1e-5
"""Log-probabilities in float32 may be off by this much, or by rounding. That is strict: the two forms of a recurrence (one
token, several) may differ by what matters little while weights are small."""
_DECODED = 12
"""Tokens of each row that the check decodes one by one."""
_STATEFUL = frozenset(
    {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "DummyLayer",
    }
)
"""Classes of cache layers whose whole state is tensors by position, and tensors of a fixed size per sequence."""


# ---- the slots


@dataclass(frozen=True, slots=True)
class SlotView:
    """The part of the slots that one forward reads and writes: n rows, c new tokens in each.

    rows          the rows: adjacent ones, or their indices
    positions     position of each new token [n, c]
    offset        position of each row's first token, if all are equal, else None
    end           number of positions that attention sees
    fresh         the sequences begin with these tokens
    """

    rows: slice | Tensor
    positions: Tensor
    offset: int | None
    end: int
    fresh: bool


class KeyValueSlots:
    """Keys [H, heads, max_length, dim] and values likewise of one layer."""

    def __init__(self, keys: Tensor, values: Tensor, rows: int, max_length: int) -> None:
        self.keys, self.values = (x.new_zeros(rows, x.shape[1], max_length, x.shape[3]) for x in (keys, values))

    def update(self, view: SlotView, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values [n, heads, c, dim]. Returns both at all positions that attention sees."""
        if view.offset is not None:
            place = slice(view.offset, view.offset + key.shape[2])
            self.keys[view.rows, :, place], self.values[view.rows, :, place] = key, value
        else:
            rows, positions = torch.arange(len(key), device=key.device), view.positions[:, 0]
            self.keys[rows, :, positions], self.values[rows, :, positions] = key[:, :, 0], value[:, :, 0]
        return self.keys[view.rows, :, : view.end], self.values[view.rows, :, : view.end]


class _KeyValueLayer:
    """The part of a cache layer that holds keys and values. Mixed into the model's own class of cache layers."""

    is_sliding = False
    slots: KeyValueSlots
    indexed: KeyValueSlots
    view: SlotView

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.slots.update(self.view, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The keys [n, L, dim] by which a sparse indexer chooses the positions that attention sees."""
        keys = indexer_key_states[:, None]
        return self.indexed.update(self.view, keys, keys[..., :0])[0][:, 0]

    @property
    def indexer_position_ids(self) -> Tensor:
        """Positions [3, n, L] of earlier tokens, which Qwen4 Exp's indexer reads; it sets them to what they are anyway."""
        rows, device = len(self.view.positions), self.view.positions.device
        return torch.arange(self.get_seq_length(), device=device).expand(3, rows, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, _: Tensor) -> None: ...

    def get_seq_length(self) -> int:
        return self.view.end - self.view.positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the signature of transformers
        return self.view.end, 0


StatePath = tuple[Any, ...]
"""Where a cache layer has a state: an attribute, and a key if that is a dictionary."""


class LayerSlots:
    """All slots of one layer, and the cache layer through which the model reaches them.

    `new` is the layer in an unused cache of the model, `used` in a cache with tokens.
    """

    def __init__(self, new: Any, used: Any, rows: int, max_length: int) -> None:
        self._new, self._used = dict(vars(new)), dict(vars(used))
        self.states: dict[StatePath, Tensor] = {}
        self.by_position: list[Tensor] = []
        if isinstance(used, CacheLayerMixin) and used.is_initialized and isinstance(used.keys, Tensor):
            slots = KeyValueSlots(used.keys, used.values, rows, max_length)
            self.by_position += [slots.keys, slots.values]
            kept = {"keys": None, "values": None, "slots": slots, "is_initialized": True}
            if isinstance(keys := getattr(used, _INDEXER, None), Tensor):
                indexed = KeyValueSlots(keys[:, None], keys[:, None, :, :0], rows, max_length)
                self.by_position.append(indexed.keys)
                kept |= {_INDEXER: None, "indexed": indexed}
            self._new |= kept
            self._used |= kept
            kind: type = type(f"Slots{type(new).__name__}", (_KeyValueLayer, type(new)), {})
        else:
            kind = type(new)
        self.layer: Any = object.__new__(kind)
        for path, state in _states(used):
            self.states[path] = state.new_zeros(rows, *state.shape[1:])

    def enter(self, view: SlotView) -> None:
        """Prepare the cache layer for a forward over `view`."""
        values = self._new if view.fresh else self._used
        attributes = vars(self.layer)
        attributes.clear()
        attributes.update({name: dict(value) if isinstance(value, dict) else value for name, value in values.items()})
        attributes["view"] = view
        if not view.fresh:
            for path, slots in self.states.items():
                holder, key = self._place(path)
                holder[key] = slots[view.rows]

    def leave(self, view: SlotView) -> None:
        """Store the states after the forward, unless they are views of the slots."""
        for path, slots in self.states.items():
            holder, key = self._place(path)
            if holder[key].data_ptr() != slots[view.rows].data_ptr():
                slots[view.rows] = holder[key]

    def _place(self, path: StatePath) -> tuple[dict[Any, Any], Any]:
        """The dictionary that has the state, and its key there."""
        attributes = vars(self.layer)
        return (attributes, path[0]) if len(path) == 1 else (attributes[path[0]], path[1])


def _states(layer: Any) -> Iterator[tuple[StatePath, Tensor]]:
    for name, value in vars(layer).items():
        if name in ("keys", "values", _INDEXER, "indexer_position_ids"):
            continue
        found = [((name, key), state) for key, state in value.items()] if isinstance(value, dict) else [((name,), value)]
        yield from ((path, state) for path, state in found if isinstance(state, Tensor) and state.ndim > 1)


class SlotCache:
    """The slots of all layers, for `rows` sequences of at most `max_length` tokens."""

    def __init__(self, new: Any, used: Any, rows: int, max_length: int) -> None:
        self.max_length = max_length
        self.layers = [LayerSlots(a, b, rows, max_length) for a, b in zip(new.layers, used.layers, strict=True)]
        self.cache = copy.copy(new)
        self.cache.layers = [slots.layer for slots in self.layers]

    @property
    def kv_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in (*layer.by_position, *layer.states.values()))

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows, as if all at once. States are copied as a whole: they are those after the last position."""
        work: list[tuple[Tensor, Any, Tensor]] = []
        for move in moves:
            if not (move.length and len(move.sources)):
                continue
            for layer in self.layers:
                for slots in layer.by_position:
                    part = slots[:, :, : move.length]
                    work.append((part, move.targets, part[move.sources]))
                work += [(slots, move.targets, slots[move.sources]) for slots in layer.states.values()]
        for slots, targets, content in work:
            slots[targets] = content


# ---- masks and attention of a forward over slots

_VIEW: ContextVar[SlotView] = ContextVar("view")


def _row_masks(
    *, mask_function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, device: Any = "cpu", **_: Any
) -> Tensor:
    """The additive mask [n, 1, c, L] of a kind of layers: `mask_function` tells which position sees which."""
    view = _VIEW.get()
    rows, count = view.positions.shape
    row = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    column = torch.arange(view.end, device=device)[None, None, None, :]
    visible = mask_function(row, head, view.positions[:, None, :, None], column).expand(rows, 1, count, view.end)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def _own_attention(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    """The attention that the model's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *arguments, **options)


# ---- the runner


class CacheRunner:
    """Runs a Hugging Face causal LM over slots, like `ModelRunner`, through its own forward and cache.

    Raises UnsupportedModelError if log-probabilities computed over slots differ from the model's own forward.
    """

    flat = False

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        self.model = model.eval()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        self._max_length = max_length
        self._has_positions = accepts(model, "position_ids")
        self._ragged = self._continues = True
        use_configured_time_steps(model)
        AttentionInterface.register(ATTENTION_NAME, _own_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _row_masks)
        name = type(model).__name__
        with unsupported(f"{name} fails on the probe that the embedded engine checks models with"), torch.inference_mode():
            with in_float32(model):
                self._new, self._used = self._probe(name)
                self.error = self._check()
            if is_narrow(self.dtype):
                self._new, self._used = self._probe(name)
                ids_T, reference_TV = self._own_logits()
                self.error = self._error(ids_T, reference_TV, self.dtype)
        self.kv = SlotCache(self._new, self._used, rows, max_length)
        slow = [] if self._ragged else ["sequences of different lengths can't share a batch"]
        slow += [] if self._continues else ["prompts longer than engine.prefill_tokens are processed token by token"]
        self.description = "; ".join(["through its own cache, at about half the speed of packed batches", *slow])

    def weights_changed(self) -> None:
        """The model computes with its own parameters only."""

    def forward(self, tokens: PackedTokens) -> Tensor:
        """As in `ModelRunner`; `keep` is in ascending order."""
        decoding = tokens.decoding
        ids_T = torch.as_tensor(tokens.ids, device=self.device)
        positions_R = torch.as_tensor(tokens.positions, device=self.device)[:decoding]
        keep = range(len(ids_T)) if tokens.keep is None else tokens.keep
        keep_P = torch.as_tensor(keep, dtype=torch.long, device=self.device)
        parts = []
        if decoding:
            longest = max(bucket.length for bucket in tokens.buckets)
            parts.append(self._decode(ids_T[:decoding], positions_R, longest)[keep_P[keep_P < decoding]])
        for chunk in batch_chunks(tokens.chunks, self.device):
            own = slice(chunk.begin, chunk.begin + chunk.count * len(chunk.rows_N))
            inside = (keep_P >= own.start) & (keep_P < own.stop)
            parts.append(self._prefill(ids_T[own], chunk, keep_P[inside] - own.start))
        return torch.cat(parts)

    def _decode(self, ids_R: Tensor, positions_R: Tensor, longest: int) -> Tensor:
        if self._ragged:
            view = SlotView(slice(0, len(ids_R)), positions_R[:, None], None, longest, fresh=False)
            return self._run(ids_R[:, None], view, torch.arange(len(ids_R), device=self.device))
        logits: list[Tensor] = [ids_R] * len(ids_R)
        for position in sorted(set(positions_R.tolist())):
            rows = (positions_R == position).nonzero()[:, 0]
            view = SlotView(rows, positions_R[rows, None], position, position + 1, fresh=False)
            found = self._run(ids_R[rows, None], view, torch.arange(len(rows), device=self.device))
            for row, line in zip(rows.tolist(), found, strict=True):
                logits[row] = line
        return torch.stack(logits)

    def _prefill(self, ids_T: Tensor, chunk: ChunkBatch, cells_P: Tensor) -> Tensor:
        """Logits at `cells_P` of the chunk's tokens."""
        rows: slice | Tensor = chunk.rows_N
        if len(chunk.rows_N) == 1:
            rows = slice(int(chunk.rows_N), int(chunk.rows_N) + 1)
        ids = ids_T.view(len(chunk.rows_N), chunk.count)
        step = chunk.count if chunk.offset == 0 or self._continues else 1
        parts, order = [], []
        for start in range(0, chunk.count, step):
            begin, end = chunk.offset + start, chunk.offset + start + step
            positions = torch.arange(begin, end, device=self.device).expand(len(ids), -1)
            view = SlotView(rows, positions, begin, end, fresh=begin == 0)
            column = cells_P % chunk.count - start
            inside = ((column >= 0) & (column < step)).nonzero()[:, 0]
            cells = cells_P[inside] // chunk.count * step + column[inside]
            parts.append(self._run(ids[:, start : start + step], view, cells))
            order.append(inside)
        return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(order).argsort()]

    def _run(self, ids_nc: Tensor, view: SlotView, cells_P: Tensor) -> Tensor:
        for layer in self.kv.layers:
            layer.enter(view)
        inputs = {"input_ids": ids_nc, self._cache_argument: self.kv.cache, "use_cache": True}
        if self._has_positions:
            inputs["position_ids"] = view.positions
        token = _VIEW.set(view)
        try:
            logits_PV = logits_at(self.model, cells_P, **inputs)
        finally:
            _VIEW.reset(token)
        for layer in self.kv.layers:
            layer.leave(view)
        return logits_PV

    # ---- the check at load time

    def _probe(self, name: str) -> tuple[Any, Any]:
        """An unused cache of the model, and a cache with tokens. Sets the name of the cache's argument."""
        choose_attention(self.model, "eager")
        found = []
        for tokens in (_PROBE_TOKENS, _PROBE_TOKENS + 1):
            out = self.model(
                input_ids=torch.zeros(_PROBE_ROWS, tokens, dtype=torch.long, device=self.device), use_cache=True
            )
            if (named := returned_cache(out)) is None:
                raise UnsupportedModelError(f"{name} returns no cache, so the embedded engine can't run it")
            self._cache_argument, cache = named
            found.append(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache)
        used, longer = found
        if type(used) is not DynamicCache:
            raise UnsupportedModelError(f"{name} has a cache of its own ({type(used).__name__})")
        new = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        if [type(layer) for layer in new.layers] != [type(layer) for layer in used.layers]:
            raise UnsupportedModelError(f"{name} fills a cache with other layers than its configuration says")
        other = sorted({type(layer).__name__ for layer in used.layers} - _STATEFUL)
        if other:
            raise UnsupportedModelError(f"{name} has states that slots can't hold ({', '.join(other)})")
        for layer, again in zip(used.layers, longer.layers, strict=True):
            for (path, state), (_, other_state) in zip(_states(layer), _states(again), strict=True):
                if state.shape != other_state.shape or state.shape[0] != _PROBE_ROWS:
                    raise UnsupportedModelError(f"{name} has a state ({path[0]}) whose size is not fixed")
        return new, used

    def _check(self) -> float:
        """The largest difference of log-probabilities. Sets how batches are formed: the fastest way that is exact."""
        ids_T, reference_TV = self._own_logits()
        refusals: list[Exception] = []
        given = self._has_positions
        ways = [(True, True, given), (True, False, given), (False, True, given), (False, False, given)]
        if given:  # a model may count its positions itself, from another number than 0 (RoBERTa)
            ways += [(False, True, False), (False, False, False)]
        for way in ways:
            self._ragged, self._continues, self._has_positions = way
            try:
                return self._error(ids_T, reference_TV, torch.float32)
            except Exception as error:  # noqa: BLE001 - a way that the model's code does not allow, or that is not exact
                refusals.append(error)
        raise next((error for error in refusals if isinstance(error, UnsupportedModelError)), refusals[-1])

    def _own_logits(self) -> tuple[Tensor, Tensor]:
        """The ids [T] of the probe, and logits [T, V] of the model's own forward."""
        ids_T = self._probe_ids()
        choose_attention(self.model, "eager")
        return ids_T, self.model(input_ids=ids_T[None], use_cache=False).logits[0]

    def _error(self, ids_T: Tensor, reference_TV: Tensor, dtype: torch.dtype) -> float:
        """The difference in `dtype` between the way that was chosen and the model's own forward."""
        choose_attention(self.model, ATTENTION_NAME if self._ragged else "eager")
        logits_NV, order_N = self._slot_logits(ids_T)
        return require_same(logits_NV, reference_TV[order_N], self.model, ids_T, dtype, least=_TOLERANCE)

    def _probe_ids(self) -> Tensor:
        length = min(2 * recurrence_chunk(self.model) + 3 * _DECODED, self._max_length)
        ids_T = torch.randint(self.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).to(self.device)
        # Padding may have an embedding of zeros, for which a sparse indexer's scores are all equal and its choice arbitrary.
        if (padding := getattr(self.model.get_input_embeddings(), "padding_idx", None)) is not None:
            ids_T[ids_T == padding] = (padding + 1) % self.vocabulary
        return ids_T

    def _slot_logits(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of two sequences, and the position [N] in `ids_T` of each.

        One runs in two chunks, is moved, and is decoded together with the other.
        """
        length = len(ids_T)
        self.kv = SlotCache(self._new, self._used, 2, length)
        decoded = max(1, min(_DECODED, length // 4))
        longer = length - decoded
        shorter, split = max(1, longer // 3), max(1, longer * 5 // 8)
        found: list[tuple[int, Tensor]] = []
        for begin, end in ((0, split), (split, longer), (0, shorter)):
            if begin == 0 and found:
                self.kv.move([Move([1], [0], longer)])
            chunk = Chunk(begin=0, count=end - begin, row=1, offset=begin)
            part = PackedTokens(ids_T[begin:end], range(begin, end), range(end - begin), chunks=(chunk,))
            found.append((begin, self.forward(part)))
        for i in range(decoded):
            positions = [longer + i, shorter + i]
            buckets = (LengthBucket(0, 2, min(length, longer + i + 3)),)
            logits = self.forward(PackedTokens(ids_T[positions], positions, keep=None, decoding=2, buckets=buckets))
            found += [(longer + i, logits[:1]), (shorter + i, logits[1:])]
        order_N = torch.cat([torch.arange(start, start + len(logits), device=self.device) for start, logits in found])
        return torch.cat([logits for _, logits in found]), order_N

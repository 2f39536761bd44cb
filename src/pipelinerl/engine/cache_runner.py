"""Runs models that the packed runner can't run, by being their cache: models with recurrent states, and old classes.

The model's own layers compute everything. What they keep of past tokens is in tensors with one row per slot: keys and values
by position, recurrent and convolution states as a whole. For each forward, the layers of the model's cache get the rows of
its sequences. Decoding rows are adjacent, so they are views, and nothing is copied.

Sequences of different lengths share a decoding batch: the model asks for its masks by a function that knows each row's
positions. If a model can't continue a sequence by several tokens at once, all tokens of a prompt except its first chunk run
one by one. The check at load time finds out.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from pipelinerl.engine.attention import ChunkBatch, PackedTokens, Slots, batch_chunks
from pipelinerl.engine.runner import Runner
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import choose_attention, returned_cache, unsupported
from pipelinerl.models.layers import in_float32
from pipelinerl.models.own_forward import logits_at, recurrence_chunk, use_configured_time_steps
from pipelinerl.models.state import is_narrow

ATTENTION_NAME = "pipelinerl_cache"

_PROBE_TOKENS = 5
_PROBE_ROWS = 3
_STATEFUL = frozenset(
    {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DummyLayer",
    }
)
"""Classes of cache layers whose whole state is keys and values by position, and tensors of a fixed size per sequence."""


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


class _KeyValueLayer:
    """The part of a cache layer that holds keys and values. Mixed into the model's own class of cache layers.

    It has all slots of the layer: keys [H, heads, max_length, dim] and values likewise.
    """

    is_sliding = False
    slot_keys: Tensor
    slot_values: Tensor
    view: SlotView

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values [n, heads, c, dim]. Returns both at all positions that attention sees."""
        view, keys, values = self.view, self.slot_keys, self.slot_values
        if view.offset is not None:
            place = slice(view.offset, view.offset + key_states.shape[2])
            keys[view.rows, :, place], values[view.rows, :, place] = key_states, value_states
        else:
            rows, positions = torch.arange(len(key_states), device=keys.device), view.positions[:, 0]
            keys[rows, :, positions], values[rows, :, positions] = key_states[:, :, 0], value_states[:, :, 0]
        return keys[view.rows, :, : view.end], values[view.rows, :, : view.end]

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
        self.by_position: list[Tensor] = []
        kind = type(new)
        if isinstance(used, CacheLayerMixin) and used.is_initialized and isinstance(used.keys, Tensor):
            self.by_position = [x.new_zeros(rows, x.shape[1], max_length, x.shape[3]) for x in (used.keys, used.values)]
            keys, values = self.by_position
            shared = {"keys": None, "values": None, "slot_keys": keys, "slot_values": values, "is_initialized": True}
            self._new |= shared
            self._used |= shared
            kind = type(f"Slots{type(new).__name__}", (_KeyValueLayer, type(new)), {})
        self.layer: Any = object.__new__(kind)
        self.states = {path: state.new_zeros(rows, *state.shape[1:]) for path, state in _states(used)}

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
        if name in ("keys", "values"):
            continue
        found = [((name, key), state) for key, state in value.items()] if isinstance(value, dict) else [((name,), value)]
        yield from ((path, state) for path, state in found if isinstance(state, Tensor) and state.ndim > 1)


class SlotCache(Slots):
    """The slots of all layers, for `rows` sequences of at most `max_length` tokens."""

    def __init__(self, new: Any, used: Any, rows: int, max_length: int) -> None:
        self.max_length = max_length
        self.layers = [LayerSlots(a, b, rows, max_length) for a, b in zip(new.layers, used.layers, strict=True)]
        self.cache = copy.copy(new)
        self.cache.layers = [slots.layer for slots in self.layers]
        self.has_states = any(layer.states for layer in self.layers)

    def parts(self, length: int) -> list[Tensor]:
        """States as a whole: they are those after the last position."""
        by_position = [slots[None, :, :, :length] for layer in self.layers for slots in layer.by_position]
        return by_position + [slots[None] for layer in self.layers for slots in layer.states.values()]


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


class CacheRunner(Runner):
    """Runs a Hugging Face causal LM over slots, like `ModelRunner`, through its own forward and cache.

    Raises UnsupportedModelError if log-probabilities computed over slots differ from the model's own forward.
    """

    kv: SlotCache
    tolerance = 1e-5
    """Strict: the two forms of a recurrence (one token, several) may differ by what is small while weights are small."""

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        super().__init__(model, max_length)
        self._has_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._continues = True
        use_configured_time_steps(model)
        AttentionInterface.register(ATTENTION_NAME, _own_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _row_masks)
        name = type(model).__name__
        with unsupported(f"{name} fails on the probe that the embedded engine checks models with"), torch.inference_mode():
            own = self.dtype
            with in_float32(model):
                self.dtype = torch.float32
                self._new, self._used = self._probe(name)
                self._check()
            self.dtype = own
            if is_narrow(own):
                self._new, self._used = self._probe(name)
                self._compare(*self._own_logits())
        self._make_kv(rows, max_length)
        self.description = "through its own cache, at about half the speed of packed batches"
        if not self._continues:
            self.description += "; prompts longer than engine.prefill_tokens are processed token by token"

    def _make_kv(self, rows: int, max_length: int) -> None:
        self.kv = SlotCache(self._new, self._used, rows, max_length)

    def forward(self, tokens: PackedTokens) -> Tensor:
        """As in `ModelRunner`; `keep` is in ascending order."""
        decoding = tokens.decoding
        ids_T = torch.as_tensor(tokens.ids, device=self.device)
        positions_R1 = torch.as_tensor(tokens.positions, device=self.device)[:decoding, None]
        keep = range(len(ids_T)) if tokens.keep is None else tokens.keep
        keep_P = torch.as_tensor(keep, dtype=torch.long, device=self.device)
        parts = []
        if decoding:
            longest = max(bucket.length for bucket in tokens.buckets)
            view = SlotView(slice(0, decoding), positions_R1, None, longest, fresh=False)
            parts.append(self._run(ids_T[:decoding, None], view, keep_P[keep_P < decoding]))
        for chunk in batch_chunks(tokens.chunks, self.device):
            own = slice(chunk.begin, chunk.begin + chunk.count * len(chunk.rows_N))
            inside = (keep_P >= own.start) & (keep_P < own.stop)
            parts.append(self._prefill(ids_T[own], chunk, keep_P[inside] - own.start))
        return torch.cat(parts)

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
        ids = torch.zeros(_PROBE_ROWS, _PROBE_TOKENS, dtype=torch.long, device=self.device)
        if (named := returned_cache(self.model(input_ids=ids, use_cache=True))) is None:
            raise UnsupportedModelError(f"{name} returns no cache, so the embedded engine can't run it")
        self._cache_argument, used = named
        if type(used) is not DynamicCache:
            raise UnsupportedModelError(f"{name} has a cache of its own ({type(used).__name__})")
        if other := sorted({type(layer).__name__ for layer in used.layers} - _STATEFUL):
            raise UnsupportedModelError(f"{name} has states that slots can't hold ({', '.join(other)})")
        return DynamicCache(config=self.model.config.get_text_config(decoder=True)), used

    def _check(self) -> None:
        """Compare with the model's own forward. Sets whether sequences are continued by several tokens at once."""
        ids_T, reference_TV = self._own_logits()
        try:
            self._compare(ids_T, reference_TV)
        except Exception:  # noqa: BLE001 - what the model's code does not allow, or what is not exact
            self._continues = False
            self._compare(ids_T, reference_TV)

    def _own_logits(self) -> tuple[Tensor, Tensor]:
        """The ids [T] of the probe, which cross a chunk of a recurrence, and logits [T, V] of the model's own forward."""
        ids_T = self._probe_ids(2 * recurrence_chunk(self.model) + 36)
        choose_attention(self.model, "eager")
        reference_TV: Tensor = self.model(input_ids=ids_T[None], use_cache=False).logits[0]
        choose_attention(self.model, ATTENTION_NAME)
        return ids_T, reference_TV

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
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from pipelinerl.engine.attention import Chunk, ChunkBatch, LengthBucket, Move, batch_chunks
from pipelinerl.engine.rounding import in_float32, require_same
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import choose_attention, returned_cache, unsupported
from pipelinerl.models.own_forward import accepts, logits_at, recurrence_chunk, use_configured_time_steps
from pipelinerl.models.state import is_narrow

ATTENTION_NAME = "pipelinerl_cache"
_log = logging.getLogger(__name__)

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
class View:
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

    def update(self, view: View, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values [n, heads, c, dim]; return those of all positions that attention sees."""
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
    view: View

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


class StatePath(NamedTuple):
    """Where a cache layer has a state: an attribute, and a key if that is a dictionary."""

    attribute: str
    key: object = None

    def read(self, layer: Any) -> Any:
        value = vars(layer)[self.attribute]
        return value[self.key] if isinstance(value, dict) else value

    def write(self, layer: Any, state: Tensor) -> None:
        if isinstance(vars(layer)[self.attribute], dict):
            vars(layer)[self.attribute][self.key] = state
        else:
            vars(layer)[self.attribute] = state


class LayerSlots:
    """All slots of one layer, and the cache layer through which the model reaches them.

    `new` is the layer in an unused cache of the model, `used` in a cache with tokens.
    """

    def __init__(self, new: Any, used: Any, rows: int, max_length: int) -> None:
        self._new, self._used = dict(vars(new)), dict(vars(used))
        self.states: dict[StatePath, Tensor] = {}
        self.by_position: list[KeyValueSlots] = []
        if isinstance(used, CacheLayerMixin) and used.is_initialized and isinstance(used.keys, Tensor):
            self.by_position.append(KeyValueSlots(used.keys, used.values, rows, max_length))
            kept = {"keys": None, "values": None, "slots": self.by_position[0], "is_initialized": True}
            if isinstance(keys := getattr(used, _INDEXER, None), Tensor):
                self.by_position.append(KeyValueSlots(keys[:, None], keys[:, None, :, :0], rows, max_length))
                kept |= {_INDEXER: None, "indexed": self.by_position[1]}
            self._new |= kept
            self._used |= kept
            kind: type = type(f"Slots{type(new).__name__}", (_KeyValueLayer, type(new)), {})
        else:
            kind = type(new)
        self.layer: Any = object.__new__(kind)
        for path, state in _states(used):
            self.states[path] = state.new_zeros(rows, *state.shape[1:])

    @property
    def tensors(self) -> Iterator[Tensor]:
        for slots in self.by_position:
            yield from (slots.keys, slots.values)
        yield from self.states.values()

    def enter(self, view: View) -> None:
        """Prepare the cache layer for a forward over `view`."""
        values = self._new if view.fresh else self._used
        attributes = vars(self.layer)
        attributes.clear()
        attributes.update({name: dict(value) if isinstance(value, dict) else value for name, value in values.items()})
        attributes["view"] = view
        if not view.fresh:
            for path, slots in self.states.items():
                path.write(self.layer, slots[view.rows])

    def leave(self, view: View) -> None:
        """Store the states after the forward, unless they are views of the slots."""
        for path, slots in self.states.items():
            state, place = path.read(self.layer), slots[view.rows]
            if state.data_ptr() != place.data_ptr():
                slots[view.rows] = state


def _states(layer: Any) -> Iterator[tuple[StatePath, Tensor]]:
    for name, value in vars(layer).items():
        if name in ("keys", "values", _INDEXER, "indexer_position_ids"):
            continue
        found = value.items() if isinstance(value, dict) else [(None, value)]
        for key, state in found:
            if isinstance(state, Tensor) and state.ndim > 1:
                yield StatePath(name, key), state


class SlotCache:
    """The slots of all layers, for `rows` sequences of at most `max_length` tokens."""

    def __init__(self, new: Any, used: Any, rows: int, max_length: int) -> None:
        self.max_length = max_length
        self.layers = [LayerSlots(a, b, rows, max_length) for a, b in zip(new.layers, used.layers, strict=True)]
        self.cache = copy.copy(new)
        self.cache.layers = [slots.layer for slots in self.layers]

    @property
    def kv_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows, as if all at once. States are copied as a whole: they are those after the last position."""
        work: list[tuple[Tensor, Any, Tensor]] = []
        for move in moves:
            if not (move.length and len(move.sources)):
                continue
            for layer in self.layers:
                for kept in layer.by_position:
                    for slots in (kept.keys, kept.values):
                        part = slots[:, :, : move.length]
                        work.append((part, move.targets, part[move.sources]))
                work += [(slots, move.targets, slots[move.sources]) for slots in layer.states.values()]
        for slots, targets, content in work:
            slots[targets] = content


# ---- masks and attention of a forward over slots

_VIEW: ContextVar[View] = ContextVar("view")


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


def instead_of_packed(
    model: Any, rows: int, max_length: int, *, own_attention: str, reason: UnsupportedModelError
) -> CacheRunner:
    """A runner for a model that can't run packed, for `reason`. Raises UnsupportedModelError, with both reasons."""
    choose_attention(model, own_attention)
    try:
        runner = CacheRunner(model, rows, max_length)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; and not over packed batches: {reason}") from error
    _log.warning("%s runs %s: %s", type(model).__name__, runner.description, reason)
    return runner


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

    def forward(
        self,
        kv: SlotCache,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        *,
        keep: Sequence[int] | Tensor | None,
        decoding: int = 0,
        buckets: tuple[LengthBucket, ...] = (),
        chunks: tuple[Chunk, ...] = (),
    ) -> Tensor:
        """Logits [len(keep), V]. Arguments as for `ModelRunner`; `keep` is in ascending order."""
        ids_T = torch.as_tensor(token_ids, device=self.device)
        positions_T = torch.as_tensor(positions, device=self.device)
        every = torch.arange(len(ids_T), device=self.device)
        keep_P = every if keep is None else torch.as_tensor(keep, dtype=torch.long, device=self.device)
        parts = []
        if decoding:
            longest = max(bucket.length for bucket in buckets)
            parts.append(self._decode(kv, ids_T[:decoding], positions_T[:decoding], longest))
            parts[0] = parts[0][keep_P[keep_P < decoding]]
        for chunk in batch_chunks(chunks, self.device):
            tokens = slice(chunk.begin, chunk.begin + chunk.count * len(chunk.rows_N))
            inside = (keep_P >= tokens.start) & (keep_P < tokens.stop)
            parts.append(self._prefill(kv, ids_T[tokens], chunk, keep_P[inside] - tokens.start))
        return torch.cat(parts)

    def _decode(self, kv: SlotCache, ids_R: Tensor, positions_R: Tensor, longest: int) -> Tensor:
        if self._ragged:
            every = torch.arange(len(ids_R), device=self.device)
            view = View(slice(0, len(ids_R)), positions_R[:, None], None, longest, fresh=False)
            return self._run(kv, ids_R[:, None], view, every)
        logits: list[Tensor] = [ids_R] * len(ids_R)
        for position in sorted(set(positions_R.tolist())):
            rows = (positions_R == position).nonzero()[:, 0]
            view = View(rows, positions_R[rows, None], position, position + 1, fresh=False)
            found = self._run(kv, ids_R[rows, None], view, torch.arange(len(rows), device=self.device))
            for row, line in zip(rows.tolist(), found, strict=True):
                logits[row] = line
        return torch.stack(logits)

    def _prefill(self, kv: SlotCache, ids_T: Tensor, chunk: ChunkBatch, cells_P: Tensor) -> Tensor:
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
            view = View(rows, positions, begin, end, fresh=begin == 0)
            column = cells_P % chunk.count - start
            inside = ((column >= 0) & (column < step)).nonzero()[:, 0]
            cells = cells_P[inside] // chunk.count * step + column[inside]
            parts.append(self._run(kv, ids[:, start : start + step], view, cells))
            order.append(inside)
        return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(order).argsort()]

    def _run(self, kv: SlotCache, ids_nc: Tensor, view: View, cells_P: Tensor) -> Tensor:
        for layer in kv.layers:
            layer.enter(view)
        inputs = {"input_ids": ids_nc, self._cache_argument: kv.cache, "use_cache": True}
        if self._has_positions:
            inputs["position_ids"] = view.positions
        token = _VIEW.set(view)
        try:
            logits_PV = logits_at(self.model, cells_P, **inputs)
        finally:
            _VIEW.reset(token)
        for layer in kv.layers:
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
                    raise UnsupportedModelError(f"{name} has a state ({path.attribute}) whose size is not fixed")
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
        kv = SlotCache(self._new, self._used, 2, length)
        decoded = max(1, min(_DECODED, length // 4))
        longer = length - decoded
        shorter, split = max(1, longer // 3), max(1, longer * 5 // 8)
        found: list[tuple[int, Tensor]] = []
        for begin, end, row in ((0, split, 1), (split, longer, 1)):
            found.append((begin, self._chunk_logits(kv, ids_T, begin, end, row)))
        kv.move([Move([1], [0], longer)])
        found.append((0, self._chunk_logits(kv, ids_T, 0, shorter, 1)))
        for i in range(decoded):
            positions = torch.tensor([longer + i, shorter + i], device=self.device)
            buckets = (LengthBucket(0, 2, min(length, longer + i + 3)),)
            logits = self.forward(kv, ids_T[positions], positions, keep=None, decoding=2, buckets=buckets)
            found += [(longer + i, logits[:1]), (shorter + i, logits[1:])]
        order_N = torch.cat([torch.arange(start, start + len(logits), device=self.device) for start, logits in found])
        return torch.cat([logits for _, logits in found]), order_N

    def _chunk_logits(self, kv: SlotCache, ids_T: Tensor, begin: int, end: int, row: int) -> Tensor:
        chunk = Chunk(begin=0, count=end - begin, row=row, offset=begin)
        return self.forward(kv, ids_T[begin:end], torch.arange(begin, end), keep=range(end - begin), chunks=(chunk,))

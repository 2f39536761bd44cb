"""Runs the model over a packed batch of tokens, and checks at load time that the result is right for this model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pipelinerl.engine.attention import (
    ATTENTION_NAME,
    AttentionSite,
    Chunk,
    KVCache,
    LayerShape,
    LengthBucket,
    Move,
    PackedTokens,
    ShapeProbe,
    StepBatch,
    batch_chunks,
    slot_attention,
)
from pipelinerl.engine.flat import FlatForward
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import (
    choose_attention,
    deviations,
    refuse_states,
    replace_attention,
    returned_cache,
    rope_limit,
    unsupported,
)
from pipelinerl.models.loading import learned_positions
from pipelinerl.models.state import is_narrow

if TYPE_CHECKING:
    from pipelinerl.engine.cache_runner import CacheRunner

    Runner: TypeAlias = "ModelRunner | CacheRunner"

_CHECK_TOKENS = 24
TOLERANCE = 1e-4
"""Log-probabilities may be off by this much on the probe, or by `rounding.rounding_limit`."""

_log = logging.getLogger(__name__)


def make_runner(model: Any, rows: int, max_length: int, *, flatten: bool = True) -> Runner:
    """The fastest runner that is exact for `model`. Takes ownership of the model and changes its attention.

    Raises UnsupportedModelError if there is none, or if the model's positions can't be right up to `max_length`.
    """
    refuse_longer(model, max_length)
    own = model.config._attn_implementation
    try:
        return ModelRunner(model, rows, max_length, flatten=flatten)
    except UnsupportedModelError as reason:
        from pipelinerl.engine.cache_runner import CacheRunner  # noqa: PLC0415 - most models don't need it

        choose_attention(model, own)
        try:
            runner = CacheRunner(model, rows, max_length)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; and not over packed batches: {reason}") from error
        _log.warning("%s runs %s: %s", type(model).__name__, runner.description, reason)
        return runner


def refuse_longer(model: Any, max_length: int) -> None:
    """Raise UnsupportedModelError if the model's positions can't be right up to `max_length`."""
    most = learned_positions(model)
    if most is not None and max_length > most:
        raise UnsupportedModelError(f"{type(model).__name__} has {most} positions; set engine.max_length to {most}")
    limit = rope_limit(model)
    if limit is not None and max_length > limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its position encoding beyond {limit} tokens, which sequences that share a "
            f"batch can't follow; set engine.max_length to {limit}"
        )


class ModelRunner:
    """Runs a Hugging Face causal LM over slots. Takes ownership of the model and replaces its attention.

    Raises UnsupportedModelError if the architecture does not fit, or if log-probabilities computed over slots differ from
    the model's own.

    With `flatten`, the forward runs as an exported graph (see `flat.py`). A model with data-dependent operations can't be
    exported and runs as it is, with the same results. `flat` is true if the graph is used.
    """

    _kv_class = KVCache
    _passes: tuple[Callable[..., None], ...] = ()
    _how = ""

    def __init__(self, model: Any, rows: int, max_length: int, *, flatten: bool = True) -> None:
        self.model = model.eval()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        self._max_length = max_length
        self._rows = torch.arange(max(rows, 2), device=self.device)
        # None during the check, so that the model builds its masks and our attention can check them. Afterwards a dummy
        # mask, which our attention ignores, keeps transformers from spending time on building masks.
        self._mask: Tensor | None = None
        self._flat: FlatForward | None = None
        with unsupported(f"{type(model).__name__} fails on the probe that the embedded engine checks models with"):
            self._check(flatten)
        self._make_kv(rows, max_length)
        self.description = "over packed batches" + (f", as an exported graph{self._how}" if self.flat else "")

    @property
    def flat(self) -> bool:
        return self._flat is not None

    @property
    def checked(self) -> bool:
        """Whether the model's attention features have been checked."""
        return self._mask is not None

    def _make_kv(self, rows: int, max_length: int) -> None:
        self.kv = self._kv_class(self._shapes, rows, max_length, self.dtype, self.device)

    def weights_changed(self) -> None:
        """Must be called after every write to the model's parameters."""
        if self._flat is not None:
            self._flat.weights_changed()

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Logits [len(keep), V]. Must be called in inference mode."""
        ids_T = torch.as_tensor(tokens.ids, device=self.device)
        positions_T = torch.as_tensor(tokens.positions, device=self.device)
        batch = StepBatch(
            kv=self.kv,
            positions_R=positions_T[: tokens.decoding],
            rows_R=self._rows[: tokens.decoding],
            buckets=tokens.buckets,
            chunks=batch_chunks(tokens.chunks, self.device),
            longest=self._max_length,
            checked=self.checked,
        )
        keep_P = None if tokens.keep is None else torch.as_tensor(tokens.keep, dtype=torch.long, device=self.device)
        return self.run(ids_T, positions_T, keep_P, batch)

    def run(self, ids_T: Tensor, positions_T: Tensor, keep_P: Tensor | None, batch: AttentionSite) -> Tensor:
        """Logits of the packed batch at the indices `keep_P` (None: all, if all tokens are decoding rows)."""
        if self._flat is not None:
            keep_P = self._rows[: len(ids_T)] if keep_P is None else keep_P
            return self._flat(ids_T[None], positions_T[None], keep_P, batch)
        out = self.model(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self._mask,
            use_cache=False,
            # 0 means all: the model then does not copy its hidden states.
            logits_to_keep=0 if keep_P is None else keep_P,
            slot_batch=batch,
        )
        logits: Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def _check(self, flatten: bool) -> None:
        """Compare logits with the model's own attention, without and, if possible, with the exported graph."""
        window = _sliding_window(self.model)
        length = min(_CHECK_TOKENS + (window if window and window <= 512 else 0), self._max_length)
        ids_T = torch.randint(self.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).to(self.device)
        replace_attention(self.model, ATTENTION_NAME, slot_attention)
        reference_TV = self._own_logits(ids_T)
        self._shapes = self._received_shapes(ids_T)
        if is_narrow(self.dtype):
            from pipelinerl.engine.rounding import in_float32  # noqa: PLC0415 - as below

            dtype, self.dtype = self.dtype, torch.float32
            with in_float32(self.model):
                self._compare(ids_T, self._own_logits(ids_T))
            self.dtype = dtype
        self._compare(ids_T, reference_TV)
        self._mask = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=self.device)
        if flatten:
            try:
                self._flat = FlatForward(self.model, *self._passes)
            except Exception as error:  # noqa: BLE001 - torch.export raises whatever the model's code does to it
                name, reason = type(self.model).__name__, str(error).partition("\n")[0]
                _log.warning("%s can't be exported as a graph, which costs some speed: %s", name, reason)
        if self._flat is not None:
            self._check_flat(ids_T, reference_TV)

    def _check_flat(self, ids_T: Tensor, reference_TV: Tensor) -> None:
        """Compare the exported graph's logits with the model's own [T, V]."""
        self._compare(ids_T, reference_TV)

    def _own_logits(self, ids_T: Tensor) -> Tensor:
        """Logits [T, V] of the model's own forward."""
        self.model.set_attn_implementation("eager")
        reference = self.model(input_ids=ids_T[None], use_cache=True)
        if (named := returned_cache(reference)) is not None:
            refuse_states(named[1], type(self.model).__name__)
        self.model.set_attn_implementation(ATTENTION_NAME)
        logits: Tensor = reference.logits[0]
        return logits

    def _received_shapes(self, ids_T: Tensor) -> dict[int, LayerShape]:
        probe = ShapeProbe()
        positions_1T = torch.arange(len(ids_T), device=self.device)[None]
        # A number as `logits_to_keep`, the default too, would make Gemma 4 slice the masks, which don't exist here.
        inputs = {"input_ids": ids_T[None], "position_ids": positions_1T, "logits_to_keep": positions_1T[0]}
        self.model(**inputs, use_cache=False, slot_batch=probe)
        return probe.shapes

    def _compare(self, ids_T: Tensor, reference_TV: Tensor) -> None:
        """Raise UnsupportedModelError if logits computed over slots differ from the model's own."""
        self._make_kv(2, len(ids_T))
        logits_TV = self._slot_logits(ids_T)
        self.error = float(deviations(logits_TV, reference_TV).max())
        if not self.error <= TOLERANCE:
            from pipelinerl.engine.rounding import require_same  # noqa: PLC0415 - few models round so much

            self.error = require_same(logits_TV, reference_TV, self.model, ids_T, self.dtype, least=TOLERANCE)

    def _slot_logits(self, ids_T: Tensor) -> Tensor:
        """Logits [T, V] of `ids_T`, processed as two prompt chunks and then token by token, over two rows."""
        length = int(ids_T.shape[0])
        split, prompt = length // 3, 2 * length // 3
        parts = []
        for begin, end in ((0, split), (split, prompt)):
            # The prompt is processed in row 1 and moved to row 0 for decoding, as in a busy engine.
            chunk = Chunk(begin=0, count=end - begin, row=1, offset=begin)
            keep = range(end - begin)
            parts.append(self.forward(PackedTokens(ids_T[begin:end], range(begin, end), keep, chunks=(chunk,))))
        self.kv.move([Move([1], [0], prompt)])
        for position in range(prompt, length):
            buckets = (LengthBucket(0, 1, position + 1),)
            token = ids_T[position : position + 1]
            parts.append(self.forward(PackedTokens(token, [position], keep=[0], decoding=1, buckets=buckets)))
        return torch.cat(parts)


def _sliding_window(model: Any) -> int | None:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    types = getattr(config, "layer_types", None)
    if window is None or not used or (types is not None and "sliding_attention" not in types):
        return None
    return int(window)

"""Runs the model over a packed batch of tokens, and checks at load time that the result is right for this model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

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
    deviations,
    refuse_changed_positions,
    refuse_states,
    replace_attention,
    returned_cache,
    unsupported,
)
from pipelinerl.models.loading import learned_positions
from pipelinerl.models.state import is_narrow

NARROW_TOLERANCE = 0.25
"""In types narrower than float32: the median over tokens, of the log-probability of the likeliest one.

How much they round depends on the model: with logits of 30, neighbouring numbers in bfloat16 are 0.125 apart. A mistake
can't hide behind that, because narrow weights must also be exact in float32 (`in_float32`).
"""
_CHECK_TOKENS = 24
_DECODED = 12
"""Tokens of each row that the check decodes one by one."""

_log = logging.getLogger(__name__)


def refuse_longer(model: Any, max_length: int) -> None:
    """Raise UnsupportedModelError if the model's positions can't be right up to `max_length`."""
    most = learned_positions(model)
    if most is not None and max_length > most:
        raise UnsupportedModelError(f"{type(model).__name__} has {most} positions; set engine.max_length to {most}")
    refuse_changed_positions(model, max_length)


class Runner:
    """Runs a model over slots, and compares itself with the model's own forward at load time."""

    kv: Any
    description: str
    error: float
    """On the probe: the largest one in float32, in narrower types the median error of the likeliest tokens."""
    tolerance = 1e-4
    """Log-probabilities in float32 may be off by this much on the probe, or by `rounding_limit`."""

    def __init__(self, model: Any, max_length: int) -> None:
        self.model = model.eval()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        self._max_length = max_length

    def weights_changed(self) -> None:
        """Must be called after every write to the model's parameters."""

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Logits [len(keep), V]. Must be called in inference mode."""
        raise NotImplementedError

    def _make_kv(self, rows: int, max_length: int) -> None:
        raise NotImplementedError

    def _probe_ids(self, length: int) -> Tensor:
        length = min(length, self._max_length)
        return torch.randint(self.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).to(self.device)

    def _compare(self, ids_T: Tensor, reference_TV: Tensor) -> None:
        """Raise UnsupportedModelError if logits computed over slots differ from the model's own, or are NaN."""
        self._make_kv(2, len(ids_T))
        logits_NV, order_N = self._slot_logits(ids_T)
        own_NV = reference_TV[order_N]
        if is_narrow(self.dtype):
            likeliest_N1 = own_NV.argmax(-1, keepdim=True)
            found_N1, own_N1 = (of.float().log_softmax(-1).gather(1, likeliest_N1) for of in (logits_NV, own_NV))
            self.error, limit = float((found_N1 - own_N1).abs().median()), NARROW_TOLERANCE
        else:
            self.error, limit = float(deviations(logits_NV, own_NV).max()), self.tolerance
            if self.error > limit:
                from pipelinerl.models.layers import rounding_limit  # noqa: PLC0415 - few models round so much

                limit = rounding_limit(self.model, ids_T, least=limit)
        if not self.error <= limit:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} can't be run by the embedded engine: on a probe its log-probabilities are off "
                f"by {self.error:.2g} (limit {limit:.2g})"
            )

    def _slot_logits(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of two sequences, and the position [N] in `ids_T` of each.

        One runs in two chunks, is moved, and is decoded together with the other, as in a busy engine.
        """
        length = len(ids_T)
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


class ModelRunner(Runner):
    """Runs a Hugging Face causal LM over slots. Takes ownership of the model and replaces its attention.

    Raises UnsupportedModelError if the architecture does not fit, or if log-probabilities computed over slots differ from
    the model's own.

    With `flatten`, the forward runs as an exported graph (see `flat.py`). A model with data-dependent operations can't be
    exported and runs as it is, with the same results.
    """

    _kv_class = KVCache
    _passes: tuple[Callable[..., None], ...] = ()
    _how = ""

    def __init__(self, model: Any, rows: int, max_length: int, *, flatten: bool = True) -> None:
        super().__init__(model, max_length)
        self._rows = torch.arange(max(rows, 2), device=self.device)
        # None during the check, so that the model builds its masks and our attention can check them. Afterwards a dummy
        # mask, which our attention ignores, keeps transformers from spending time on building masks.
        self._mask: Tensor | None = None
        self._flat: FlatForward | None = None
        with unsupported(f"{type(model).__name__} fails on the probe that the embedded engine checks models with"):
            self._check(flatten)
        self._make_kv(rows, max_length)
        self.description = "over packed batches" + (f", as an exported graph{self._how}" if self._flat is not None else "")

    @property
    def checked(self) -> bool:
        """Whether the model's attention features have been checked."""
        return self._mask is not None

    def _make_kv(self, rows: int, max_length: int) -> None:
        self.kv = self._kv_class(self._shapes, rows, max_length, self.dtype, self.device)

    def weights_changed(self) -> None:
        if self._flat is not None:
            self._flat.weights_changed()

    def forward(self, tokens: PackedTokens) -> Tensor:
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
        ids_T = self._probe_ids(_CHECK_TOKENS + (window if window and window <= 512 else 0))
        replace_attention(self.model, ATTENTION_NAME, slot_attention)
        reference_TV = self._own_logits(ids_T)
        self._shapes = self._received_shapes(ids_T)
        if is_narrow(self.dtype):
            from pipelinerl.models.layers import in_float32  # noqa: PLC0415 - only for them

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
            else:
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


def _sliding_window(model: Any) -> int | None:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    types = getattr(config, "layer_types", None)
    if window is None or not used or (types is not None and "sliding_attention" not in types):
        return None
    return int(window)

"""Training forward over many sequences packed in one row, without padding and without attention between them.

A Hugging Face model computes everything but attention token by token, so a row `[1, T]` of concatenated sequences is
right as it is once two things are taken care of: positions restart in each sequence (we pass them), and attention stays
within a sequence (we are the model's attention function). The sequences are laid out by length; similar lengths are
padded to a small batch inside attention only, where causality makes right padding harmless.

Shapes: T tokens of the row, P sampled tokens, V vocabulary, S sequences of a bucket, L their padded length,
h heads (query heads Hq, key/value heads Hk), D head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.packed_row import PackedRow
from pipelinerl.types import Segment

ATTENTION_NAME = "pipelinerl_packed"
# Arguments that models pass to attention and that do not change its result here: we build neither masks nor caches.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "past_key_values",
        "cache_position",
        "layer_idx",
        "output_router_logits",
    }
)


@dataclass(frozen=True, slots=True)
class _SlidingWindow:
    """Stands in for the mask of a model's sliding-window layers: says what the model's own mask would have done."""

    size: int


def use_packed_attention(model: nn.Module) -> None:
    """Make `model` (a Hugging Face causal LM in eval mode) attend within the sequences of a `PackedRow`.

    Raises UnsupportedModelError if its attention can't be replaced, or if a short packed row does not give the logits
    that its own attention gives for each sequence alone.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - heavy, and only needed here

    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} can't be trained: its attention can't be replaced; use another model class")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{name} can't be trained: its forward has no logits_to_keep; use another model class")
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    _select_attention(model, ATTENTION_NAME)
    _verify(model)


def sampled_logits(model: nn.Module, row: PackedRow) -> Tensor:
    """Logits [P, V], in the model's dtype, of the positions that predict the row's sampled tokens.

    Call `use_packed_attention(model)` once before. Raises UnsupportedModelError if a layer asks for attention that is not
    honoured here.
    """
    limit = _rope_limit(model)
    if limit is not None and row.longest > limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its position encoding beyond {limit} tokens, which packed training can't "
            f"follow (a sequence has {row.longest}); set engine.max_length to {limit}"
        )
    logits: Tensor = model(
        input_ids=row.token_ids_1T,
        position_ids=row.position_ids_1T,
        use_cache=False,
        logits_to_keep=row.predictor_P,
        packed_row=row,
    ).logits
    return logits[0]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, Hq, T, D], key and value [1, Hk, T, D] -> output [1, T, Hq, D].

    `dropout` is refused: the policy that is trained is the one that sampled. Raises UnsupportedModelError for anything
    that would not be honoured.
    """
    name = type(module).__name__
    if packed_row is None:
        raise UnsupportedModelError(
            f"{name} was called without a packed row: either it does not hand keyword arguments on to its attention (it "
            "can't be trained packed then), or it is a model in training, to be called through sampled_logits only"
        )
    unknown = sorted(key for key, given in other.items() if given is not None and key not in _HARMLESS)
    if dropout:
        unknown.append("dropout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("attention in both directions")
    mask_window = attention_mask.size if isinstance(attention_mask, _SlidingWindow) else None
    if mask_window != sliding_window and packed_row.longest > min(mask_window or 2**62, sliding_window or 2**62):
        unknown.append(f"a local mask ({mask_window}) that differs from its sliding window ({sliding_window})")
    if unknown:
        raise UnsupportedModelError(
            f"{name} uses attention features that packed training does not have: {', '.join(unknown)}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for bucket in packed_row.buckets:
        windowed = sliding_window is not None and sliding_window < bucket.length
        mask = packed_row.causal_mask(bucket.length, sliding_window) if sliding_window is not None and windowed else None
        if softcap is not None and mask is None:
            mask = packed_row.causal_mask(bucket.length, bucket.length)
        out_ShLD = _attend(
            bucket.batch(query), bucket.batch(key), bucket.batch(value), mask=mask, scale=scale, softcap=softcap
        )
        parts.append(bucket.tokens(out_ShLD))
    return torch.cat(parts)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(cap(scale q k^T) + mask) v over [S, h, L, D]; causal when there is no mask."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    if mask is None:
        raise ValueError("soft-capped attention needs its mask")
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    precision = torch.promote_types(query.dtype, torch.float32)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=precision).to(query.dtype)
    return weights @ value


def _no_mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> _SlidingWindow | None:
    """What the model gets for its mask: nothing, since `packed_attention` knows better, or the size of its window."""
    if use_vmap:
        raise UnsupportedModelError("the model adds a mask of its own to causal attention: it can't be trained packed")
    return None if local_size is None else _SlidingWindow(local_size)


def _select_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)


def _rope_limit(model: Any) -> int | None:
    """Beyond this length the rotary frequencies of *all* sequences of a forward change ("dynamic" and "longrope")."""
    config = model.config.get_text_config()
    limits: list[int] = []
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = part.get("rope_type")
        if kind in ("dynamic", "longrope"):
            limits.append(int(part.get("original_max_position_embeddings") or config.max_position_embeddings))
    return min(limits, default=None)


@torch.no_grad()
def _verify(model: nn.Module) -> None:
    """Compare a small packed row with each sequence alone under the model's own attention; refuse the model if they differ.

    Catches what no list of features can: recurrent layers that carry state over, learned positions, position biases.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    device = next(model.parameters()).device
    segments = [
        Segment(token_ids=tuple((17 * i + 7 * n) % vocabulary for i in range(n)), sampled=((1, n),)) for n in (5, 11, 2, 12)
    ]
    packed_PV = sampled_logits(model, PackedRow.of(segments, device)).float()
    _select_attention(model, "eager")
    alone = [model(torch.tensor([s.token_ids], device=device), use_cache=False).logits[0, :-1].float() for s in segments]
    _select_attention(model, ATTENTION_NAME)
    alone_PV = torch.cat(alone)
    error = (packed_PV - alone_PV).abs().max() / alone_PV.abs().max().clamp_min(1e-6)
    tolerance = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.05
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't be trained packed: its logits differ from those of single sequences "
            f"(relative error {error:.1g})"
        )

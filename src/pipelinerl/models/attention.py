"""Being the attention of a Hugging Face model: what the engine's and the trainer's attention have in common.

A model with pluggable attention calls a function of ours for each layer, with the projected queries, keys and values and
whatever keyword arguments were given to its forward. We then decide what each token may see; the model builds no mask.
What we would not honour is refused, by name: a model is run right or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError

# Arguments that models pass to attention and that do not change its result here: masks and caches are ours.
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
_JUDGED = _HARMLESS | {"dropout", "is_causal"}  # the two by their values


@dataclass(frozen=True, slots=True)
class LocalMask:
    """Stands in for the mask of a model's local layers: says how far the model's own mask would have let them see."""

    size: int


def replace_attention(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Make `function`, known to transformers as `name` from now on, the attention of `model`.

    Raises UnsupportedModelError if the model's attention can't be replaced or its forward can't choose logits.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - heavy, and only needed here

    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; use a decoder-only language model")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{kind} has no attention that can be replaced; use another model class")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{kind} has a forward without logits_to_keep; use another model class")
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)


def refuse_unknown_features(
    module: nn.Module, mask: object, *, sliding_window: int | None, longest: int, other: Mapping[str, Any]
) -> None:
    """Raise UnsupportedModelError, naming them, if a layer asks for anything that would not be honoured.

    `mask` is what the model passes for its mask, `longest` the longest sequence, `other` the arguments without a meaning
    here. Dropout counts: the policy that is trained is the one that sampled.
    """
    unknown = sorted(name for name, given in other.items() if given is not None and name not in _JUDGED)
    if other.get("dropout"):
        unknown.append("dropout")
    if other.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("attention in both directions")
    local = mask.size if isinstance(mask, LocalMask) else None
    if isinstance(mask, LocalMask) or mask is None:
        reach = min(local or longest, sliding_window or longest)
        if local != sliding_window and longest > reach:
            unknown.append(f"a local mask ({local}) that differs from its sliding window ({sliding_window})")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses attention features that are not here: {', '.join(unknown)}"
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    causal: bool = True,
) -> Tensor:
    """softmax(cap(scale q k^T) + mask) v over [S, h, L, D]. Without a mask: causal, or everything sees everything.

    A boolean mask is True where a query may see a key; any other is added. Key and value may have fewer heads than the
    query: neighbouring query heads share one.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None:
        is_causal = causal and mask is None
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    elif causal:
        raise ValueError("soft-capped causal attention needs its mask")
    precision = torch.promote_types(query.dtype, torch.float32)
    weights: Tensor = scores.softmax(-1, dtype=precision).to(query.dtype)
    return weights @ value


def rope_limit(model: Any) -> int | None:
    """Beyond this length the rotary frequencies of *all* sequences of a forward change ("dynamic" and "longrope")."""
    config = model.config.get_text_config()
    limits: list[int] = []
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        kind = part.get("rope_type")
        if kind in ("dynamic", "longrope"):
            limits.append(int(part.get("original_max_position_embeddings") or config.max_position_embeddings))
    return min(limits, default=None)


def _no_mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> LocalMask | None:
    """What the model gets for its mask: nothing, since our attention knows better, or how far it should have reached."""
    if use_vmap:
        raise UnsupportedModelError("the model adds a mask of its own to causal attention, which would not be honoured")
    return None if local_size is None else LocalMask(local_size)

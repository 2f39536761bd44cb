"""Replacing the attention of a Hugging Face model: the code shared by the engine's and the trainer's attention.

A model with pluggable attention calls our function for each layer with the projected queries, keys and values and with the
keyword arguments of its forward. Our function decides what each token may attend to; the model builds no mask. Attention
features that are not implemented here raise an error that names them: otherwise the model would compute wrong outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import PipelineRLError, UnsupportedModelError

# Arguments that models pass to attention and that do not change its result: we build the masks and hold the caches.
_IGNORED = "position_ids use_cache output_attentions past_key_values cache_position layer_idx output_router_logits"
_KNOWN_ARGUMENTS = {*_IGNORED.split(), "dropout", "is_causal"}  # whether the last two are supported depends on their values


@dataclass(frozen=True, slots=True)
class LocalMask:
    """Placeholder for the mask of a model's local layers: `size` is the window that the model's own mask would have had."""

    size: int


def replace_attention(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register `function` with transformers as `name` and make it the attention of `model`.

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


def choose_attention(model: Any, name: str) -> None:
    """Make `name` the attention implementation of `model`, also of a class that transformers does not let choose."""
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = name


_PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
"""Classes of cache layers that hold keys and values and nothing else, or nothing at all."""


def returned_cache(output: Any) -> tuple[str, Any] | None:
    """The cache in a model's output, and the name of the argument that takes it; None without one.

    transformers calls it `cache` from 5.24 on, and warns of the older names.
    """
    names = ("cache", "past_key_values", "cache_params")
    return next(((name, found) for name in names if (found := getattr(output, name, None)) is not None), None)


def refuse_states(cache: Any, name: str) -> None:
    """Raise UnsupportedModelError unless all that the model named `name` keeps of past tokens is keys and values.

    Such a model computes everything except attention token by token, so replacing its attention is enough. `cache` is the
    model's own cache.
    """
    layers = getattr(cache, "layers", None)
    if not layers or type(cache).__name__ != "DynamicCache":
        raise UnsupportedModelError(f"{name} has no key/value cache of the usual kind")
    other = sorted({type(layer).__name__ for layer in layers} - _PLAIN_LAYERS)
    if other:
        raise UnsupportedModelError(f"{name} has layers that keep other states than keys and values ({', '.join(other)})")


@contextmanager
def unsupported(what: str) -> Iterator[None]:
    """Turn what a model's own code raises inside into an UnsupportedModelError, `what` and the first line of the error."""
    try:
        yield
    except (PipelineRLError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedModelError(f"{what} ({reason})") from error


def refuse_unknown_features(
    module: nn.Module, mask: object, *, sliding_window: int | None, longest: int, other: Mapping[str, Any]
) -> None:
    """Raise UnsupportedModelError, naming them, if a layer uses features that are not implemented here.

    `mask` is the model's mask, `longest` the length of the longest sequence, `other` the remaining
    arguments. Dropout is refused: the trained policy must be the policy that sampled.
    """
    unknown = sorted(name for name, given in other.items() if given is not None and name not in _KNOWN_ARGUMENTS)
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
            f"{type(module).__name__} uses attention features that are not supported: {', '.join(unknown)}"
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
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale q k^T) + mask) v over [S, h, L, D]. Without a mask, attention is causal if `causal`, else full.

    A boolean mask is True where a query may attend to a key; a mask of another type is added to the scores. Key and value
    may have fewer heads than the query: then neighbouring query heads share one. `softcap` (Gemma 2) is the cap's limit.
    `sinks` (gpt-oss) [h, 1] or [h, L] are the learned scores of a further key per query, whose value is 0. No fused kernel
    knows either, so scores are computed as a tensor: causal attention then needs its mask.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None and sinks is None:
        is_causal = causal and mask is None
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    scores = query @ key.transpose(-1, -2)
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(scores.shape[:3])[..., None]), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value


def deviations(logits_TV: Tensor, reference_TV: Tensor) -> Tensor:
    """For each token the largest difference of log-probabilities [T] over the vocabulary."""
    return (logits_TV.float().log_softmax(-1) - reference_TV.float().log_softmax(-1)).abs().amax(-1)


def refuse_changed_positions(model: Any, length: int) -> None:
    """Raise UnsupportedModelError if a sequence of `length` changes the rotary frequencies of *all* sequences of a forward.

    They change with the "dynamic" and "longrope" types.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = [
        int(part.get("original_max_position_embeddings") or config.max_position_embeddings)
        for part in (parameters, *(value for value in parameters.values() if isinstance(value, dict)))
        if part.get("rope_type") in ("dynamic", "longrope")
    ]
    if length > (limit := min(limits, default=length)):
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its position encoding beyond {limit} tokens, which sequences that share a "
            f"batch can't follow; set engine.max_length to {limit}"
        )


def _no_mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> LocalMask | None:
    """The mask given to the model: None, since our attention builds its own, or a `LocalMask` with the window size."""
    if use_vmap:
        raise UnsupportedModelError("the model adds a mask of its own to causal attention, which is not supported")
    return None if local_size is None else LocalMask(local_size)

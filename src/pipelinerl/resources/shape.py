"""Reads a model's sizes from its `config.json` and the headers of its safetensors files, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from pipelinerl.config.schema import LONGEST_SLOT, RunConfig
from pipelinerl.errors import INVALID_DATA, ModelLoadError, first_line
from pipelinerl.models.folder import downloaded, find_model

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADS = ("lm_head.weight", "embed_out.weight")
_LOOKUPS = ("embed", "wte", "wpe")
"""Parts of the names of lookup tables (embeddings), which are not multiplied with."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder. `parameters` counts a tensor that has two names once.

    `linears` are the shapes of the matrices that tokens are multiplied with, by name. The output `head` is one of them (and
    is also the embedding if the two are `tied`). `query_width` is heads times head size. `kv_width` is the width of what all
    layers keep of a token: keys and values as attention receives them. `state` is the size of a sequence's recurrent and
    convolution states. `feed_forward` is the inner width of a layer's MLP (the sum over all experts that a token goes
    through). `max_length` is None if the config does not give it. `teacher` are the parameters of `trainer.teacher`, if any.
    """

    parameters: int
    linears: Mapping[str, tuple[int, int]]
    head: str
    tied: bool = False
    layers: int
    hidden: int
    query_width: int
    kv_width: int
    state: int = 0
    feed_forward: int
    vocabulary: int
    max_length: int | None
    teacher: int = 0

    def slot_length(self, asked: int | None) -> int:
        """Longest prompt + completion of a slot, in tokens: `asked`, or else the model's maximum, at most `LONGEST_SLOT`."""
        return asked or min(self.max_length or LONGEST_SLOT, LONGEST_SLOT)


def shape_of(config: RunConfig) -> ModelShape | None:
    """The sizes of the run's model: a folder, or a hub id whose files are all downloaded; None if they are not known.

    Raises ModelLoadError if there is no model.
    """
    shape, trainer = _shape_at(config.model.path), config.trainer
    try:
        teacher = _shape_at(trainer.teacher) if trainer.teacher and not trainer.teacher_is_server else None
    except ModelLoadError as error:
        raise ModelLoadError(str(error).replace("model.path", "trainer.teacher", 1)) from error
    return replace(shape, teacher=teacher.parameters) if shape and teacher else shape


def _shape_at(given: str) -> ModelShape | None:
    path = find_model(given)
    folder = path if Path(path).is_dir() else downloaded(path)
    try:
        return None if folder is None else read_shape(Path(folder))
    except ModelLoadError:
        if folder == path:
            raise
        return None  # missing files are downloaded when the model is loaded


def read_shape(folder: Path) -> ModelShape | None:
    """The sizes of the model in `folder`; None if they can't be read (weights that are not safetensors, an unusual config).

    Raises ModelLoadError for files that are damaged or incomplete.
    """
    config = _json(folder / "config.json")
    tensors = _tensors(folder)
    inner_config = config.get("text_config")
    text: dict[str, Any] = inner_config if isinstance(inner_config, dict) else config
    hidden = _first_int(text, "hidden_size", "n_embd", "d_model")
    layers = _first_int(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    layers = layers or len(text.get("layers_block_type") or ())
    heads = _first_int(
        text, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"
    )
    heads = heads or (1 if "state_size" in text else None)
    vocabulary = _first_int(text, "vocab_size")
    if not tensors or not (hidden and layers and heads and vocabulary):
        return None
    head_dim = _first_int(text, "head_dim") or hidden // heads
    inner = _first_int(text, "moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim")
    head = next((name for name in tensors if name.endswith(_HEADS)), None)
    if head and config.get("tie_word_embeddings") is True and len(tensors) > 1:
        del tensors[head]  # the same tensor as the embedding, stored under both names
        head = None
    linears = {
        name: (shape[0], shape[1])
        for name, shape in tensors.items()
        if len(shape) == 2 and (name == head or not any(part in name for part in _LOOKUPS))
    }
    if tied := head is None:
        head = _HEADS[0]
        linears[head] = (vocabulary, hidden)
    kinds = _kinds(text, layers)
    recurrent = sum(kind in ("linear_attention", "mamba", "hybrid") for kind in kinds)
    with_keys = sum(kind not in ("linear_attention", "mamba", "conv", "moe", "mlp") for kind in kinds)
    return ModelShape(
        parameters=sum(prod(shape) for shape in tensors.values()),
        linears=linears,
        head=head,
        tied=tied,
        layers=layers,
        hidden=hidden,
        query_width=heads * head_dim,
        kv_width=with_keys * _kv_width(text, heads, head_dim),
        state=recurrent * _linear_state(text, hidden)
        + kinds.count("conv") * hidden * (_first_int(text, "conv_L_cache") or 0),
        feed_forward=(inner or 4 * hidden) * (_first_int(text, "num_experts_per_tok") or 1),
        vocabulary=vocabulary,
        max_length=_first_int(text, "max_position_embeddings", "n_positions"),
    )


def _tensors(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of all tensors in the folder's safetensors files, from their headers.

    Raises ModelLoadError for a file that can't be read, is damaged or incomplete.
    """
    found: dict[str, list[int]] = {}
    files = [folder / _SINGLE] if (folder / _SINGLE).is_file() else []
    if (folder / _INDEX).is_file():
        listed = _json(folder / _INDEX).get("weight_map")
        files = [folder / str(name) for name in sorted(set(listed.values()))] if isinstance(listed, dict) else []
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            what = "can't be read" if isinstance(error, OSError) else "is damaged or incomplete"
            raise ModelLoadError(f"{file} {what} ({first_line(error)}); get a complete copy of the model") from error
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror}") from error
    except INVALID_DATA as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}; get a complete copy of the model") from error


# ---- What a model's layers keep of past tokens, from its configuration, without torch
# Exact where all layers have the configuration's heads and keep keys and values, or Mamba's, the delta rule's or a
# convolution's states.


def _first_int(text: Mapping[str, Any], *names: str) -> int | None:
    """The first of `names`, which differ between families of models, that is a positive integer."""
    return next((text[name] for name in names if isinstance(text.get(name), int) and text[name] > 0), None)


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer, by the names that configurations use."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list) and len(listed) == layers:
        return [str(kind).removesuffix("_sliding") for kind in listed]
    if (interval := _first_int(text, "full_attention_interval")) is not None:
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if isinstance(chosen := text.get("attn_layer_indices"), list):
        return ["full_attention" if i in chosen else "mamba" for i in range(layers)]
    if (period := _first_int(text, "attn_layer_period")) is not None:
        offset = text.get("attn_layer_offset", 0)
        return ["full_attention" if i % period == offset else "mamba" for i in range(layers)]
    if _first_int(text, "mamba_d_state") is not None:
        return ["hybrid"] * layers
    return ["mamba" if _first_int(text, "state_size") is not None else "full_attention"] * layers


def _linear_state(text: Mapping[str, Any], hidden: int) -> int:
    """Elements of one recurrent layer's states per sequence: the delta rule's, Mamba 2's or Mamba's."""
    kernel = _first_int(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") or 4
    if (value_heads := _first_int(text, "linear_num_value_heads", "linear_num_heads")) is not None:
        key, value = (_first_int(text, f"linear_{name}_head_dim", "linear_head_dim") or 0 for name in ("key", "value"))
        keys = (_first_int(text, "linear_num_key_heads") or value_heads) * key
        return kernel * (2 * keys + value_heads * value) + value_heads * key * value
    size = _first_int(text, "mamba_d_state", "ssm_state_size", "state_size") or 0
    heads = _first_int(text, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    head_dim = _first_int(text, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    if heads is None or head_dim is None:
        inner = (_first_int(text, "mamba_expand", "expand") or 2) * hidden
        if "state_size" in text:  # a model of Mamba layers only
            inner = _first_int(text, "intermediate_size") or inner
        return inner * (kernel + size)
    groups = _first_int(text, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    return kernel * (heads * head_dim + 2 * groups * size) + heads * head_dim * size


def _kv_width(text: Mapping[str, Any], heads: int, head_dim: int) -> int:
    """Width of a token's keys and values in a layer. Latents (MLA) are expanded to all heads."""
    if "kv_lora_rank" in text:
        keys, rotated = (_first_int(text, f"qk_{name}_head_dim") or 0 for name in ("nope", "rope"))
        return heads * (keys + rotated + (_first_int(text, "v_head_dim") or 0))
    shared = _first_int(text, "num_key_value_heads", "num_kv_heads") or heads
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        shared = 1
    return shared * (head_dim + (_first_int(text, "v_head_dim") or head_dim))

"""Small randomly initialised models of the families that the engine and the trainer must run exactly."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # far from uniform outputs, so that mistakes show
}
_GQA = {**_SHAPE, "num_key_value_heads": 2}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_GQA, head_dim=12, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**_GQA, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**_GQA, head_dim=12, sliding_window=16),
    "qwen2": Qwen2Config(**_GQA),
    "qwen2-window": Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3": Qwen3Config(**_GQA, head_dim=16),
    "gemma2": Gemma2Config(
        **_GQA,
        head_dim=12,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=12,
    ),
    "gemma3": Gemma3TextConfig(**_GQA, head_dim=12, sliding_window=16, query_pre_attn_scalar=12),
    "gpt-neox": GPTNeoXConfig(**_SHAPE, rotary_pct=0.5),
    "phi": PhiConfig(**_GQA, partial_rotary_factor=0.5),
}


def make_model(name: str, seed: int = 0) -> Any:
    """A model of the family in evaluation mode, float32, a function of (name, seed) alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").eval()


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """The smallest Llama of use, in evaluation mode."""
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | changes))).eval()

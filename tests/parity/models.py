"""Small randomly initialised models of the families that the engine and the trainer must run exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from benchmarks import models as families
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    NemotronHConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from pipelinerl.models.own_forward import use_configured_time_steps

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,  # one of each kind where there are two: what one layer caches must not reach the other
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # far from uniform outputs, so that mistakes show
}
_GQA = {**_SHAPE, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENTS = {
    **_SHAPE,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_MAMBA = {**_SHAPE, "state_size": 8, "expand": 2, "chunk_size": 16}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_GQA, head_dim=12, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**_GQA, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**_GQA, head_dim=12, sliding_window=16),
    "qwen2": Qwen2Config(**_GQA),
    "qwen2-window": Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**_GQA, head_dim=16),
    "gemma2": Gemma2Config(
        **_GQA,
        head_dim=12,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=12,
    ),
    "gemma3": Gemma3TextConfig(
        **_GQA,
        head_dim=12,
        sliding_window=16,
        query_pre_attn_scalar=12,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt-neox": GPTNeoXConfig(**_SHAPE, rotary_pct=0.5),
    "phi": PhiConfig(**_GQA, partial_rotary_factor=0.5),
    # What is cached differs from what attention receives.
    "deepseek-v3-latents": DeepseekV3Config(**_LATENTS),
    "gpt-oss-sinks": GptOssConfig(
        **_GQA,
        head_dim=12,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
THROUGH_CACHE: dict[str, Any] = {
    "bloom-alibi": BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=4, initializer_range=0.15),
    "falcon-h1-both-in-one-layer": FalconH1Config(
        **_GQA,
        head_dim=12,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    "falcon-mamba-token-by-token": FalconMambaConfig(**_MAMBA),
    "lfm2-conv": Lfm2Config(**_GQA, layer_types=["conv", "full_attention"]),
    "mamba2": Mamba2Config(**_MAMBA, num_heads=6, head_dim=16, n_groups=1),
    "nemotron-h": NemotronHConfig(
        **{name: value for name, value in _GQA.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        head_dim=12,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
    ),
    "qwen3.5-delta-rule": Qwen3_5TextConfig(
        **_GQA | {"initializer_range": 0.06, "num_hidden_layers": 3},
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=12,
    ),
}
"""Run through their own cache: their attention can't be replaced, or they have other states."""
CONFIGS |= THROUGH_CACHE
QUICK = ("gemma3", "llama")
"""Families that the fast tests are content with: the plainest and the most peculiar one."""
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]


def make_model(name: str, seed: int = 0) -> Any:
    """A model of the family in evaluation mode, float32, a function of (name, seed) alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").eval()
    use_configured_time_steps(model)  # otherwise Nemotron-H's own forward and its own generation differ
    return model


def make_family(name: str) -> Any:
    """A model of `CONFIGS` or of `benchmarks.models`. Skips the test if the installed transformers does not have it."""
    if name not in CONFIGS and name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {name}")
    return make_model(name) if name in CONFIGS else families.make_model(name)


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

"""How each family of causal language models of transformers is trained and run: the table in results/families.md.

    python -m benchmarks.models [FAMILY ...] [--write]

`--write` replaces these families' lines of the table.

Models are small and random (two to four layers), in float32 on one CPU thread. Columns: how the trainer computes logits, and
their largest difference from the model's forward over each sequence alone; how the embedded engine runs the model, and the
largest difference of its log-probabilities on the probe; and the engine's tokens/s, 8 sequences at once, relative to
`generate` of transformers on the same 8 prompts in one batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.own_forward import use_configured_time_steps
from pipelinerl.models.packed import PackedRow, training_forward
from pipelinerl.types import GenerationRequest, SamplingParams, Segment

VOCABULARY = 97
TABLE = Path(__file__).parent / "results" / "families.md"

PACKED = """
afmoe apertus arcee aria_text axk1 bert bert-generation bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx
deepseek_v2 deepseek_v3 diffllama doge dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu
gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe
glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe laguna llama llama4
longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama modernbert-decoder
moss_transcribe_diarize nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe
qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"""
OTHERS = """
axk2 bailing_hybrid bamba bart beam big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt camembert
codegen cpmant ctrl data2vec-text deepseek_v32 deepseek_v4 dots3_note dots3_note_text falcon falcon_h1 falcon_mamba
flint git glm_moe_dsa got_ocr2 gpt_neo gpt_neox_japanese gptj granitemoehybrid hrm_text hy_v4 inkling2_text inkling_text
jamba kimi_linear kolibri1 lfm2 lfm2_moe lfm3 llama4_text mamba mamba2 marian mbart megatron-bert minimax
minimax_m3_vl_text moshi mpt mvp nemotron nemotron_h olmo_hybrid openai-gpt pegasus plbart prophetnet qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta
roberta-prelayernorm roc_bert roformer rwkv stablelm trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod
zamba zamba2 zaya"""

_SAME = {
    64: "hidden_size d_model n_embd hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim d_ff n_inner ffn_hidden_size dff dim_ff",
    2: "depth num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads linear_num_key_heads "
    "num_experts_per_tok num_experts_per_token moe_k eos_token_id mamba_expand",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads linear_num_heads",
    16: "head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_d_state mamba_head_dim "
    "ssm_state_size state_size kv_lora_rank v_head_dim index_head_dim mamba_headdim attention_head_dim dim_head "
    "index_n_heads hidden_size_per_layer_input",
    512: "max_position_embeddings n_positions max_seq_len",
    8: "mamba_n_heads mamba_num_heads n_mamba_heads qk_rope_head_dim rotary_dim index_topk",
    32: "moe_intermediate_size shared_expert_intermediate_size chunk_size mamba_chunk_size expert_ffn_hidden_size",
    1: "n_shared_experts num_shared_experts n_group topk_group num_expert_group first_k_dense_replace mamba_n_groups "
    "n_groups bos_token_id zero_expert_num",
    24: "q_lora_rank sliding_window",
    12: "qk_nope_head_dim",
    128: "mamba_d_ssm",
    0: "pad_token_id",
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
}
SIZES: dict[str, Any] = {name: size for size, names in _SAME.items() for name in names.split()} | {
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
}
_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
"""The last layers use the keys and values of earlier ones."""
_ALTERNATE = ["linear_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"""
SPECIAL: dict[str, dict[str, Any]] = {
    **{family: {"is_decoder": True} for family in _DECODERS.split()},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "youtu", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("axk1", "axk2", "minicpm3", "kimi_linear", "bailing_hybrid"), _LATENT),
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe", "lfm3")},
    **{name: {"layer_types": _ALTERNATE} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")},
    **{name: {"layer_types": ["sliding_attention", "full_attention"]} for name in ("gpt_oss", "olmo3", "cohere2")},
    "bamba": {"attn_layer_indices": [1]},
    "gemma3n_text": _SHARED | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _SHARED),
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8, "moe_topk": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE | {"mrope_section": [2, 3, 3]}),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 20,
        "shared_experts_intermediate_size": 32,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {
            1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24, "q_lora_rank": 24}
            | {"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
        },
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4]},
    "prophetnet": {
        "num_hidden_layers": None,
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
        **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
        "eos_token_id": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "num_hidden_layers": None,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16,
        "feed_forward_size": 96,
    },
    "xlm": {"causal": True},
    "xlnet": {"max_position_embeddings": None, "d_head": None},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "qk_head_dim": None, "v_head_dim": None},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_dt_rank": 8,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 8},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": None},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
SPECIAL["glm_moe_dsa"] = SPECIAL["hy_v4"] = _LATENT | {"indexer_types": ["full", "shared"]}
SPECIAL["big_bird"] |= {"attention_type": "original_full"}
SPECIAL["rembert"] |= {"input_embedding_size": 16, "output_embedding_size": 16}
SPECIAL["roc_bert"] |= {"pronunciation_vocab_size": 97, "shape_vocab_size": 97}
SPECIAL["roc_bert"] |= {"pronunciation_embed_dim": 16, "shape_embed_dim": 16}
SPECIAL["xmod"] |= {"languages": ["en_XX"], "default_language": "en_XX"}
SPECIAL["kimi_linear"] = SPECIAL["bailing_hybrid"] = _LATENT | {"layer_types": _ALTERNATE, "layer_group_size": 2}


def make_model(family: str, seed: int = 0) -> Any:
    """A small random model of this family, in eval mode: a function of (family, seed)."""
    kind = CONFIG_MAPPING[family]
    config = kind(**_sizes(kind(), family))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _sizes(default: PreTrainedConfig, family: str) -> dict[str, Any]:
    """Small sizes for what is in the `default` configuration of this family, and in those of its text and other parts."""
    sizes = {name: size for name, size in SIZES.items() if _given(default, name) is not None} | SPECIAL.get(family, {})
    for part in default.sub_configs:
        if part not in sizes and isinstance(inner := getattr(default, part, None), PreTrainedConfig):
            sizes[part] = _sizes(inner, inner.model_type)
    return {name: size for name, size in sizes.items() if size is not None}


def _given(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # layers have different ones
        return config.to_dict().get(name)


class Found(NamedTuple):
    """`trainer` and `engine` name the way, or why there is none; errors and speed are None without one."""

    trainer: str
    trainer_error: float | None
    engine: str
    engine_error: float | None
    speed: float | None


def measure(family: str, *, speed: bool = True) -> Found:
    """Raises what the model's own code raises if it can't be made, or can't compute a forward."""
    trainer, trainer_error = _trainer(family)
    try:
        engine = LocalEngine(make_model(family), slots=8, max_length=256)
    except UnsupportedModelError as error:
        return Found(trainer, trainer_error, f"refused: {str(error).partition(';')[0]}", None, None)
    runner: Any = engine._runner
    way = "packed" if engine.progress().runner.startswith("over packed batches") else "own cache"
    if way == "own cache" and not runner._continues:
        way += ", prompts in one chunk or token by token"
    return Found(trainer, trainer_error, way, runner.error, _speed(family, engine) if speed else None)


@torch.no_grad()
def _trainer(family: str) -> tuple[str, float | None]:
    model, own = make_model(family), make_model(family)
    segments = [
        Segment(token_ids=tuple((7 * n + 11 * i) % VOCABULARY for i in range(n)), sampled=((1, n),)) for n in (9, 70, 75, 8)
    ]
    try:
        forward = training_forward(model)
        logits_PV = forward(PackedRow.of(segments))
    except UnsupportedModelError as error:
        return f"refused: {str(error).partition(';')[0]}", None
    use_configured_time_steps(own)
    alone_PV = torch.cat([own(torch.tensor([s.token_ids]), use_cache=False).logits[0, :-1] for s in segments])
    error = float((logits_PV.log_softmax(-1) - alone_PV.log_softmax(-1)).abs().max())
    return "padded" if forward.padded else "packed", error


def _speed(family: str, engine: LocalEngine, tokens: int = 24) -> float | None:
    """Tokens/s of the engine relative to `generate`. None if the family's `generate` fails."""
    prompts = torch.randint(3, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    model, options = make_model(family), {"max_new_tokens": tokens, "do_sample": True, "use_cache": True}
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    best = [float("inf"), float("inf")]
    try:
        for attempt in range(3):
            started = time.perf_counter()
            model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=0, **options)
            best[0] = min(best[0], time.perf_counter() - started)
            requests = [
                GenerationRequest(
                    id=f"{attempt}-{i}", prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=tokens, seed=i)
                )
                for i, ids in enumerate(prompts.tolist())
            ]
            started = time.perf_counter()
            engine.generate(requests)
            best[1] = min(best[1], time.perf_counter() - started)
    except Exception:  # noqa: BLE001 - whatever the model's own code raises
        return None
    return best[0] / best[1]


def line(family: str, found: Found) -> str:
    """A row of the table."""
    errors = ["" if error is None else f"{error:.0e}" for error in (found.trainer_error, found.engine_error)]
    speed = "" if found.speed is None else f"{found.speed:.1f}"
    return f"| {family} | {found.trainer} | {errors[0]} | {found.engine} | {errors[1]} | {speed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=f"{PACKED} {OTHERS}".split())
    parser.add_argument("--write", action="store_true", help="replace the lines of these families in the recorded table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    head = ["| family | trainer | error | engine | error | speed |", "|---|---|---|---|---|---|"]
    print("\n".join(head), flush=True)
    lines = {}
    for family in sorted(arguments.families):
        try:
            lines[family] = line(family, measure(family))
        except Exception as error:  # noqa: BLE001 - as above
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
            lines[family] = f"| {family} | not measured: {reason} | | | | |"
        print(lines[family], flush=True)
    if arguments.write:
        rows = (row for row in TABLE.read_text().splitlines() if row.startswith("| ") and not row.startswith(head[0]))
        earlier = {row.split()[1]: row for row in rows}
        used = f"transformers {transformers.__version__}, torch {torch.__version__}"
        versions = f"({used}; `python -m benchmarks.models --write`)"
        table = [*head, *(row for _, row in sorted((earlier | lines).items()))]
        TABLE.write_text(f"# Families of models\n\n{versions}\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()

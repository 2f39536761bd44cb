"""Conversion of GGUF files, on a tiny Llama written as llama.cpp would write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl import extras
from pipelinerl.errors import UserError

if lacking := extras.lacking("gguf"):
    pytest.skip(f"extra `gguf`: {', '.join(lacking.values())}", allow_module_level=True)

import gguf
from scripts.convert_gguf import convert_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.parity.models import tiny_llama

TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
SPECIALS = ["<|text_end|>", "<|start|>", "<|end|>"]
# Two newlines are one token: whether they stay together before a digit tells the rules of splitting apart.
TOKENS = [*SPECIALS, *bytes_to_unicode().values(), "ĊĊ"]
TEXT_END, START, END = range(3)


@dataclass(frozen=True)
class Tiny:
    file: Path
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = tiny_llama(**sizes, **heads, tie_word_embeddings=True, rms_norm_eps=1e-5)
    writer = gguf.GGUFWriter(str(file), "llama")
    written: dict[str, Any] = {
        **{"name": "tiny", "context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48},
        **{"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0},
        **{"rope_dimension_count": 8, "vocab_size": len(TOKENS), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm"},
        **{"token_list": TOKENS, "token_merges": ["Ċ Ċ"], "chat_template": TEMPLATE, "add_bos_token": False},
        "token_types": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        **{"bos_token_id": START, "eos_token_id": TEXT_END, "eot_token_id": END, "pad_token_id": TEXT_END},
    }
    for name, value in written.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(file, model)


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model's tensors under llama.cpp's names; its rotary embedding pairs neighbours, so query and key rows move."""

    def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
        rows, columns = weight.shape
        return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)

    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        tensors |= {
            f"blk.{i}.attn_q.weight": interleaved(attention.q_proj.weight, 4),
            f"blk.{i}.attn_k.weight": interleaved(attention.k_proj.weight, 2),
            f"blk.{i}.attn_v.weight": attention.v_proj.weight,
            f"blk.{i}.attn_output.weight": attention.o_proj.weight,
            f"blk.{i}.ffn_gate.weight": mlp.gate_proj.weight,
            f"blk.{i}.ffn_up.weight": mlp.up_proj.weight,
            f"blk.{i}.ffn_down.weight": mlp.down_proj.weight,
            f"blk.{i}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{i}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    return tensors


def test_the_model_and_its_tokenizer_are_those_of_the_file(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "model"
    facts = convert_gguf(str(tiny.file), out)
    assert capfd.readouterr().err == "", "no progress bars"
    assert (facts.architecture, facts.layers, facts.vocab_size) == ("LlamaForCausalLM", 2, len(TOKENS))
    assert facts.parameters == sum(parameter.numel() for parameter in tiny.model.parameters())
    assert [path.name for path in out.parent.iterdir()] == ["model"], "nothing but the model is left"
    converted = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(converted(ids).logits, tiny.model(ids).logits, rtol=0, atol=1e-5)
    assert converted.config.tie_word_embeddings
    assert not hasattr(converted.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(facts.path)
    assert facts.chat_template
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|start|>a<|end|>"
    assert facts.eos_token_ids == (TEXT_END, END), "the end of a turn ends a completion too"
    assert converted.generation_config.eos_token_id == [TEXT_END, END]
    assert tokenizer.pad_token_id == TEXT_END
    text = "two\n\n12 lines"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_output_folder_is_never_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="not an empty folder"):
            convert_gguf(str(tiny.file), out)
    assert (tmp_path / "mine").read_text() == "keep me"

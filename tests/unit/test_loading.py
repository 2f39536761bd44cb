"""Loading models and tokenizers: what comes out, and what a user is told when it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError, UnsupportedModelError
from pipelinerl.models.loading import (
    checkpoint_activations,
    load_model,
    load_tokenizer,
    model_max_length,
    resolve_path,
    stop_token_ids,
)
from pipelinerl.models.packed import sampled_logits, use_packed_attention
from pipelinerl.models.packed_row import PackedRow
from pipelinerl.types import Segment


def tiny_config(**changes: object) -> LlamaConfig:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**(sizes | {"max_position_embeddings": 64, "eos_token_id": 3, "pad_token_id": 0} | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(attention_dropout=0.5)).save_pretrained(path)
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "<eos>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)  # noqa: S106
    return path


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_model_loads_in_eval_mode_and_the_asked_dtype(folder: Path, dtype: str, expected: torch.dtype) -> None:
    model = load_model(ModelConfig(path=str(folder), dtype=dtype))
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {expected}
    assert model_max_length(model) == 64


def test_loading_prints_nothing_and_leaves_logging_as_it_was(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(ModelConfig(path=str(folder)))
    load_tokenizer(ModelConfig(path=str(folder)))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_stop_tokens_come_from_generation_config_model_config_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config = ModelConfig(path=str(folder))
    assert stop_token_ids(load_model(config), load_tokenizer(config)) == (3, 5, 7, 9)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"'\./nowhere' does not exist"):
        load_model(ModelConfig(path="./nowhere"))


def test_a_file_instead_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_path(str(folder / "config.json"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="hub can't be reached") as caught:
        load_model(ModelConfig(path="nobody/never-downloaded"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_unreadable_weights_are_refused_in_one_line(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "garbage":
        weights.write_bytes(b"not safetensors at all")
    else:
        weights.unlink()
    with pytest.raises(ModelLoadError, match="can't load the model") as caught:
        load_model(ModelConfig(path=str(folder)))
    assert "\n" not in str(caught.value)


def test_absent_weights_are_not_replaced_by_random_ones(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"layers\.2.* and \d+ more missing or of another shape"):
        load_model(ModelConfig(path=str(folder)))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(ModelLoadError):
        load_model(ModelConfig(path=str(folder)))


def test_other_kinds_of_model_are_refused(tmp_path: Path) -> None:
    t5 = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="not a causal language model"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_an_encoder_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises((ModelLoadError, UnsupportedModelError)):
        use_packed_attention(load_model(ModelConfig(path=str(tmp_path))))


def test_code_that_comes_with_a_model_is_not_run_unless_asked(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "architectures": ["Own"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"model\.trust_remote_code"):
        load_model(ModelConfig(path=str(folder)))
    assert not marker.exists()


def test_checkpointed_activations_give_the_same_gradients_without_dropout() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GPTNeoXConfig(**sizes, hidden_dropout=0.5, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).eval()
    use_packed_attention(model)
    row = PackedRow.of([Segment(token_ids=(1, 4, 7, 2), sampled=((1, 4),)), Segment(token_ids=(5, 6), sampled=((1, 2),))])

    def gradients() -> list[torch.Tensor]:
        sampled_logits(model, row).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    plain = gradients()
    checkpoint_activations(model)
    assert any(module.training for module in model.modules())
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)

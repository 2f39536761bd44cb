"""Loading models and tokenizers: what comes out, and the error if it can't be done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from pipelinerl.config.schema import ModelConfig, TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.engine.runner import refuse_longer
from pipelinerl.errors import ModelLoadError, UnsupportedModelError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.folder import find_model
from pipelinerl.models.loading import (
    learned_positions,
    load_config,
    load_model,
    load_tokenizer,
    model_max_length,
    stop_token_ids,
)
from pipelinerl.models.state import checksum
from pipelinerl.trainer import Learner
from pipelinerl.types import GenerationRequest, SamplingParams, Segment


def tiny_config(**changes: object) -> LlamaConfig:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**(sizes | {"max_position_embeddings": 64, "eos_token_id": 3, "pad_token_id": 0} | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(attention_dropout=0.5)).save_pretrained(path)
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "<eos>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    return path


TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
WITH_VISION = Qwen2VLConfig(
    text_config=TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    image_token_id=30,
    video_token_id=31,
    vision_start_token_id=32,
    vision_end_token_id=33,
)


def test_a_vision_language_model_is_trained_and_run_as_its_text_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(WITH_VISION).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)))
    learner = Learner(model, TrainerConfig(weight_decay=0.1), temperature=1.0)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "visual" in name} != set()
    engine = LocalEngine(load_model(ModelConfig(path=str(tmp_path))), slots=2, max_length=64, flatten=False)
    assert engine.update_weights(WeightUpdate(1, checksum(learner.weights()), learner.weights())).version == 1
    prompt, sampling = tuple(range(3, 20)), SamplingParams(max_tokens=8)
    done = engine.generate([GenerationRequest(id="x", prompt_ids=prompt, sampling=sampling)])[0]
    sequence = Segment(token_ids=(*prompt, *done.token_ids), sampled=((17, 17 + len(done.token_ids)),))
    logprobs = learner.logits([sequence]).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(done.logprobs, abs=1e-4)


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refusal(load: Callable[[ModelConfig], object], path: str | Path) -> str:
    """The error, which is one line."""
    with pytest.raises(ModelLoadError) as caught:
        load(ModelConfig(path=str(path)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loads_in_eval_mode_and_the_asked_dtype_without_a_word(
    folder: Path, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    config = ModelConfig(path=str(folder), dtype=str(dtype).removeprefix("torch."))
    model = load_model(config)
    load_tokenizer(config)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model_max_length(model) == 64
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_stop_tokens_come_from_generation_config_model_config_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config = ModelConfig(path=str(folder))
    assert stop_token_ids(load_model(config), load_tokenizer(config)) == (3, 5, 7, 9)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "'./nowhere' does not exist"),
        ("{folder}/config.json", "is a file"),
        ("{folder}/..", "no config.json"),
        ("{folder}", r"it has no tokenizer (tokenizer.json)"),
    ],
)
def test_what_is_no_folder_of_a_model_or_lacks_a_part_is_refused(folder: Path, path: str, message: str) -> None:
    (folder / "tokenizer.json").unlink()
    assert message in refusal(load_tokenizer, path.format(folder=folder))


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub can't be reached" in refusal(load_model, "nobody/never-downloaded")


@pytest.mark.parametrize("name", ["my model", "a--b", "owner/..x", "owner/name.git", "", "a/b/c"])
def test_what_can_be_no_hub_id_is_not_asked_for(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist: give a folder with a model, or a hub id"):
        find_model(name)


HUB: dict[str, Any] = {
    "own/whole": {"siblings": ["config.json", "model.safetensors", "tokenizer.json"]},
    "own/terms": {"siblings": ["config.json", "model.safetensors", "tokenizer.json"], "gated": "manual"},
    "own/adapter": {"siblings": ["adapter_config.json", "adapter_model.safetensors"]},
    "own/small": {"siblings": ["config.json"], "config": {"quantization_config": {"quant_method": "awq"}}},
    "own/data": {"siblings": ["README.md"]},
    "own/weights": {"siblings": ["config.json", "model-00001-of-00002.safetensors"]},
}


class HubHandler(BaseHTTPRequestHandler):
    """The few answers of a model hub that are asked for."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name.endswith("/auth-check"):
            return self._answer(403, {"error": "gated"}, "GatedRepo")
        if name == "own/broken":
            return self._answer(500, {"error": "out of order"})
        if name not in HUB:
            return self._answer(401, {"error": "no such"}, "RepoNotFound")
        siblings = [{"rfilename": file} for file in HUB[name]["siblings"]]
        return self._answer(200, {"id": name, "gated": False} | HUB[name] | {"siblings": siblings})

    def _answer(self, status: int, body: Any, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield url
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own/absent", r"is not a folder here \(/.*/own/absent\) and the Hugging Face hub has no such model that you can"),
        ("own/terms", r"is gated: accept its terms at http://.*/own/terms, then log in"),
        ("own/adapter", "'own/adapter' has an adapter: merge it"),
        ("own/small", r"'own/small' is quantized \(awq\)"),
        ("own/data", "is on the Hugging Face hub without weights"),
        ("own/weights", "is on the Hugging Face hub without a tokenizer"),
        ("own/broken", r"the Hugging Face hub can't be reached \(.*500"),
    ],
)
def test_what_the_hub_does_not_give_is_reported_before_anything_is_loaded(hub: str, name: str, message: str) -> None:
    assert find_model("own/whole") == "own/whole"
    assert re.search(message, refusal(load_tokenizer, name))


def test_without_the_hub_a_model_that_was_downloaded_before_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub" / "models--own--mine"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    folder.rename(cached / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_max_length(load_model(ModelConfig(path="own/mine"))) == 64


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name.replace("__", "."): weight for name, weight in changes.items()}, folder / "model.safetensors")


def cut_weights(folder: Path, content: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))


def make_adapter(folder: Path, *, with_model: bool) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}))
    if not with_model:
        (folder / "config.json").unlink()


def quantize(folder: Path, method: str, *, inner: bool = False) -> None:
    settings = {"quantization_config": {"quant_method": method, "bits": 4}}
    change_config(folder, **({"text_config": settings} if inner else settings))
    (folder / "model.safetensors").unlink()  # it is refused before they are read


LORA, VALUE_HEAD = "model.layers.0.self_attn.q_proj.lora_A.weight", "v_head.summary.weight"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: change_config(folder, model_type="of_next_year"), "upgrade transformers"),
    (lambda folder: change_config(folder, num_hidden_layers=3), r"layers\.2.* and \d+ more missing or of another shape"),
    (lambda folder: cut_weights(folder, lambda whole: whole[:-100]), "can't load the model"),
    (lambda folder: cut_weights(folder, lambda _: b"not safetensors at all"), "can't load the model"),
    (lambda folder: (folder / "model.safetensors").unlink(), "can't load the model"),
    (lambda folder: change_weights(folder, **{LORA: torch.ones(2, 2)}), f"has not: {LORA}; merge adapters"),
    (lambda folder: change_weights(folder, **{VALUE_HEAD: torch.ones(2, 2)}), f"has not: {VALUE_HEAD}; merge adapters"),
    (lambda folder: change_weights(folder, **{"model.layers.2.x": torch.ones(2)}), "has not: model.layers.2.x"),
    (
        lambda folder: change_weights(folder, model__norm__weight=torch.ones(16).log().sub(1).log()),
        r"weights are not finite \(NaN or infinity\): model.norm.weight; give another",
    ),
    (
        lambda folder: change_weights(folder, model__norm__weight=torch.ones(16) / torch.arange(16)),
        r"weights are not finite \(NaN or infinity\): model.norm.weight; give another",
    ),
    (lambda folder: quantize(folder, "gptq"), r"is quantized \(gptq\): quantized weights can't be trained; give the unquan"),
    (lambda folder: quantize(folder, "fp8", inner=True), r"is quantized \(fp8\)"),
    (lambda folder: make_adapter(folder, with_model=True), "has an adapter of 'x/y': merge it into its model"),
    (lambda folder: make_adapter(folder, with_model=False), "has an adapter of 'x/y': merge it into its model"),
    # transformers would go on without its stop tokens
    (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json"),
    (lambda folder: (folder / "generation_config.json").write_text("[1]"), "generation_config.json"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_can_not_be_loaded_as_it_is_is_refused_by_one_line(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    assert re.search(message, refusal(load_model, folder))
    if "quantized" in message:
        assert re.search(message, refusal(load_tokenizer, folder))
    if "generation_config" in message:
        assert re.search(message, refusal(load_config, folder))


def test_known_leftovers_in_a_file_are_no_error(folder: Path) -> None:
    """Buffers of old versions, layers for further tokens, an encoder of images."""
    harmless = ("model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.masked_bias", "mtp.layers.0.x")
    change_weights(folder, **{name: torch.ones(2) for name in (*harmless, "vision_tower.patches.weight")})
    load_model(ModelConfig(path=str(folder)))


SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
SMALLER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
TABLES = {
    "gpt2": GPT2Config(**SMALL),
    "opt": OPTConfig(**SMALLER, ffn_dim=32, word_embed_proj_dim=32),  # counts from 2
    "gptj": GPTJConfig(**SMALL, rotary_dim=8),  # a buffer
    "llama": LlamaConfig(**SMALLER),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_positions_bounds_the_length(name: str) -> None:
    config = TABLES[name]
    config.vocab_size = 100
    model = AutoModelForCausalLM.from_config(config).eval()
    assert model_max_length(model) == 64
    if name == "llama":  # its positions are computed
        assert learned_positions(model) is None
        refuse_longer(model, 65)
        return
    assert learned_positions(model) == 64
    model(input_ids=torch.full((1, 64), 5), use_cache=False)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 65), 5), use_cache=False)
    refuse_longer(model, 64)
    with pytest.raises(UnsupportedModelError, match=r"has 64 positions; set engine.max_length to 64$"):
        LocalEngine(model, slots=2, max_length=65)


def test_other_kinds_of_model_are_refused(tmp_path: Path) -> None:
    t5 = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path)
    assert "not a causal language model" in refusal(load_model, tmp_path)


def test_code_that_comes_with_a_model_is_not_run_unless_asked(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    change_config(folder, model_type="own", architectures=["Own"], auto_map=classes)
    assert "model.trust_remote_code" in refusal(load_model, folder)
    assert not marker.exists()

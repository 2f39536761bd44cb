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
    AutoModelForImageTextToText,
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
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment
from tests.parity.models import make_family, tiny_llama
from tests.unit.engine.engine_parts import request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tokens = {"max_position_embeddings": 64, "eos_token_id": 3, "pad_token_id": 0}
    tiny_llama(num_hidden_layers=2, attention_dropout=0.5, **tokens).save_pretrained(path)
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


@pytest.mark.slow
def test_a_vision_language_model_is_trained_and_run_as_its_text_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(WITH_VISION).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)))
    learner = Learner(model, TrainerConfig(weight_decay=0.1), temperature=1.0)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "visual" in name} != set()
    engine = LocalEngine(load_model(ModelConfig(path=str(tmp_path))), slots=2, max_length=64, flatten=False)
    assert engine.update_weights(WeightUpdate(1, checksum(learner.weights()), learner.weights())).version == 1
    prompt = tuple(range(3, 20))
    done = engine.generate([request("x", prompt, 8)])[0]
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


@pytest.mark.parametrize("name", ["my model", "a--b", "owner/..x", "owner/name.git", "", "a/b/c"])
def test_what_can_be_no_hub_id_is_not_asked_for(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist: give a folder with a model, or a hub id"):
        find_model(name)


WHOLE = ["config.json", "model.safetensors", "tokenizer.json"]
QUANTIZED = {"quantization_config": {"quant_method": "awq"}}
HUB: dict[str, tuple[dict[str, Any], str]] = {
    "own/whole": ({"files": WHOLE}, ""),
    "own/terms": (
        {"files": WHOLE, "gated": "manual"},
        r"is gated: accept its terms at http://.*/own/terms, then log in",
    ),
    "own/adapter": (
        {"files": ["adapter_config.json", "adapter_model.safetensors"]},
        "'own/adapter' has an adapter: merge it",
    ),
    "own/small": ({"files": ["config.json"], "config": QUANTIZED}, r"'own/small' is quantized \(awq\)"),
    "own/data": ({"files": ["README.md"]}, "is on the Hugging Face hub without weights"),
    "own/weights": (
        {"files": ["config.json", "model-00001-of-00002.safetensors"]},
        "is on the Hugging Face hub without a tokenizer",
    ),
    "own/broken": ({"status": 500}, r"the Hugging Face hub can't be reached \(.*500"),
    "own/absent": (
        {"status": 401, "code": "RepoNotFound"},
        r"is not a folder here \(/.*/own/absent\) and the Hugging Face hub has no such model that you can",
    ),
}
"""What a model hub answers for a model, and the error."""


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name.endswith("/auth-check"):
            answer: dict[str, Any] = {"status": 403, "code": "GatedRepo"}
        else:
            answer = {"id": name, "gated": False} | HUB[name][0]
        answer["siblings"] = [{"rfilename": file} for file in answer.get("files", ())]
        self.send_response(answer.get("status", 200))
        if "code" in answer:
            self.send_header("X-Error-Code", answer["code"])
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize("name", [name for name in HUB if name != "own/whole"])
def test_what_the_hub_does_not_give_is_reported_before_anything_is_loaded(name: str) -> None:
    assert find_model("own/whole") == "own/whole"
    assert re.search(HUB[name][1], refusal(load_tokenizer, name))


def test_without_the_hub_only_a_model_that_was_downloaded_before_is_used(
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
    assert "hub can't be reached" in refusal(load_model, "nobody/never-downloaded")


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name.replace("__", "."): weight for name, weight in changes.items()}, folder / "model.safetensors")


def write_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


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
    (
        lambda folder: write_weights(folder, (folder / "model.safetensors").read_bytes()[:-100]),
        "can't load the model",
    ),
    (lambda folder: write_weights(folder, b"not safetensors at all"), "can't load the model"),
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


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "llama"])
def test_a_table_of_positions_bounds_the_length(name: str) -> None:
    """OPT counts from 2, GPT-J's table is a buffer, and Llama computes its positions."""
    model = make_family(name)
    length = model_max_length(model)
    assert length is not None
    if name == "llama":
        assert learned_positions(model) is None
        refuse_longer(model, length + 1)
        return
    assert learned_positions(model) == length
    model(input_ids=torch.full((1, length), 5), use_cache=False)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, length + 1), 5), use_cache=False)
    refuse_longer(model, length)
    with pytest.raises(UnsupportedModelError, match=rf"has {length} positions; set engine.max_length to {length}$"):
        LocalEngine(model, slots=2, max_length=length + 1)


@pytest.mark.slow
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

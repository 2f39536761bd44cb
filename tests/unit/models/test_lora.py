"""Adapters: engines get exactly what the trainer computes with, the model under them stays, and a run goes on exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pipelinerl.config.schema import LoraConfig, TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import CheckpointError, ConfigError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import ADAPTER_FOLDER, refuse_adapter
from pipelinerl.models.lora import LoraLinear, LoraModel
from pipelinerl.models.packed import PackedRow, training_forward
from pipelinerl.models.state import checksum, load_weights, named_weights
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment
from tests.parity.models import CONFIGS, QUICK, THROUGH_CACHE, make_model
from tests.unit.trainer.test_trainer_step import TEMPERATURE, make_samples

CONFIG = LoraConfig(rank=4, alpha=8.0)
DTYPES = [torch.float32, torch.bfloat16]
SEGMENT = Segment(token_ids=tuple(range(3, 20)), sampled=((4, 17),))


def with_adapters(name: str = "llama", dtype: torch.dtype = torch.float32, config: LoraConfig = CONFIG) -> LoraModel:
    return LoraModel(make_model(name).to(dtype), config, seed=5)


def stir(lora: LoraModel) -> LoraModel:
    """As after some steps: B is no longer 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in lora.model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return lora


RARE = {name for name in THROUGH_CACHE if "falcon-h1" not in name}
FAMILIES = [
    pytest.param(name, marks=pytest.mark.exhaustive if name in RARE else () if name in QUICK else pytest.mark.slow)
    for name in CONFIGS
]
"""Of the models that are trained by their own forward, one with attention and a Mamba mixer in each layer."""


def learner(lora: LoraModel, **options: Any) -> Learner:
    config = TrainerConfig(**{"learning_rate": 1e-2, "steps": 100} | options)
    return Learner(lora.model, config, temperature=TEMPERATURE, lora=lora)


def logits(model: Any) -> torch.Tensor:
    forward = training_forward(model)
    with torch.no_grad():
        return forward(PackedRow.of([SEGMENT]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_merges_an_adapter_to_the_bit(dtype: torch.dtype) -> None:
    lora, model = with_adapters(dtype=dtype), make_model("llama").to(dtype)
    engine, own = LocalEngine(model, slots=2, max_length=32), checksum(named_weights(model))
    for version in (1, 2):
        whole = checksum(stir(lora).weights())
        update = WeightUpdate(version, whole, lora.tensors(), adapter=True)
        assert engine.update_weights(update).checksum == whole == checksum(named_weights(model)) != own
    only_one = {name: tensor for name, tensor in update.tensors.items() if "layers.0.mlp.up_proj" in name}
    assert engine.update_weights(WeightUpdate(3, "", only_one, adapter=True)).checksum not in (whole, own)
    unknown = {f"other.{name}": tensor for name, tensor in only_one.items()}
    with pytest.raises(WeightUpdateError, match=r"1 unknown \(other\.model\.layers\.0\.mlp\.up_proj\.weight\)"):
        engine.update_weights(WeightUpdate(4, "", unknown, adapter=True))
    infinite = {name: torch.full_like(tensor, torch.inf) for name, tensor in only_one.items()}
    with pytest.raises(WeightUpdateError, match="3 with values that are not finite"):
        engine.update_weights(WeightUpdate(4, "", infinite, adapter=True))
    assert engine.update_weights(WeightUpdate(4, "", {}, adapter=True)).checksum == own
    with pytest.raises(WeightUpdateError, match=f"checksum {own}, not {whole}: it can't go on; use weights.encoding: full"):
        engine.update_weights(WeightUpdate(5, whole, {}, adapter=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_engines_are_given_what_the_trainer_computes_with(name: str, dtype: torch.dtype) -> None:
    lora, plain = with_adapters(name, dtype), make_model(name).to(dtype)
    assert list(lora.weights()) == list(named_weights(plain))
    assert checksum(lora.weights()) == checksum(named_weights(plain)), "at first they are the model's own"
    trained = {n: p.dtype for n, p in lora.model.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32}
    assert all(".lora_" in n for n in trained)
    stir(lora)
    assert not torch.equal(logits(plain), logits(lora.model))
    load_weights(named_weights(plain), lora.weights())
    assert torch.equal(logits(plain), logits(lora.model)), "to the bit, rounding to bfloat16 included"


def test_gradients_are_those_of_the_merged_product() -> None:
    lora = stir(with_adapters())
    layer = lora.model.model.layers[0].mlp.down_proj
    assert isinstance(layer, LoraLinear)
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(2), requires_grad=True)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    found = torch.autograd.grad(layer(x).square().sum(), [x, a, b])
    merged = layer.base_layer.weight + CONFIG.alpha / CONFIG.rank * b @ a
    expected = torch.autograd.grad((x @ merged.T).square().sum(), [x, a, b])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_trains_the_adapters_alone(dtype: torch.dtype) -> None:
    lora = with_adapters(dtype=dtype)
    before = {name: p.clone() for name, p in lora.model.named_parameters()}
    start = checksum(lora.weights())
    taught = learner(lora)
    for version in range(2):  # in the first A has no gradient: B is 0
        taught.step(make_samples(make_model("llama")), version=version)
    assert checksum(taught.weights()) != start
    for name, parameter in lora.model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert {name.rpartition(".")[0] for name in taught.optimizer.state()} == {
        name for name, parameter in lora.model.named_parameters() if parameter.requires_grad
    }


def test_without_its_adapters_the_model_is_the_reference() -> None:
    lora = stir(with_adapters())
    options: dict[str, Any] = {"temperature": TEMPERATURE, "micro_batch_tokens": 64}
    copied = FrozenModelScorer(make_model("llama"), **options).score([SEGMENT])
    trained = logits(lora.model)
    assert FrozenModelScorer(lora.model, **options, lora=lora).score([SEGMENT]) == copied
    assert torch.equal(logits(lora.model), trained), "the adapters are there again"
    assert learner(lora).step(make_samples(make_model("llama")), version=3).grad_norm, "and are trained"


def test_adapters_are_a_function_of_the_seed_alone() -> None:
    before = torch.get_rng_state()
    models = [LoraModel(make_model("llama"), CONFIG, seed=seed).model for seed in (5, 5, 6)]
    assert torch.equal(torch.get_rng_state(), before)
    one, again, other = (checksum(dict(model.named_parameters())) for model in models)
    assert one == again != other


def test_others_can_load_what_was_saved(tmp_path: Path) -> None:
    lora = stir(with_adapters())
    lora.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checksum(named_weights(loaded)) == checksum(lora.weights())
    theirs = PeftModel.from_pretrained(make_model("llama"), tmp_path / ADAPTER_FOLDER).merge_and_unload()
    for name, weight in named_weights(theirs).items():
        torch.testing.assert_close(weight, lora.weights()[name], atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_goes_on_bitwise_from_what_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    samples = make_samples(make_model("llama"))
    taught = learner(with_adapters(dtype=dtype))
    for version in range(3):
        taught.step(samples, version=version)
    taught.save_pretrained(tmp_path)
    resumed = learner(LoraModel(make_model("llama").to(dtype), CONFIG, seed=77))
    assert resumed.lora is not None
    resumed.lora.load_adapter(tmp_path)
    resumed.optimizer.load_state({name: tensor.clone() for name, tensor in taught.optimizer.state().items()})
    assert checksum(resumed.weights()) == checksum(taught.weights())
    for one in (taught, resumed):
        one.step(samples, version=3)
    assert checksum(resumed.weights()) == checksum(taught.weights())


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    stir(with_adapters()).save_pretrained(tmp_path / "lora")
    make_model("llama").save_pretrained(tmp_path / "full")
    stir(with_adapters()).save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / ADAPTER_FOLDER / "adapter_model.safetensors").write_bytes(b"x" * 40)
    for lora, folder, message in (
        (LoraModel(make_model("llama", seed=1), CONFIG, seed=5), "lora", "trained with other base weights than"),
        (with_adapters(config=LoraConfig(rank=5)), "lora", "another rank or other layers"),
        (with_adapters(config=LoraConfig(rank=4, target_modules=("q_proj",))), "lora", "another rank or other layers"),
        (with_adapters(), "full", r"has no adapter.*set model\.lora to null"),
        (with_adapters(), "damaged", "can't read"),
    ):
        with pytest.raises(CheckpointError, match=message):
            lora.load_adapter(tmp_path / folder)
    with pytest.raises(CheckpointError, match="from a run that trained adapters"):
        refuse_adapter(tmp_path / "lora")
    refuse_adapter(tmp_path / "full")


def test_layers_can_be_chosen() -> None:
    lora = with_adapters(config=LoraConfig(rank=2, target_modules=("q_proj", "layers.1.mlp.up_proj")))
    assert set(lora.layers) == {*(f"model.layers.{i}.self_attn.q_proj" for i in range(2)), "model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("qproj", "'qproj' isn't one"),
        ("lm_head", "'lm_head' matches lm_head, which isn't one"),
        ("embed_tokens", "'embed_tokens' matches model.embed_tokens, which isn't one"),
        ("mlp", "'mlp' matches model.layers.0.mlp, which isn't one"),
    ],
)
def test_a_layer_that_can_have_none_is_one_line_with_those_that_can(target: str, what: str) -> None:
    model = make_model("llama-untied")
    before = copy.deepcopy(model)
    with pytest.raises(ConfigError) as caught:
        LoraModel(model, LoraConfig(target_modules=("v_proj", target)), seed=0)
    layers = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert str(caught.value) == (
        f"model.lora.target_modules: LlamaForCausalLM can have adapters in the linear layers {layers}; {what}"
    )
    assert str(model) == str(before)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("deepseek-v3-latents", "down_proj"),
        ("falcon-h1-both-in-one-layer", "out_proj"),
        ("falcon-mamba-token-by-token", "dt_proj"),
    ],
)
def test_layers_that_would_be_left_out_of_the_computation_have_no_adapters(name: str, left_out: str) -> None:
    """peft would give the name to the experts, or a fused kernel reads the layer's weights."""
    lora = with_adapters(name)
    assert lora.layers
    assert not [path for path in lora.layers if path.endswith(left_out)]
    with pytest.raises(ConfigError, match=f"'{left_out}' matches .*, which isn't one"):
        with_adapters(name, config=LoraConfig(target_modules=(left_out,)))

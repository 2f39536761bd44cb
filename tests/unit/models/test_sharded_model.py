"""Sharding a model, without other processes: torch's fake process group has collective operations that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.models.loading import load_model
from pipelinerl.models.sharded import (
    host_model,
    load_for_sharding,
    load_rows,
    reshard,
    rows_of,
    shard,
    units,
)
from pipelinerl.models.state import compute_dtype, first_names, named_weights
from pipelinerl.weights.sending import layout_of

RANK, RANKS = 1, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_group_afterwards() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def fake_mesh() -> DeviceMesh:
    """Made after a model is saved: transformers saves nothing on ranks above 0."""
    distributed.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    return init_device_mesh("cpu", (RANKS,))


def saved(folder: Path, *, tied: bool = True) -> ModelConfig:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="20KB")
    return ModelConfig(path=str(folder))


def sharded(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    model, files = load_for_sharding(config)
    shard(model, fake_mesh(), dtype=dtype, reshard_after_forward=True, replicated=set())
    if files:
        load_rows(model, files, dtype=dtype, device=CPU)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_in_one_unit_with_the_embedding(tmp_path: Path, tied: bool) -> None:
    model = sharded(saved(tmp_path, tied=tied))
    assert isinstance(model, FSDPModule)
    assert len(units(model)) == (3 if tied else 5), "the root, two layers, and an untied embedding and head"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert isinstance(model.lm_head, FSDPModule) != tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_reads_its_rows_of_each_parameter(tmp_path: Path, tied: bool, dtype: Any) -> None:
    config = saved(tmp_path, tied=tied).model_copy(update={"dtype": dtype})
    whole = named_weights(load_model(config))
    model = sharded(config, getattr(torch, dtype))
    assert compute_dtype(model) == getattr(torch, dtype)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rows = whole[name][rows_of(whole[name].shape[0], RANK, RANKS)]
        assert parameter.dtype == torch.float32, "a shard is the master copy"
        assert torch.equal(parameter.to_local(), rows.float())
    assert torch.equal(model.model.rotary_emb.inv_freq, load_model(config).model.rotary_emb.inv_freq)


def test_reading_takes_memory_for_the_rows_only(tmp_path: Path) -> None:
    model, files = load_for_sharding(saved(tmp_path))
    assert len(set(files.values())) > 1
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_model_whose_tensors_transformers_joins_is_loaded_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2}
    experts = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    mixtral: Any = MixtralForCausalLM(experts)
    mixtral.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    model, files = load_for_sharding(config)
    assert files == {}
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    for name, parameter in model.named_parameters():
        rows = mixtral.get_parameter(name)[rows_of(parameter.shape[0], RANK, RANKS)]
        assert torch.equal(parameter.to_local(), rows)


def test_what_is_no_model_is_refused_as_with_one_process(tmp_path: Path) -> None:
    config = saved(tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelLoadError):
        load_for_sharding(config)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    config = saved(tmp_path)
    model, files = load_for_sharding(config)
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    path = files["model.norm.weight"]
    save_file(load_file(path) | {"model.norm.weight": torch.zeros(7)}, path)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[7\], not \[32\]"):
        load_rows(model, files, dtype=torch.float32, device=CPU)


def test_the_host_model_has_the_types_and_ties_of_the_whole_one(tmp_path: Path) -> None:
    config = saved(tmp_path).model_copy(update={"dtype": "bfloat16"})
    model, _ = load_for_sharding(config)
    host = host_model(model, torch.bfloat16)
    kinds = {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in named_weights(host).items()}
    whole = load_model(config)
    assert kinds == {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in named_weights(whole).items()}
    assert host.lm_head.weight is host.model.embed_tokens.weight
    assert host.config.dtype == torch.bfloat16


def test_experts_are_not_taken_for_layers(tmp_path: Path) -> None:
    model, _ = load_for_sharding(saved(tmp_path))
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    assert {type(unit).__name__ for unit in units(model)} == {"FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer"}


def test_resharding_brings_the_shards_back_after_a_forward_pass_without_a_backward_pass(tmp_path: Path) -> None:
    model = sharded(saved(tmp_path))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters()), "this is why it is needed"
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_sharded_tensors_have_no_address_to_compare(tmp_path: Path) -> None:
    weights = named_weights(sharded(saved(tmp_path)))
    with pytest.raises(TypeError, match="is sharded: gather it first"):
        first_names(weights)
    with pytest.raises(TypeError, match="is sharded: gather it first"):
        layout_of(weights, None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 100])
def test_rows_are_those_that_torch_chunks(size: int, ranks: int) -> None:
    chunks = torch.arange(size).chunk(ranks)
    for rank in range(ranks):
        expected = chunks[rank] if rank < len(chunks) else torch.arange(0)
        assert torch.equal(torch.arange(size)[rows_of(size, rank, ranks)], expected)

"""Sharding a model, without other processes: torch's fake process group has collective operations that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.loading import load_model
from pipelinerl.models.sharded import distribute, empty_model, reshard, shard, units
from pipelinerl.models.state import first_names, named_weights
from pipelinerl.weights.layout import layout_of

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


def sharded(config: ModelConfig) -> Any:
    """As on a rank to which rank 0 has sent its tensors: the fake group leaves what is there."""
    model = empty_model(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    distribute(model, load_model(config), CPU)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_in_one_unit_with_the_embedding(tmp_path: Path, tied: bool) -> None:
    model = sharded(saved(tmp_path, tied=tied))
    assert isinstance(model, FSDPModule)
    assert len(units(model)) == (3 if tied else 5), "the root, two layers, and an untied embedding and head"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert isinstance(model.lm_head, FSDPModule) != tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_model_that_has_other_tensors_than_its_code_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path)
    model, whole = empty_model(config), load_model(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "it has no memory before its rows come"
    whole.register_buffer("extra", torch.zeros(1))
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM can't be sharded: 1 only in .* \(extra\); set it to 1"
    ):
        distribute(model, whole, CPU)


def test_experts_are_not_taken_for_layers(tmp_path: Path) -> None:
    model = empty_model(saved(tmp_path))
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
        layout_of(weights)

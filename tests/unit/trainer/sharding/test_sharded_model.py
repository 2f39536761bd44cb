"""Sharding a model, without other processes: torch's fake process group has collective operations that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import first_names, named_weights
from pipelinerl.trainer.sharding.model import distribute, empty_model, shard, units
from pipelinerl.weights.layout import layout_of
from tests.parity.models import tiny_llama

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


@pytest.fixture
def saved(tmp_path: Path) -> ModelConfig:
    tiny_llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    return ModelConfig(path=str(tmp_path))


def test_a_model_that_has_other_tensors_than_its_code_is_refused(saved: ModelConfig) -> None:
    model, whole = empty_model(saved), load_model(saved)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "it has no memory before its rows come"
    whole.register_buffer("extra", torch.zeros(1))
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM can't be sharded: 1 only in .* \(extra\); set it to 1"
    ):
        distribute(model, whole, CPU)


def test_experts_are_not_taken_for_layers(saved: ModelConfig) -> None:
    model = empty_model(saved)
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    assert {type(unit).__name__ for unit in units(model)} == {"FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer"}


def test_sharded_tensors_have_no_address_to_compare(saved: ModelConfig) -> None:
    model = empty_model(saved)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    shard(model, fake_mesh(), dtype=torch.float32, reshard_after_forward=True, replicated=set())
    distribute(model, load_model(saved), CPU)
    weights = named_weights(model)
    for read in (first_names, layout_of):
        with pytest.raises(TypeError, match="is sharded: gather it first"):
            read(weights)

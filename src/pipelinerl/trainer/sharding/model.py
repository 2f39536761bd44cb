"""A model whose parameters are sharded over processes (FSDP2), and the way of whole tensors from rank 0 to all and back.

Every rank holds a part of the rows (the first dimension) of each parameter as a `DTensor`. The model is divided into units:
each decoder layer, the embedding and the head (a head that is tied to the embedding is in one unit with it), and the rest. A
unit's parameters are gathered when it computes, and freed afterwards.

Gradients are summed over the ranks, never averaged: the loss is divided by a number of the whole step.

`distribute`, `fill` and `gather` are collective: every rank must call them in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.layers import decoder_layers
from pipelinerl.models.loading import DTYPES, load_config, use_float32_head
from pipelinerl.models.state import summary_of

GATHERED_AT_ONCE = 1 << 26
"""Elements of parameters that are gathered together: ranks would wait for each other at every small one."""


def empty_model(config: ModelConfig) -> Any:
    """The model that `load_model(config)` loads, on the meta device: its parameters and buffers have no memory.

    Raises ModelLoadError if its configuration can't be loaded, UnsupportedModelError like `load_model`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - takes seconds

    found: Any = load_config(config).config
    options: Any = {"dtype": DTYPES[config.dtype], "trust_remote_code": config.trust_remote_code}
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(found, **options)
        except ValueError:  # it is not one of them
            model = AutoModelForImageTextToText.from_config(found, **options)
    if config.head_dtype == "float32":
        use_float32_head(model)
    return model.eval()


def shard(
    model: Any, mesh: DeviceMesh, *, dtype: torch.dtype, reshard_after_forward: bool, replicated: set[nn.Parameter]
) -> None:
    """Shard `model` in place; parameters in `replicated` stay whole on every rank. It computes in `dtype`.

    If parameters have another type than `dtype` they are converted when they are gathered, and gradients are summed in
    float32. Parameters on the meta device stay there (`distribute`).
    """
    narrow = any(p.dtype != dtype for p in model.parameters() if p not in replicated)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if narrow else None,
        reduce_dtype=torch.float32 if narrow else None,
        cast_forward_inputs=False,  # the model converts its activations itself, as it does in one process
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": replicated}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    own_units = [*decoder_layers(model), *([] if tied or head is None else [embedding, head])]
    for unit in own_units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # needed again at once, in the backward pass
    model.compute_dtype = dtype
    for unit in units(model):
        # Both: with the factor alone, FSDP asks for a scaled sum, which gloo does not have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> list[FSDPModule]:
    """The root comes first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters. Needed after a forward pass without a backward pass, which leaves some gathered.

    `named_parameters` then returns the shards again: an optimizer of gathered parameters would train tensors that the model
    does not use.
    """
    for unit in units(model):
        unit.reshard()


# ---- Tensors from rank 0 to all, and back


@torch.no_grad()
def distribute(model: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Give the parameters and buffers of a sharded model memory on `device`, and the values of `whole`, which rank 0 has.

    Raises UnsupportedModelError if `whole` has other tensors than `model`.
    """
    sources = None if whole is None else _tensors(whole)
    if sources is not None and (odd := sorted(_tensors(model).keys() ^ sources.keys())):
        what = "; ".join(summary_of("only in its files or only in its code", odd))
        raise UnsupportedModelError(f"trainer.ranks: {type(whole).__name__} can't be sharded: {what}; set it to 1")
    model.to_empty(device=device)
    for name, target in _tensors(model).items():
        fill(target, None if sources is None else sources[name])


@torch.no_grad()
def fill(target: Tensor, whole: Tensor | None) -> None:
    """Copy the tensor `whole` of rank 0 into `target`, of whose rows each rank has a part, or all if it is not sharded."""
    value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    if whole is not None:
        value.copy_(whole)
    distributed.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: gloo does not know all types
    if isinstance(target, DTensor):
        mine: Any = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(mine.to_local())
    else:
        target.copy_(value)


@torch.no_grad()
def gather(model: nn.Module, room: Mapping[str, Tensor] | None, dtype: torch.dtype) -> None:
    """Copy the trained parameters into `room`, which rank 0 has, by name. Sharded ones are sent in `dtype`, many at once."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    at_once: dict[str, DTensor] = {}
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor):
            at_once[name] = parameter
        elif room is not None:
            room[name].copy_(parameter)
        if at_once and (name == list(trained)[-1] or sum(map(Tensor.numel, at_once.values())) > GATHERED_AT_ONCE):
            _gather(at_once, room, dtype)
            at_once = {}


def _gather(parameters: Mapping[str, DTensor], room: Mapping[str, Tensor] | None, dtype: torch.dtype) -> None:
    mesh, device = next((one.device_mesh, one.device) for one in parameters.values())
    sizes = [-(-one.shape[0] // mesh.size()) * (one.numel() // one.shape[0]) for one in parameters.values()]
    sent = torch.zeros(sum(sizes), dtype=dtype, device=device)  # the last ranks may have fewer rows than their share
    for part, parameter in zip(torch.split(sent, sizes), parameters.values(), strict=True):
        rows = parameter.to_local().flatten()
        part[: rows.numel()] = rows
    found = None if room is None else [torch.empty_like(sent) for _ in range(mesh.size())]
    distributed.gather(sent, found)
    if room is not None and found is not None:
        for (name, parameter), *parts in zip(parameters.items(), *(torch.split(one, sizes) for one in found), strict=True):
            room[name].copy_(torch.cat(parts)[: parameter.numel()].view(parameter.shape))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

"""A model whose parameters are sharded over processes (FSDP2): loading, gathering, and which rows belong to which rank.

Every rank holds a part of the rows (the first dimension) of each parameter as a `DTensor`. The model is divided into units:
each decoder layer, the embedding and the head (a head that is tied to the embedding is in one unit with it), and the rest. A
unit's parameters are gathered when it computes, and freed afterwards.

Gradients are summed over the ranks, never averaged: the loss is divided by a number of the whole step.

All functions that gather are collective: every rank must call them in the same order.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.models.float32_head import use_float32_head
from pipelinerl.models.folder import find_model
from pipelinerl.models.hub import downloaded
from pipelinerl.models.layers import decoder_layers
from pipelinerl.models.loading import DTYPES, load_model

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def rows_of(size: int, rank: int, ranks: int) -> slice:
    """The rows of a parameter with `size` rows that FSDP gives to `rank`. The last ranks may have fewer, or none."""
    share = -(-size // ranks)
    return slice(min(size, rank * share), min(size, (rank + 1) * share))


def shard(
    model: Any, mesh: DeviceMesh, *, dtype: torch.dtype, reshard_after_forward: bool, replicated: set[nn.Parameter]
) -> None:
    """Shard `model` in place; parameters in `replicated` stay whole on every rank. It computes in `dtype`.

    If parameters have another type than `dtype` they are converted when they are gathered, and gradients are summed in
    float32. Parameters on the meta device stay there (`load_rows`).
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


@torch.no_grad()
def gather(model: nn.Module, take: Callable[[str, Mapping[str, Tensor]], None] | None) -> None:
    """Gather one unit after the other. For each of its modules, call `take(path, parameters)`, if it is given.

    The parameters are whole during the call, by their names in the module. A tied parameter is in the first module only.
    """
    roots = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    for root in roots:
        unit: Any = model.get_submodule(root)
        seen: set[int] = set()
        unit.unshard()
        for path, module in _members(root, unit):
            own = {name: p.detach() for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
            seen.update(id(p) for p in module.parameters(recurse=False))
            if take is not None and own:
                take(path, own)
        unit.reshard()


def _members(path: str, unit: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, without those of units inside it."""
    yield path, unit
    for name, child in unit.named_children():
        if not isinstance(child, FSDPModule):
            yield from _members(f"{path}.{name}" if path else name, child)


# ---- A model without weights, whose rows are then read


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have real buffers, and parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    patched: Any = nn.Module
    patched.register_parameter = on_meta
    try:
        yield
    finally:
        patched.register_parameter = register


def skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of this class (of transformers) in eval mode, with parameters on the meta device."""
    with _parameters_on_meta():
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    return model.eval()


def host_model(model: Any, dtype: torch.dtype) -> Any:
    """A whole model like `model` (not sharded yet) on the CPU, with uninitialised parameters in `dtype`."""
    whole = skeleton(type(model), model.config, dtype)
    for module in whole.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
    whole.tie_weights()
    buffers = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        buffer.copy_(buffers[name])
    whole.generation_config = model.generation_config
    return whole


def open_files(folder: str) -> dict[str, Path]:
    """The safetensors file of each tensor in a model's folder; empty if it has none."""
    root = Path(folder)
    if (root / _INDEX).is_file():
        listed = json.loads((root / _INDEX).read_text())["weight_map"]
        return {name: root / file for name, file in listed.items()}
    if not (root / _SINGLE).is_file():
        return {}
    with safe_open(root / _SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), root / _SINGLE)


def load_for_sharding(config: ModelConfig, *, frozen: bool = False) -> tuple[Any, dict[str, Path]]:
    """The model on the CPU, to be given to `shard`, and the files to give to `load_rows` then.

    Its parameters have no memory if each is a tensor of the files: every rank then reads only its own rows. They are in
    float32, the type of master copies; those of a `frozen` model are in its own type. In two cases the whole model is
    loaded first, and there are no files to read: transformers renames or joins some tensors, or there are persistent
    buffers.

    Raises the errors of `load_model`.
    """
    folder = find_model(config.path)
    folder = folder if Path(folder).is_dir() else downloaded(folder) or folder
    files = open_files(folder)
    with suppress(Exception):  # `load_model` has the messages for models that can't be loaded
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415 - takes seconds
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - as above

        found = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                found, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code
            )
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder)
        names = {name for name, _ in model.named_parameters()}
        buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
        converted = get_model_conversion_mapping(model, add_legacy=False) or hasattr(found, "quantization_config")
        if names <= files.keys() and not buffers and not converted:
            if config.head_dtype == "float32":
                use_float32_head(model)
            return _prepared(model.eval(), frozen), files
    return _prepared(load_model(config), frozen), {}


def _prepared(model: Any, frozen: bool) -> Any:
    """Frozen, or with all parameters in float32: a shard is the master copy that the optimizer updates."""
    if frozen:
        return model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def load_rows(model: nn.Module, files: Mapping[str, Path], *, dtype: torch.dtype, device: torch.device) -> None:
    """Give the sharded parameters memory on `device`, and read this rank's rows of each, rounded to `dtype`.

    Raises ModelLoadError for a tensor of another shape, or a file that can't be read.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        local = parameter.to_local()
        rows = rows_of(parameter.shape[0], parameter.device_mesh.get_local_rank(), parameter.device_mesh.size())
        try:
            with safe_open(files[name], "pt") as file:
                whole = file.get_slice(name)
                if tuple(whole.get_shape()) != tuple(parameter.shape):
                    raise ModelLoadError(
                        f"{files[name]}: {name} has shape {whole.get_shape()}, not {list(parameter.shape)}; "
                        "get a complete copy of the model"
                    )
                local.copy_(whole[rows].to(dtype))
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"can't read {files[name]}: {error}; get a complete copy of the model") from error

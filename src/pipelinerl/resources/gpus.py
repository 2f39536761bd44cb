"""What a run uses of this machine's GPUs where its run file does not say: a function of the keys that are set, the GPUs and
the model's sizes. What is chosen becomes part of the run's configuration, so a resume or a replay chooses nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from pipelinerl.config.keys import spell
from pipelinerl.config.load import config_of_values
from pipelinerl.config.schema import PACKAGED_MODELS, RunConfig, Section
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.resources.machine import memory_of
from pipelinerl.resources.memory import bytes_by, predict
from pipelinerl.resources.placement import Node, place, roles_of
from pipelinerl.resources.shape import ModelShape, shape_of
from pipelinerl.types import MAX_RECEIVERS

FILLED = 0.9
"""Share of a GPU's free memory that may be planned for: graphs and gaps of the allocator are not predicted."""
SLOTS = ((256, 128, 64), (32, 16, 8))
"""Numbers of slots to try; the second ones after slower ways to train, as decoding needs rows (docs/benchmarks.md)."""
MICRO_BATCHES = ((False, 8192), (True, 16384), (True, 8192))
"""Gradient checkpointing and micro-batch tokens to try, the fastest first."""
IN_PROGRESS = 2
"""Most sequences in progress in all engines, in units of the rollouts of a step (or round): lag grows with them."""
CHECKPOINTING = "trainer.gradient_checkpointing"
WHY = {
    "model.dtype": "with float32 master weights",
    "engine.kind": "it is installed here",
    "engine.slots": f"for memory and lag: in all engines at most {IN_PROGRESS} x trainer.batch_size",
    "trainer.ranks": "for memory",
    CHECKPOINTING: "for memory",
}

Settings = Mapping[str, Any]


def with_gpus(config: RunConfig, count: int) -> tuple[RunConfig, list[str]]:
    """`config` with what it leaves open chosen for the `count` GPUs of this machine, and the line that says so.

    It stays as it is if PyTorch can't use them. Raises ModelLoadError if there is no model.
    """
    given = keys_given(config)
    if not may_choose(config, given):
        return config, []
    import torch  # noqa: PLC0415 - takes seconds

    found = [memory for number in range(count) if (memory := memory_of(f"cuda:{number}")) is not None]
    gpus = [memory.free for memory in found]
    if not gpus or torch.cuda.device_count() < len(gpus):
        return config, []
    chosen, line = choose(config, given, gpus, shape_of(config), vllm=importlib.util.find_spec("vllm") is not None)
    return (config_of_values(chosen, config), [line]) if chosen else (config, [])


def keys_given(config: RunConfig) -> set[str]:
    """The dotted keys that were set, to whatever value."""
    found: set[str] = set()
    for name in config.model_fields_set:
        value = getattr(config, name)
        found |= {f"{name}.{key}" for key in value.model_fields_set} if isinstance(value, Section) else {name}
    return found


def may_choose(config: RunConfig, given: Collection[str]) -> bool:
    """Whether the run may be one for this machine's GPUs: in several processes, and its run file names no other device.

    The packaged models are so small that they are made for CPUs.
    """
    if config.launch.kind != "processes" or config.model.path in PACKAGED_MODELS:
        return False
    devices = {"engine.device": config.engine.device, "trainer.device": config.trainer.device}
    return all(device.startswith("cuda") for key, device in devices.items() if key in given)


def choose(
    config: RunConfig, given: Collection[str], gpus: Sequence[int], shape: ModelShape | None, *, vllm: bool
) -> tuple[Settings, str]:
    """What to use of `gpus`, their free memory in bytes: values of keys that the run file leaves open, which are not in
    `given`, and one line that names them with reasons.

    `shape`: None if the model's sizes are not known. `vllm`: this Python has it. It is chosen only where engines have GPUs
    of their own, since it takes nearly all memory of one.
    """
    if config.engine.urls:  # these have their own settings
        given = {*given, "engine.device", "engine.servers", "engine.slots"}
    vllm = vllm and len(gpus) > 1 and not {"engine.kind", "engine.urls", "engine.processes", "model.head_dtype"} & {*given}
    device = "cuda:0" if len(gpus) == 1 else "cuda"
    wanted: dict[str, Any] = {"engine.device": device, "trainer.device": device, "model.dtype": "bfloat16"}
    if vllm:
        wanted |= {"engine.kind": "vllm", "engine.python": sys.executable}
    elif config.engine.kind != "vllm" and "model.dtype" not in given:
        wanted["model.head_dtype"] = "float32"
    fixed = {key: value for key, value in wanted.items() if key not in given}
    try:
        base = config_of_values(fixed, config)
    except ConfigError:
        if not vllm:
            raise
        return choose(config, given, gpus, shape, vllm=False)  # the run file has what vLLM can't do
    note = ""
    if shape is None:
        note = "; sizes are chosen too once the model has been downloaded"
        settings: Settings = next(_spread(base, given, len(gpus)))
    else:
        settings = next(_fitting(base, given, gpus, shape), {"": None})
        if "" in settings:
            *_, settings = _sizes(base, given, len(gpus))  # the smallest, for the check of the memory to judge
            note = f"; all {shape.parameters / 1e9:.1f}B parameters can't be trained here"
            adapters = config_of_values({"model.lora": {}}, base)
            if "model.lora" not in given and next(_fitting(adapters, given, gpus, shape), None) is not None:
                note += ", low-rank adapters can: --model.lora {}"
    chosen, before = fixed | dict(settings), config.model_dump()
    shown = [
        f"{key} {spell(value)}" + (f" ({WHY[key]})" if key in WHY else "")
        for key, value in chosen.items()
        if value != before[key.partition(".")[0]][key.partition(".")[2]]
    ]
    here = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} with {min(gpus) / 1e9:.0f} GB free"
    return chosen, f"chosen for {here}: {', '.join(shown)}{note}"


def _fitting(config: RunConfig, given: Collection[str], gpus: Sequence[int], shape: ModelShape) -> Iterator[Settings]:
    """The sizes with which the run fits into `gpus`, the fastest first."""
    for settings in _sizes(config, given, len(gpus)):
        with suppress(ConfigError, UserError):  # not a combination, or more processes than GPUs
            sized = config_of_values(settings, config)
            places = place(roles_of(sized), [Node("here", "here", 1, len(gpus))], {})
            needed = bytes_by("device", predict(sized, shape, {found.role: found.gpus for found in places}))
            if all(needed[f"cuda:{number}"] <= FILLED * room for number, room in enumerate(gpus)):
                yield settings


def _sizes(config: RunConfig, given: Collection[str], gpus: int) -> Iterator[Settings]:
    """Sizes to try: the trainer on as few GPUs as possible, and then the fastest first."""
    trained_on = config.groups_needed * config.actor.group_size
    for spread, all_slots, (checkpointing, tokens) in product(_spread(config, given, gpus), SLOTS, MICRO_BATCHES):
        engines = spread.get(f"engine.{_engines(config)}") or getattr(config.engine, _engines(config))
        share = max(1, IN_PROGRESS * trained_on // engines)
        for slots in dict.fromkeys(min(slots, share) for slots in all_slots):
            sizes = {"engine.slots": slots, "trainer.micro_batch_tokens": tokens, CHECKPOINTING: checkpointing}
            yield spread | {key: value for key, value in sizes.items() if key not in given}


def _spread(config: RunConfig, given: Collection[str], gpus: int) -> Iterator[dict[str, Any]]:
    """Numbers of ranks and engines that take all GPUs, where their devices have no number."""
    count, on_gpu = f"engine.{_engines(config)}", config.trainer.device.startswith("cuda")
    shared = config.trainer.device != "cuda" or "trainer.ranks" in given
    for ranks in [config.trainer.ranks] if shared else range(1, max(2, gpus)):
        engines = max(1, min((gpus - ranks * on_gpu) // config.engine.vllm_workers, MAX_RECEIVERS))
        found = {} if shared else {"trainer.ranks": ranks}
        yield found | ({count: engines} if config.engine.device == "cuda" and count not in given else {})


def _engines(config: RunConfig) -> str:
    return "processes" if config.engine.kind == "local" else "servers"

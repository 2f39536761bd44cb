"""How much memory a run will take, from its configuration and the sizes of its model. Pure.

    process      Python and its libraries, weights, gradients and moments, KV cache, activations, ...: parts, in bytes
    between      what processes share: the weights on their way from the trainer to engines

Parts that depend on the data (how many tokens come together in a forward) are known as bounds only: `most` when prompts are
as long as is known of them (or as a slot allows) and answers as `actor.max_tokens` allows, `least` when answers come to a
quarter of that. All else is the same in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.launch.roles import PREPROCESSING, TRAINING, generation_roles, server_roles
from pipelinerl.models.shape import ModelShape

HOST = "cpu"
BETWEEN = "weights between processes"

MIB = 1 << 20
TORCH_PROCESS = 450 * MIB
"""Python, torch, transformers and what they have loaded, before there is a model (measured, CPU)."""
PLAIN_PROCESS = 90 * MIB
CUDA_CONTEXT = 500 * MIB
"""What a process takes of a GPU before it has put anything there."""
PACK_FROM = 1 << 18
"""Elements from which on a CPU engine keeps a second copy of a matrix (`engine.flat.PACK_FROM`)."""
LOGIT_CHUNKS = 3 * (1 << 22) * 4
"""Temporaries of log-probabilities over chunks of `trainer.logprobs.CHUNK_ELEMENTS`."""
SHORT_ANSWERS = 4
ALLOCATOR = 1.15
"""Of what is allocated and freed all the time: the allocator's gaps between it (measured, glibc)."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Part(NamedTuple):
    """A use of memory: at least `least` bytes, at most `most`, on `device` (`cpu`, or a torch device)."""

    name: str
    least: int
    most: int
    device: str = HOST


class Process(NamedTuple):
    """The memory of one process, or (`BETWEEN`) of what several share, by use."""

    role: str
    parts: tuple[Part, ...]

    def bytes_on(self, device: str, *, least: bool = False) -> int:
        return sum(part.least if least else part.most for part in self.parts if part.device == device)


class Prediction(NamedTuple):
    processes: tuple[Process, ...]

    @property
    def devices(self) -> list[str]:
        """`cpu` first."""
        found = dict.fromkeys(part.device for process in self.processes for part in process.parts)
        return sorted(found, key=lambda device: (device != HOST, device))

    def bytes_on(self, device: str, *, least: bool = False) -> int:
        return sum(process.bytes_on(device, least=least) for process in self.processes)

    def largest(self, device: str) -> list[tuple[str, int]]:
        """Uses of `device` over all processes, the largest first."""
        uses: Counter[str] = Counter()
        for process in self.processes:
            for part in process.parts:
                if part.device == device:
                    uses[part.name] += part.most
        return uses.most_common()


def predict(config: RunConfig, shape: ModelShape, longest_prompt: int | None = None) -> Prediction:
    """What each process of the run will take at its peak. `longest_prompt`: in tokens, of a task with one turn, if known.

    Left out: vLLM servers on a GPU (they take what vLLM is set to), the stream's groups, and environments' own processes.
    """
    if config.launch.kind == "embedded":
        parts = [*_engine(config, shape), *_trainer(config, shape, longest_prompt), *_reference(config, shape)]
        return Prediction((_process("embedded", [*parts, _fixed("weights handed over", _weight_bytes(config, shape))]),))
    with_model = config.engine.kind == "local"
    generation = [*_engine(config, shape), *_staging(config, shape, config.engine.device)] if with_model else []
    processes = [_process(role, generation) for role in generation_roles(config)]
    processes += [_process(role, _server(config, shape)) for role in server_roles(config)]
    reference = _reference(config, shape)
    training = [*_trainer(config, shape, longest_prompt), *_staging(config, shape, config.trainer.device)]
    if config.launch.preprocessor == "process":
        processes.append(_process(PREPROCESSING, reference, torch=bool(reference)))
    else:
        training += reference
    processes.append(_process(TRAINING, training))
    if between := _between(config, shape):
        processes.append(Process(BETWEEN, (_fixed(BETWEEN, between),)))
    return Prediction(tuple(processes))


def activation_bytes(shape: ModelShape, tokens: int, *, item_bytes: int, checkpointing: bool) -> int:
    """What a training forward over `tokens` keeps for its backward, logits apart. Coarse: models differ.

    A layer of the usual decoder keeps, per token: the inputs and results of its two norms, of its projections and residual
    sums (7 x hidden), queries, keys and values as attention sees them, and its result (4 x query width), and what lies
    between the MLP's products (4 x its width). With `checkpointing` only each layer's input stays, and one layer's rest.
    """
    layer = 7 * shape.hidden + 4 * shape.query_width + 4 * shape.feed_forward
    floats = shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer
    # Norms are computed in float32: in a narrower type their inputs and results are there a second time.
    narrow = 0 if item_bytes == 4 else 4 * 4 * shape.hidden * (1 if checkpointing else shape.layers)
    return int(ALLOCATOR * tokens * (floats * item_bytes + narrow))


def kv_bytes(shape: ModelShape, *, slots: int, length: int, item_bytes: int) -> int:
    """Keys and values of all slots at full length."""
    return 2 * shape.layers * shape.kv_width * slots * length * item_bytes


def packed_bytes(shape: ModelShape) -> int:
    """The second copy, in another layout, of the large matrices of an engine in float32 on a CPU."""
    return 4 * sum(size for size in map(prod, shape.linears.values()) if size >= PACK_FROM)


def _engine(config: RunConfig, shape: ModelShape) -> list[Part]:
    engine, item, device = config.engine, _item_bytes(config), _memory_of(config.engine.device)
    length = shape.slot_length(engine.max_length)
    width = 3 * shape.feed_forward + 4 * shape.hidden + 4 * shape.query_width
    tokens = min(engine.prefill_tokens, engine.slots * length)
    temporaries = tokens * width * item + 4 * engine.slots * shape.vocabulary * 4
    parts = [
        _fixed("weights", _weight_bytes(config, shape), device),
        _fixed("KV cache", kv_bytes(shape, slots=engine.slots, length=length, item_bytes=item), device),
        Part("activations", temporaries // SHORT_ANSWERS, temporaries, device),
    ]
    if engine.device == "cpu" and item == 4:
        parts.append(Part("packed weights", 0, packed_bytes(shape)))  # none if its forward can't be flattened
    return [*parts, *_float32_head(config, shape, device)]


def _trainer(config: RunConfig, shape: ModelShape, longest_prompt: int | None) -> list[Part]:
    trainer, item, device = config.trainer, _item_bytes(config), _memory_of(config.trainer.device)
    lora, trained = config.model.lora, shape.parameters
    parts = [_fixed("weights", _weight_bytes(config, shape), device)]
    if lora is not None:
        adapted = _adapted(shape, lora.target_modules)
        trained = sum(lora.rank * (rows + columns) for rows, columns in adapted)
        # Publishing makes merged copies of the layers with adapters; the adapters themselves are in float32.
        merged = item * sum(map(prod, adapted))
        parts += [_fixed("adapters", 4 * trained, device), _fixed("merged weights", merged, device)]
    elif item != 4:
        parts.append(_fixed("master weights in float32", (4 + item) * trained, device))  # and a micro-batch's gradients
    parts += [_fixed("gradients", 4 * trained, device), _fixed("Adam's moments", 8 * trained, device)]
    longest = shape.slot_length(config.engine.max_length)
    if longest_prompt is not None:
        longest = min(longest, longest_prompt + config.actor.max_tokens)
    most = min(trainer.micro_batch_tokens, trainer.batch_size * longest)
    short = min(most, trainer.batch_size * config.actor.max_tokens) // SHORT_ANSWERS
    checkpointing = trainer.gradient_checkpointing
    least_bytes, most_bytes = (
        activation_bytes(shape, tokens, item_bytes=item, checkpointing=checkpointing) for tokens in (short, most)
    )
    parts.append(Part("activations", least_bytes, most_bytes, device))
    logit = 4 if config.model.head_dtype == "float32" else item
    row = shape.vocabulary * logit
    parts.append(Part("logits", short * row, most * row + LOGIT_CHUNKS, device))
    parts += _float32_head(config, shape, device)
    if device.startswith("cuda"):
        parts.append(_fixed("a checkpoint as it is written", (8 + (4 if item != 4 else 0)) * trained))
    return parts


def _float32_head(config: RunConfig, shape: ModelShape, device: str) -> list[Part]:
    """The float32 copy of a narrower model's output head: an engine keeps one, a trainer makes one for each forward."""
    if config.model.head_dtype is None or _item_bytes(config) == 4:
        return []
    return [_fixed("head in float32", 4 * shape.vocabulary * shape.hidden, device)]


def _reference(config: RunConfig, shape: ModelShape) -> list[Part]:
    """The frozen model of a KL penalty; adapters, switched off, leave one behind for nothing."""
    apart = config.launch.preprocessor == "process"
    if config.trainer.kl_coefficient == 0 or (config.model.lora is not None and not apart):
        return []
    return [_fixed("reference model", _weight_bytes(config, shape), _memory_of(config.trainer.device))]


def _server(config: RunConfig, shape: ModelShape) -> list[Part]:
    if config.engine.kind == "vllm" and config.engine.device != "cpu":
        return []
    return [
        *_engine(config, shape),
        _fixed("an update as it comes in", _weight_bytes(config, shape), _memory_of(config.engine.device)),
    ]


def _staging(config: RunConfig, shape: ModelShape, device: str) -> list[Part]:
    """Either end of a broadcast keeps a copy of what goes over it."""
    return (
        []
        if config.weights.kind == "shared"
        else [_fixed("staged weights", _weight_bytes(config, shape), _memory_of(device))]
    )


def _between(config: RunConfig, shape: ModelShape) -> int:
    """Two buffers of shared weights; for servers on this machine two files in memory, too."""
    if config.weights.kind != "shared":
        return 0
    files = config.engine.kind != "local" and config.engine.weights_dir is None
    return (4 if files else 2) * _weight_bytes(config, shape)


def _adapted(shape: ModelShape, targets: Sequence[str] | None) -> list[tuple[int, int]]:
    """The shapes of the layers that get adapters: those named so, or all but the output head."""
    return [
        sizes
        for name, sizes in shape.linears.items()
        if name != shape.head and (targets is None or name.removesuffix(".weight").rpartition(".")[2] in targets)
    ]


def _process(role: str, parts: Iterable[Part], *, torch: bool = True) -> Process:
    parts = tuple(parts)
    contexts = [
        _fixed("CUDA", CUDA_CONTEXT, device)
        for device in dict.fromkeys(p.device for p in parts)
        if device.startswith("cuda")
    ]
    return Process(role, (_fixed("the process itself", TORCH_PROCESS if torch else PLAIN_PROCESS), *parts, *contexts))


def _weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    return _item_bytes(config) * shape.parameters


def _item_bytes(config: RunConfig) -> int:
    return ITEM_BYTES[config.model.dtype]


def _fixed(name: str, size: int, device: str = HOST) -> Part:
    return Part(name, size, size, device)


def _memory_of(device: str) -> str:
    """The device whose memory it computes in, under one name: Apple's GPUs have the host's, `cuda` is the first."""
    return {"mps": HOST, "cuda": "cuda:0"}.get(device, device)

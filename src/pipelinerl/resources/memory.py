"""Predicts the memory of a run before it starts, and refuses a run that can't fit into the machine, with the numbers.

A prediction is an upper bound for each process, from the run file and the model's sizes. Uses of a few percent are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.resources.machine import Memory, memory_of
from pipelinerl.resources.roles import PREPROCESSING, TRAINING, generation_roles, on_gpus, rank_roles, server_roles
from pipelinerl.resources.shape import ModelShape, shape_of

HOST = "cpu"
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
BETWEEN, REFERENCE = "weights between processes", "reference model"
TORCH_PROCESS = 450 << 20
"""Bytes of Python with torch and transformers imported, without a model (measured, CPU)."""
CUDA_CONTEXT = 500 << 20
"""Bytes of a GPU that a process takes before it allocates anything."""
LOGITS_AT_ONCE, HEAD_CHUNK = 1 << 28, 1024
"""Those of `trainer.logprobs`, for `trainer.head_chunk: auto`."""
ALLOCATOR = 1.15
"""Factor for the allocator's gaps between buffers that are allocated and freed all the time (measured, glibc)."""
VLLM, VLLM_SHARE = "vLLM", 0.92
"""Its weights, KV cache and activations, and the share of a GPU that it takes for them by default."""
ADVICE = {
    "activations": "lower trainer.micro_batch_tokens, or set trainer.gradient_checkpointing to true",
    "logits": "lower trainer.micro_batch_tokens",
    "KV cache": "lower engine.slots or engine.max_length",
    "Adam's moments": "set model.lora to {}, or raise trainer.ranks to use more GPUs",
    "gathered weights": "set trainer.reshard_after_forward to true",
    REFERENCE: "set trainer.kl_coefficient to 0",
}
"""What lowers a use of memory."""


class Use(NamedTuple):
    """`size` bytes of memory that the process `role` takes on `device` (`cpu`, or a torch device).

    `varies`: it takes less while sequences are short. The weights in transfer are of all processes: their role is `BETWEEN`.
    """

    name: str
    size: int
    device: str = HOST
    varies: bool = False
    role: str = BETWEEN


# ---- prediction


def predict(config: RunConfig, shape: ModelShape, gpus: Mapping[str, Sequence[int]] | None = None) -> list[Use]:
    """The peak memory of each process of the run, on the GPUs of its machine that it has in `gpus`, or else as configured.

    A vLLM server on a GPU is there with what its slots need; it takes more, if nothing else is on its GPU. Not included: the
    groups in streams, and processes that the environment starts.
    """
    engine, trainer, size = config.engine, config.trainer, ITEM_BYTES[config.model.dtype] * shape.parameters
    broadcast = config.weights.kind == "collective"
    processes: dict[str, list[Use]] = {}
    if config.launch.kind == "embedded":
        processes["embedded"] = [*_engine(config, shape), *_trainer(config, shape, 0), Use("weights handed over", size)]
    else:
        computing = _engine(config, shape)
        processes |= dict.fromkeys(generation_roles(config), computing if engine.kind == "local" else [])
        processes |= dict.fromkeys(server_roles(config), computing)
        if config.launch.preprocessor == "process":
            reference = size * (shape.teacher or shape.parameters) // shape.parameters * trainer.loads_reference
            processes[PREPROCESSING] = [Use(REFERENCE, reference, trainer.rank_device(0))]
        processes |= {role: _trainer(config, shape, rank) for rank, role in enumerate([TRAINING, *rank_roles(config)])}
    found = []
    for role, uses in processes.items():
        there = [use._replace(role=role) for use in uses if use.size]
        devices = dict.fromkeys(use.device for use in there if use.device != HOST)
        there += [Use("CUDA", CUDA_CONTEXT, device, role=role) for device in devices]
        to = dict(zip(devices, (f"cuda:{number}" for number in (gpus or {}).get(role, ())), strict=False))
        found += [Use("the process itself", TORCH_PROCESS, role=role)]
        found += [use._replace(device=to.get(use.device, use.device)) for use in there]
    if config.launch.kind != "embedded" and not broadcast and not engine.weights_dir:
        moved = 4 * _adapter(config, shape) if config.weights.encoding == "adapter" else size
        found.append(Use("weights in transfer", moved if engine.kind == "local" else 2 * size))  # for servers, two files
    return found


def bytes_by(field: Literal["name", "device", "role"], uses: Sequence[Use]) -> Counter[str]:
    """The sum of the uses with the same value of `field`."""
    sizes: Counter[str] = Counter()
    for use in uses:
        sizes[getattr(use, field)] += use.size
    return sizes


def _engine(config: RunConfig, shape: ModelShape) -> list[Use]:
    """An engine, or a server with one. Of vLLM on a GPU, only the sum of weights and of the rest on each GPU are known."""
    engine, item = config.engine, ITEM_BYTES[config.model.dtype]
    device = "cuda:0" if engine.device == "cuda" else engine.device
    length, size = shape.slot_length(engine.max_length), item * shape.parameters
    width = 3 * shape.feed_forward + 4 * shape.hidden + 4 * shape.query_width
    activations = min(engine.prefill_tokens, engine.slots * length) * width * item + 4 * engine.slots * shape.vocabulary * 4
    head = 4 * shape.vocabulary * shape.hidden * (item != 4 and config.model.head_dtype is not None)
    packed = item * sum(map(prod, shape.linears.values())) if engine.device == "cpu" and item == 4 else 0
    uses = [
        Use("weights", size, device),
        Use(
            "weights without adapter",
            item * sum(map(prod, _adapted(shape))) * (config.weights.encoding == "adapter"),
            device,
        ),
        Use("KV cache", engine.slots * (shape.kv_width * length * item + shape.state * 4), device),  # states are in float32
        Use("activations", activations, device, varies=True),
        Use("packed weights", packed, varies=True),  # in the layout of the kernels, if the forward can be exported
        Use("head in float32", head, device),
    ]
    staged = int(engine.kind != "local")  # an update of a server, as it arrives
    if config.weights.kind == "collective":
        staged = {"full": 1, "delta": 2, "adapter": 0}[config.weights.encoding]
    if engine.kind == "vllm" and device != HOST:
        workers, first = engine.vllm_workers, int(device.partition(":")[2])
        sizes = [(size // workers, False), (sum(use.size for use in uses[1:]) // workers, True)]
        uses = [Use(VLLM, part, f"cuda:{first + number}", varies) for number in range(workers) for part, varies in sizes]
        staged *= config.weights.kind == "collective"
    return [*uses, Use("staged weights", staged * size, device)]


def _trainer(config: RunConfig, shape: ModelShape, rank: int) -> list[Use]:
    """One rank: its rows of weights, gradients and the optimizer's state, and what a micro-batch adds.

    Activations are coarse: models differ. Per token, a layer of the usual decoder keeps 7 x hidden for the backward pass
    (inputs and outputs of its two norms, of its projections and of its residual sums), 4 x query width (queries, keys and
    values as attention uses them, and its output), and 4 x the MLP's width (between the MLP's products). With gradient
    checkpointing it keeps the input of each layer, and all of this for one layer.
    """
    trainer, item, lora, ranks = config.trainer, ITEM_BYTES[config.model.dtype], config.model.lora, config.trainer.ranks
    device, size, rows = trainer.rank_device(rank), item * shape.parameters, -(-shape.parameters // ranks)
    adapted = _adapted(shape)
    trained = rows if lora is None else _adapter(config, shape)
    alone, sharded = lora is None and ranks == 1, lora is None and ranks > 1
    # A layer is gathered while the one before it computes. Embedding and head stay gathered, and their gradients.
    ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = max(0, shape.parameters - ends) // shape.layers
    gathered = item * (ends + 2 * layer) if trainer.reshard_after_forward else size
    gathered += (item + 5) * (ends + layer) * sharded  # as computed, joined in float32 to be sent, and what comes back
    tokens = min(trainer.micro_batch_tokens, -(-trainer.batch_size // ranks) * shape.slot_length(config.engine.max_length))
    kept_of_layer = 7 * shape.hidden + 4 * shape.query_width + 4 * shape.feed_forward
    # Norms are computed in float32: with a narrower type, their inputs and outputs exist a second time.
    kept_of_layer = item * kept_of_layer + 4 * 4 * shape.hidden * (item != 4)
    inputs = item * shape.layers * shape.hidden
    kept = inputs + kept_of_layer if trainer.gradient_checkpointing else shape.layers * kept_of_layer
    published = size if lora is None else item * sum(map(prod, adapted))  # merged copies of the layers with adapters
    refers = trainer.loads_reference and config.launch.preprocessor != "process" and bool(trainer.teacher or lora is None)
    sent = {"full": 1, "delta": 3, "adapter": 0}[config.weights.encoding] * (config.weights.kind == "collective")
    head = 4 * shape.vocabulary * shape.hidden * (item != 4)
    # The logits of a micro-batch; or those of a chunk, with two temporaries, and the head's gradient in float32.
    item_of_logits, chunk, every = 4 if config.model.head_dtype else item, trainer.head_chunk, tokens * shape.vocabulary
    logits = every * item_of_logits
    if chunk != 0 and (chunk != "auto" or every > LOGITS_AT_ONCE):
        chunked = min(HEAD_CHUNK if chunk == "auto" else chunk, tokens) * shape.vocabulary * (item_of_logits + 2 * 4)
        chunked += head * (lora is None)
        # Fewer tokens may be sampled: their logits may be below the limit.
        logits = max(chunked, LOGITS_AT_ONCE * item_of_logits * (chunk == "auto"))
    return [
        Use("weights", (4 if sharded else item) * rows, device),  # ranks have the master copy
        Use("master weights in float32", (4 + item) * trained * (alone and item != 4), device),  # and gradients as computed
        Use("gradients", 4 * trained * (1 + 2 * trainer.gradient_cosine), device),  # the last step's, and a copy
        Use("Adam's moments", 8 * trained, device),
        Use("gathered weights", gathered * (ranks > 1), device),
        Use("weights to be published", published * (rank == 0 and not alone), HOST if ranks > 1 else device),
        Use("activations", int(ALLOCATOR * tokens * kept), device, varies=True),
        Use("logits", logits, device, varies=True),
        Use("head in float32", head * (config.model.head_dtype is not None), device),  # made for each forward
        Use(REFERENCE, -(-item * (shape.teacher or shape.parameters) // ranks) * refers, device),
        Use("staged weights", sent * size * (rank == 0), device),
    ]


def _adapted(shape: ModelShape) -> list[tuple[int, int]]:
    """The sizes of the layers that `model.lora` gives adapters by default."""
    return [sizes for name, sizes in shape.linears.items() if name != shape.head]


def _adapter(config: RunConfig, shape: ModelShape) -> int:
    """How many numbers its matrices have."""
    return config.model.lora.rank * sum(map(sum, _adapted(shape))) if config.model.lora else 0


# ---- judgement: the prediction against a machine


class MemoryCheck(NamedTuple):
    """What the start of a run shows: a line with the sums, and one for each warning. `uses` is empty if none is known."""

    lines: list[str]
    uses: Sequence[Use] = ()


def check_memory(config: RunConfig) -> MemoryCheck:
    """Read the model's sizes, predict and judge. A run on several machines is only predicted.

    Raises UserError for a run that can't fit or has too few GPUs, ModelLoadError if there is no model.
    """
    if (shape := shape_of(config)) is None:
        return MemoryCheck([f"memory: not predicted (the sizes of model {config.model.path!r} are not known here)"])
    if config.launch.kind == "processes" and on_gpus(config):
        from pipelinerl.resources.placement import place_here  # noqa: PLC0415 - only on GPUs

        return judge(predict(config, shape, {place.role: place.gpus for place in place_here(config)[0]}))
    uses = predict(config, shape)
    if config.launch.kind == "ray":
        return MemoryCheck([f"memory: up to {sum(use.size for use in uses) / 1e9:.1f} GB on all machines"], uses)
    return judge(uses)


def judge(uses: Sequence[Use], memory_of: Callable[[str], Memory | None] = memory_of) -> MemoryCheck:
    """Compare the prediction with the memory of the machine.

    Raises UserError only for a run that can't fit: if it exceeds the total memory of a device while all sequences are short.
    Warns if it exceeds the memory that other processes leave now, or may do so with long sequences.
    """
    sums, warnings = [], []
    for device in sorted({use.device for use in uses}):
        here, memory = [use for use in uses if use.device == device], memory_of(device)
        on = "" if device == HOST else f" on {device}"
        most, least = sum(use.size for use in here), sum(use.size for use in here if not use.varies)
        sums.append(f"up to {most / 1e9:.1f} GB{f' of {memory.total / 1e9:.1f} GB' if memory else ''}{on}")
        if memory is None or most <= memory.free:
            continue
        largest = bytes_by("name", here).most_common(5)
        table = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in largest)
        advice = [*dict.fromkeys(ADVICE[name] for name, _ in largest if name in ADVICE), "set model.dtype to bfloat16"]
        needs = f"needs at least {least / 1e9:.1f} GB of memory{on}"
        if least <= memory.free:
            needs = f"may need {most / 1e9:.1f} GB of memory{on} if prompts and answers are as long as they may be"
        line = (
            f"the run {needs}, and there are {memory.total / 1e9:.1f} GB, of which {memory.free / 1e9:.1f} GB are free now "
        )
        line += f"({table}); {'; '.join(advice)}; or take a smaller model"
        if least > memory.total:
            raise UserError(line)
        warnings.append(f"warning: {line}")
    by_role = ", ".join(f"{role} {size / 1e9:.1f} GB" for role, size in bytes_by("role", uses).items())
    return MemoryCheck([f"memory: {' and '.join(sums)} ({by_role})", *warnings], uses)


def share_for_vllm(config: RunConfig, memory_of: Callable[[str], Memory | None] = memory_of) -> float | None:
    """The share of a GPU's memory, from 0 to 1, that the rest of the run leaves to each vLLM server on it.

    For a server process, which sees only its GPUs. None if nothing else is there, or if not all sizes are known.
    """
    shape, memory, numbered = shape_of(config), memory_of("cuda:0"), ":" in config.engine.device
    if shape is None or memory is None:
        return None
    servers = server_roles(config)[: None if numbered else 1]  # without a number, each process has GPUs of its own
    with_trainer = numbered and ":" in config.trainer.device
    sharing = [use for use in predict(config, shape) if with_trainer or use.role in servers]
    weights = bytes_by("device", [use for use in sharing if use.name == VLLM and not use.varies])
    rest = bytes_by("device", [use for use in sharing if use.name != VLLM])
    others = max(rest[gpu] for gpu in weights)
    left = max(memory.total - others, *weights.values())
    return None if others <= CUDA_CONTEXT else min(VLLM_SHARE, left / memory.total / len(servers))

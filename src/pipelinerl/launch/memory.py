"""Predicts the memory of a run before it starts, and refuses a run that can't fit into the machine, with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.checks import vllm_workers
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.launch.machine import Memory, device_memory, host_memory
from pipelinerl.launch.roles import PREPROCESSING, TRAINING, generation_roles, rank_roles, server_roles
from pipelinerl.models.folder import find_model
from pipelinerl.models.shape import ModelShape, read_shape

# ---- prediction: pure functions of the configuration and the model's sizes
# Activations and logits depend on how many tokens a forward pass has, so a part has two bounds: `most` for the longest
# possible prompts and answers, `least` for answers of a quarter of that length. Other parts have equal bounds.

HOST = "cpu"
BETWEEN = "weights between processes"

MIB = 1 << 20
TORCH_PROCESS = 450 * MIB
"""Python with torch and transformers imported, without a model (measured, CPU)."""
PLAIN_PROCESS = 90 * MIB
CUDA_CONTEXT = 500 * MIB
"""GPU memory that a process takes before it allocates anything."""
PACK_FROM = 1 << 16
"""A CPU engine keeps a second copy of matrices with at least this many elements (`engine.flat.PACK_FROM`)."""
LOGIT_CHUNKS = 3 * (1 << 22) * 4
"""Bytes of temporaries for log-probabilities, computed in chunks of `trainer.logprobs.CHUNK_ELEMENTS`."""
LOGITS_AT_ONCE, HEAD_CHUNK = 1 << 28, {"cpu": 128, "cuda": 1024}
"""Those of `trainer.logprobs`, for `trainer.head_chunk`."""
WRITTEN_AT_ONCE = 3 << 26
"""Host memory through which a GPU's tensors go to a file, in parts of `models.transfers.PART` bytes."""
VLLM, VLLM_SHARE = "vLLM", 0.92
"""Its weights, KV cache and activations, and the share of a GPU that it takes for them by default."""
SHORT_ANSWERS = 4
ALLOCATOR = 1.15
"""Factor for the allocator's gaps between buffers that are allocated and freed all the time (measured, glibc)."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Part(NamedTuple):
    """One use of memory: `least` to `most` bytes on `device` (`cpu`, or a torch device)."""

    name: str
    least: int
    most: int
    device: str = HOST


class Process(NamedTuple):
    """The memory of one process by use. For role `BETWEEN`: what processes share, the weights in transfer to engines."""

    role: str
    parts: tuple[Part, ...]

    def bytes_on(self, device: str, *, least: bool = False) -> int:
        return sum(part.least if least else part.most for part in self.parts if part.device == device)


class Prediction(NamedTuple):
    """For the model of this `shape`, and this longest prompt. `gpus`: those of each process, if they are known."""

    processes: tuple[Process, ...]
    shape: ModelShape | None = None
    longest_prompt: int | None = None
    gpus: Mapping[str, Sequence[int]] = {}

    def on(self, gpus: Mapping[str, Sequence[int]]) -> Prediction:
        """That of one machine: of the processes in `gpus`, each on these GPUs. Without any, the same as before."""
        processes = []
        for process in self.processes if gpus else ():
            if process.role in gpus:
                before = dict.fromkeys(part.device for part in process.parts if part.device != HOST)
                placed = dict(zip(before, (f"cuda:{number}" for number in gpus[process.role]), strict=False))
                parts = (part._replace(device=placed.get(part.device, part.device)) for part in process.parts)
                processes.append(Process(process.role, tuple(parts)))
        return self._replace(processes=tuple(processes), gpus=gpus) if gpus else self

    @property
    def devices(self) -> list[str]:
        """`cpu` first."""
        found = dict.fromkeys(part.device for process in self.processes for part in process.parts)
        return sorted(found, key=lambda device: (device != HOST, device))

    def bytes_on(self, device: str, *, least: bool = False) -> int:
        return sum(process.bytes_on(device, least=least) for process in self.processes)

    def largest(self, device: str) -> list[tuple[str, int]]:
        """Uses of `device` summed over all processes, the largest first."""
        uses: Counter[str] = Counter()
        for process in self.processes:
            for part in process.parts:
                if part.device == device:
                    uses[part.name] += part.most
        return uses.most_common()


def predict(config: RunConfig, shape: ModelShape, longest_prompt: int | None = None) -> Prediction:
    """The peak memory of each process of the run. `longest_prompt` is in tokens, None if not known (or with several turns).

    A vLLM server on a GPU is there with what its slots need; it takes more, if nothing else is on its GPU. Not included: the
    groups in streams, and processes that the environment starts.
    """
    if config.launch.kind == "embedded":
        parts = [*_engine(config, shape), *_trainer(config, shape, longest_prompt), *_reference(config, shape)]
        parts.append(_fixed("weights handed over", _weight_bytes(config, shape)))
        return Prediction((_process("embedded", parts),), shape, longest_prompt)
    with_model = config.engine.kind == "local"
    generation = [*_engine(config, shape), *_staging(config, shape, config.engine.device, copies=1)] if with_model else []
    processes = [_process(role, generation) for role in generation_roles(config)]
    processes += [_process(role, _server(config, shape)) for role in server_roles(config)]
    reference = _reference(config, shape)
    copies = 2 if config.weights.encoding == "delta" else 1
    training = [*_trainer(config, shape, longest_prompt), *_staging(config, shape, config.trainer.device, copies=copies)]
    if config.launch.preprocessor == "process":
        processes.append(_process(PREPROCESSING, reference, torch=bool(reference)))
    else:
        training += reference
    processes.append(_process(TRAINING, training))
    for rank, role in enumerate(rank_roles(config), start=1):
        own = _reference(config, shape, rank) if config.launch.preprocessor == "with_trainer" else []
        processes.append(_process(role, [*_trainer(config, shape, longest_prompt, rank), *own]))
    if between := _between(config, shape):
        processes.append(Process(BETWEEN, (_fixed("weights in transfer", between),)))
    return Prediction(tuple(processes), shape, longest_prompt)


def activation_bytes(shape: ModelShape, tokens: int, *, item_bytes: int, checkpointing: bool) -> int:
    """Bytes that a training forward over `tokens` keeps for the backward pass, without logits. Coarse: models differ.

    Per token, a layer of the usual decoder keeps 7 x hidden (inputs and outputs of its two norms, of its projections and of
    its residual sums), 4 x query width (queries, keys and values as attention uses them, and its output), and 4 x the MLP's
    width (between the MLP's products). With `checkpointing`: the input of each layer, and all of this for one layer.
    """
    layer = 7 * shape.hidden + 4 * shape.query_width + 4 * shape.feed_forward
    floats = shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer
    # Norms are computed in float32: with a narrower type, their inputs and outputs exist a second time.
    narrow = 0 if item_bytes == 4 else 4 * 4 * shape.hidden * (1 if checkpointing else shape.layers)
    return int(ALLOCATOR * tokens * (floats * item_bytes + narrow))


def logit_bytes(config: RunConfig, shape: ModelShape, tokens: int) -> int:
    """The logits of a micro-batch; or those of a chunk, with two temporaries, and the head's gradient in float32."""
    item, chunk = 4 if config.model.head_dtype else _item_bytes(config), config.trainer.head_chunk
    all_logits = tokens * shape.vocabulary
    if chunk == 0 or (chunk == "auto" and all_logits <= LOGITS_AT_ONCE):
        return all_logits * item
    rows = HEAD_CHUNK.get(config.trainer.device.partition(":")[0], HEAD_CHUNK["cpu"]) if chunk == "auto" else chunk
    gradient = 4 * shape.vocabulary * shape.hidden if config.model.lora is None and _item_bytes(config) != 4 else 0
    in_chunks = min(rows, tokens) * shape.vocabulary * (item + 2 * 4) + gradient
    # Fewer tokens may be sampled: their logits may be below the limit.
    return in_chunks if chunk != "auto" else max(in_chunks, LOGITS_AT_ONCE * item)


def kv_bytes(shape: ModelShape, *, slots: int, length: int, item_bytes: int) -> int:
    """Keys and values of all slots at full length, and recurrent states, which are in float32."""
    return slots * (shape.kv_width * length * item_bytes + shape.state * 4)


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
        parts.append(Part("packed weights", 0, packed_bytes(shape)))  # 0 if the model's forward can't be exported as a graph
    return [*parts, *_float32_head(config, shape, device)]


def _trainer(config: RunConfig, shape: ModelShape, longest_prompt: int | None, rank: int = 0) -> list[Part]:
    trainer, item, device = config.trainer, _item_bytes(config), _memory_of(_device_of(config, rank))
    parts = _sharded_state(config, shape, rank, device) if trainer.ranks > 1 else _whole_state(config, shape, device)
    longest = shape.slot_length(config.engine.max_length)
    if longest_prompt is not None:
        longest = min(longest, longest_prompt + config.actor.max_tokens)
    samples = -(-trainer.batch_size // trainer.ranks)
    most = min(trainer.micro_batch_tokens, samples * longest)
    short = min(most, samples * config.actor.max_tokens) // SHORT_ANSWERS
    checkpointing = trainer.gradient_checkpointing
    least_bytes, most_bytes = (
        activation_bytes(shape, tokens, item_bytes=item, checkpointing=checkpointing) for tokens in (short, most)
    )
    parts.append(Part("activations", least_bytes, most_bytes, device))
    parts.append(Part("logits", logit_bytes(config, shape, short), logit_bytes(config, shape, most) + LOGIT_CHUNKS, device))
    parts += _float32_head(config, shape, device)
    return parts


def _whole_state(config: RunConfig, shape: ModelShape, device: str) -> list[Part]:
    """What a trainer of one process keeps between micro-batches: weights, gradients and the optimizer's state."""
    item, lora, trained = _item_bytes(config), config.model.lora, shape.parameters
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
    return parts + _written(device)


def _sharded_state(config: RunConfig, shape: ModelShape, rank: int, device: str) -> list[Part]:
    """The same for one rank. Its rows of the weights are in float32, and are the master copy."""
    item, lora, ranks = _item_bytes(config), config.model.lora, config.trainer.ranks
    ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = max(0, shape.parameters - ends) // shape.layers
    # A unit is gathered while the one before it computes. Embedding and head stay gathered.
    arriving = ends + 2 * layer
    gathered = arriving if config.trainer.reshard_after_forward else shape.parameters
    share = -(-shape.parameters // ranks)
    if lora is None:
        trained, rows = share, 4 * share
        # As computed, and at most at once: joined in float32 to be sent, and the rows that come back.
        summed = ends + layer
        most = (item + 4) * summed + 4 * summed // ranks
        parts = [Part("gradients of gathered weights", item * summed, most, device)]
    else:
        adapted = _adapted(shape, lora.target_modules)
        trained, rows = sum(lora.rank * (n + m) for n, m in adapted), item * share
        parts = [_fixed("adapters", 4 * trained, device)]
        if rank == 0:
            parts.append(_fixed("merged weights", item * sum(map(prod, adapted))))
    parts += [
        _fixed("weights", rows, device),
        _fixed("gathered weights", item * gathered, device),
        Part("buffers of gathering", 0, item * arriving, device),  # they arrive joined, and are then copied
        _fixed("gradients", 4 * trained, device),
        _fixed("Adam's moments", 8 * trained, device),
    ]
    published = [_fixed("all weights, to be published", _weight_bytes(config, shape))] if rank == 0 else []
    return parts + _written(device) + published


def _written(device: str) -> list[Part]:
    return [_fixed("a checkpoint as it is written", WRITTEN_AT_ONCE)] if device.startswith("cuda") else []


def _device_of(config: RunConfig, rank: int) -> str:
    """GPUs are counted from the configured one on."""
    kind, _, first = config.trainer.device.partition(":")
    return f"{kind}:{int(first or 0) + rank}" if kind == "cuda" else kind


def _float32_head(config: RunConfig, shape: ModelShape, device: str) -> list[Part]:
    """The float32 copy of a narrower model's output head: an engine keeps one, a trainer makes one for each forward."""
    if config.model.head_dtype is None or _item_bytes(config) == 4:
        return []
    return [_fixed("head in float32", 4 * shape.vocabulary * shape.hidden, device)]


def _reference(config: RunConfig, shape: ModelShape, rank: int = 0) -> list[Part]:
    """The frozen reference model of a KL penalty, or the rows of it that a rank has.

    In a trainer with adapters it is free: the base model with adapters switched off.
    """
    apart = config.launch.preprocessor == "process"
    if config.trainer.kl_coefficient == 0 or (config.model.lora is not None and not apart):
        return []
    holders = 1 if apart else config.trainer.ranks
    device = _memory_of(_device_of(config, rank))
    return [_fixed("reference model", -(-_weight_bytes(config, shape) // holders), device)]


def _server(config: RunConfig, shape: ModelShape) -> list[Part]:
    size, memory = _weight_bytes(config, shape), _memory_of(config.engine.device)
    update = [_fixed("an incoming weight update", size, memory), *_delta(config, size, memory)]
    if config.engine.kind != "vllm" or memory == HOST:
        return [*_engine(config, shape), *update]
    workers, first = vllm_workers(config.engine), int(memory.partition(":")[2])
    most = sum(part.most for part in _engine(config, shape))  # with less, it fills fewer slots
    parts = [Part(VLLM, size // workers, most // workers, f"cuda:{first + number}") for number in range(workers)]
    return parts if config.weights.kind == "shared" else [*parts, *update]


def share_for_vllm(config: RunConfig, machine: Machine = device_memory) -> float | None:
    """The share of a GPU's memory, from 0 to 1, that the rest of the run leaves to each vLLM server on it.

    For a server process, which sees only its GPUs. None if nothing else is there, or if not all sizes are known.
    """
    shape, memory, numbered = shape_of(config), machine("cuda:0"), ":" in config.engine.device
    if shape is None or memory is None:
        return None
    servers = server_roles(config)[: None if numbered else 1]  # without a number, each process has GPUs of its own
    both = numbered and ":" in config.trainer.device
    processes = [process for process in predict(config, shape).processes if both or process.role in servers]
    parts = [part for process in processes for part in process.parts]
    gpus = {part.device for part in parts if part.name == VLLM}
    others = max(sum(part.most for part in parts if part.device == gpu and part.name != VLLM) for gpu in gpus)
    left = memory.total - others, sum(part.least for part in parts if part.name == VLLM) // len(gpus)
    return None if others <= CUDA_CONTEXT else min(VLLM_SHARE, max(left) / memory.total / len(servers))


def _staging(config: RunConfig, shape: ModelShape, device: str, *, copies: int) -> list[Part]:
    """The sender and each receiver of a broadcast keep a copy of the weights; the sender of deltas keeps two."""
    if config.weights.kind == "shared":
        return []
    size, memory = _weight_bytes(config, shape), _memory_of(device)
    return [_fixed("staged weights", copies * size, memory), *_delta(config, size, memory)]


def _delta(config: RunConfig, size: int, device: str) -> list[Part]:
    return [Part("a delta", 0, size, device)] if config.weights.encoding == "delta" else []


def _between(config: RunConfig, shape: ModelShape) -> int:
    """The buffer of shared weights, and two weight files in shared memory for engine servers on this machine."""
    if config.weights.kind != "shared":
        return 0
    files = config.engine.kind != "local" and config.engine.weights_dir is None
    return (3 if files else 1) * _weight_bytes(config, shape)


def _adapted(shape: ModelShape, targets: Sequence[str] | None) -> list[tuple[int, int]]:
    """The shapes of the layers that get adapters: those named in `targets`, or by default all but the output head."""
    return [
        sizes
        for name, sizes in shape.linears.items()
        if name != shape.head and (targets is None or name.removesuffix(".weight").rpartition(".")[2] in targets)
    ]


def _process(role: str, parts: Iterable[Part], *, torch: bool = True) -> Process:
    parts = tuple(parts)
    gpus = dict.fromkeys(part.device for part in parts if part.device.startswith("cuda"))
    itself = _fixed("the process itself", TORCH_PROCESS if torch else PLAIN_PROCESS)
    return Process(role, (itself, *parts, *(_fixed("CUDA", CUDA_CONTEXT, gpu) for gpu in gpus)))


def _weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    return _item_bytes(config) * shape.parameters


def _item_bytes(config: RunConfig) -> int:
    return ITEM_BYTES[config.model.dtype]


def _fixed(name: str, size: int, device: str = HOST) -> Part:
    return Part(name, size, size, device)


def _memory_of(device: str) -> str:
    """The device whose memory `device` uses: `cuda` is `cuda:0`."""
    return "cuda:0" if device == "cuda" else device


# ---- judgement: the prediction against a machine

Machine = Callable[[str], Memory | None]
"""The memory of a device (`cpu` or a CUDA device), None if it is not known."""
SHOWN_USES = 5


class Judgement(NamedTuple):
    """`line` is shown at the start of the run; each of `warnings` is one line on what may go wrong."""

    line: str
    warnings: Sequence[str] = ()
    prediction: Prediction | None = None

    def report(self) -> list[str]:
        """A table of every use of memory, as lines of text."""
        processes = self.prediction.processes if self.prediction else ()
        table = [
            f"  {process.role:<26} {part.name:<28} {_range(part.least, part.most):>20}  {part.device}"
            for process in processes
            for part in process.parts
        ]
        return [self.line, *table, *self.lines[1:]]

    @property
    def lines(self) -> list[str]:
        """The lines shown at the start of a run."""
        return [self.line, *(f"warning: {warning}" for warning in self.warnings)]

    @property
    def predicted_bytes(self) -> dict[str, int]:
        """The most that each process takes, summed over devices; empty if it is not known."""
        processes = self.prediction.processes if self.prediction else ()
        return {process.role: sum(part.most for part in process.parts) for process in processes}


def check_memory(config: RunConfig, longest_prompt: int | None = None) -> Judgement:
    """Read the model's sizes, predict and judge. `longest_prompt` is in tokens; None if it is not known.

    A run on several machines is only predicted: they are judged when they are known (`judge_machine`).

    Raises UserError for a run that can't fit or has too few GPUs, ModelLoadError if there is no model.
    """
    shape = shape_of(config)
    if shape is None:
        return Judgement(f"memory: not predicted (the sizes of model {config.model.path!r} are not known here)")
    prediction = predict(config, shape, longest_prompt)
    if config.launch.kind == "ray":
        most = gigabytes(sum(prediction.bytes_on(device) for device in prediction.devices))
        return Judgement(f"memory: up to {most} on all machines", prediction=prediction)
    gpus: dict[str, tuple[int, ...]] = {}
    if config.launch.kind == "processes" and on_gpus(config):
        from pipelinerl.launch.hosts.placement import place_here  # noqa: PLC0415 - only on GPUs

        gpus = {BETWEEN: ()} | {place.role: place.gpus for place in place_here(config)[0]}
    return judge(config, prediction.on(gpus), this_machine)


def on_gpus(config: RunConfig) -> bool:
    """Whether any of the processes computes on a CUDA device."""
    return config.engine.device.startswith("cuda") or config.trainer.device.startswith("cuda")


def judge_machine(
    config: RunConfig, prediction: Prediction, gpus: Mapping[str, Sequence[int]], machine: Machine
) -> Judgement:
    """Judge one of several machines, on which each process of `gpus` has these GPUs. Raises UserError as `judge` does."""
    return judge(config, prediction.on(gpus), machine)


def shape_of(config: RunConfig) -> ModelShape | None:
    """The sizes of the run's model: a folder, or a hub id whose files are all downloaded; None if they are not known.

    Raises ModelLoadError if there is no model.
    """
    found = find_model(config.model.path)
    if Path(found).is_dir():
        return read_shape(Path(found))
    from pipelinerl.models.hub import downloaded  # noqa: PLC0415 - folders don't need it

    folder = downloaded(found)
    try:
        return None if folder is None else read_shape(Path(folder))
    except ModelLoadError:  # missing files are downloaded when the model is loaded
        return None


def judge(config: RunConfig, prediction: Prediction, machine: Machine) -> Judgement:
    """Compare the prediction with the memory of the machine.

    Raises UserError only for a run that can't fit: if `least` exceeds the total memory of a device. Warns if `most` exceeds
    the total memory, or the memory that other processes leave now.
    """
    lines, warnings = [], []
    for device in prediction.devices:
        memory, on = machine(device), "" if device == HOST else f" on {device}"
        most, least = prediction.bytes_on(device), prediction.bytes_on(device, least=True)
        if memory is None:
            lines.append(f"up to {gigabytes(most)}{on}")
            continue
        total = gigabytes(memory.total)
        lines.append(f"up to {gigabytes(most)} of {total}{on}")
        free = memory.total if memory.available is None else memory.available
        if most <= min(free, memory.total):
            continue
        details, needs = _details(config, prediction, device, memory), f"the run may need {gigabytes(most)} of memory{on}"
        if least > memory.total:
            raise UserError(f"the run needs at least {gigabytes(least)} of memory{on}, and there are {total} {details}")
        if most > memory.total:
            warnings.append(f"{needs} if prompts and answers are as long as they may be, and there are {total} {details}")
        else:
            only = f"only {gigabytes(free)} are free now: other processes use the rest"
            warnings.append(f"{needs}, and {only} {details}")
    parts = ", ".join(
        f"{process.role} {gigabytes(sum(part.most for part in process.parts))}" for process in prediction.processes
    )
    return Judgement(f"memory: {' and '.join(lines)} ({parts})", warnings, prediction)


def this_machine(device: str) -> Memory | None:
    return host_memory() if device == HOST else device_memory(device)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _range(least: int, most: int) -> str:
    return f"{most / 1e6:.0f} MB" if least == most else f"{least / 1e6:.0f} to {most / 1e6:.0f} MB"


def _details(config: RunConfig, prediction: Prediction, device: str, memory: Memory) -> str:
    """The largest uses of memory, and what to change."""
    from pipelinerl.launch.fitting import remedy  # noqa: PLC0415 - only for a run that may not fit

    table = ", ".join(f"{name} {gigabytes(size)}" for name, size in prediction.largest(device)[:SHOWN_USES])
    return f"({table}); {remedy(config, prediction, device, memory, predict)}"

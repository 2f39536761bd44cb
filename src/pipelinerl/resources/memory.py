"""Predicts the memory of a run before it starts, and refuses a run that can't fit into the machine, with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.checks import vllm_workers
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.models.folder import find_model
from pipelinerl.models.shape import ModelShape, read_shape
from pipelinerl.resources.machine import Memory, memory_of
from pipelinerl.resources.roles import PREPROCESSING, TRAINING, generation_roles, rank_roles, server_roles

# ---- prediction: pure functions of the configuration and the model's sizes

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
VLLM, VLLM_SHARE = "vLLM", 0.92
"""Its weights, KV cache and activations, and the share of a GPU that it takes for them by default."""
ALLOCATOR = 1.15
"""Factor for the allocator's gaps between buffers that are allocated and freed all the time (measured, glibc)."""


class Use(NamedTuple):
    """`size` bytes of memory on `device` (`cpu`, or a torch device). `varies`: it takes less while sequences are short."""

    name: str
    size: int
    device: str = HOST
    varies: bool = False


Uses = Sequence[Use]
MemoryOf = Callable[[str], Memory | None]


class Prediction(dict[str, Uses]):
    """The memory of each process, by role. `BETWEEN`: what processes share, the weights in transfer to engines."""

    def on(self, gpus: Mapping[str, Sequence[int]]) -> Prediction:
        """The prediction for one machine: for the processes in `gpus`, each on these GPUs."""
        found = Prediction()
        for role in filter(gpus.__contains__, self):
            before = dict.fromkeys(use.device for use in self[role] if use.device != HOST)
            placed = dict(zip(before, (f"cuda:{number}" for number in gpus[role]), strict=False))
            found[role] = [use._replace(device=placed.get(use.device, use.device)) for use in self[role]]
        return found

    def uses_on(self, device: str) -> Uses:
        return [use for uses in self.values() for use in uses if use.device == device]

    def bytes_on(self, device: str, *, least: bool = False) -> int:
        """With `least`: while all sequences are short."""
        return sum(use.size for use in self.uses_on(device) if not (least and use.varies))

    @property
    def devices(self) -> list[str]:
        """`cpu` first."""
        found = {use.device for uses in self.values() for use in uses}
        return sorted(found, key=lambda device: (device != HOST, device))

    @property
    def sizes(self) -> dict[str, int]:
        """The most that each process takes, summed over devices."""
        return {role: sum(use.size for use in uses) for role, uses in self.items()}


def predict(config: RunConfig, shape: ModelShape) -> Prediction:
    """The peak memory of each process of the run.

    A vLLM server on a GPU is there with what its slots need; it takes more, if nothing else is on its GPU. Not included: the
    groups in streams, and processes that the environment starts.
    """
    size, found = _weight_bytes(config, shape), Prediction()
    if config.launch.kind == "embedded":
        uses = [*_engine(config, shape), *_trainer(config, shape, 0), Use("weights handed over", size)]
        return Prediction(embedded=_process(uses))
    here, delta = config.engine.kind == "local", config.weights.encoding == "delta"
    for role in generation_roles(config):
        found[role] = _process([*_engine(config, shape), *_staged(config, size, config.engine.device)] if here else [])
    for role in server_roles(config):
        found[role] = _process([*_server(config, shape)])
    if config.launch.preprocessor == "process":
        reference = _reference(config, shape, 0, holders=1)
        found[PREPROCESSING] = _process(reference, itself=TORCH_PROCESS if reference else PLAIN_PROCESS)
    for rank, role in enumerate([TRAINING, *rank_roles(config)]):
        sent = [] if rank else _staged(config, size, config.trainer.device, copies=1 + delta)
        found[role] = _process([*_trainer(config, shape, rank), *sent])
    if config.weights.kind == "shared" and not config.engine.weights_dir:
        found[BETWEEN] = [Use("weights in transfer", size if here else 2 * size)]  # for engine servers, two files
    return found


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


def _engine(config: RunConfig, shape: ModelShape) -> Iterator[Use]:
    engine, item, device = config.engine, _item_bytes(config), _numbered(config.engine.device)
    length = shape.slot_length(engine.max_length)
    width = 3 * shape.feed_forward + 4 * shape.hidden + 4 * shape.query_width
    tokens = min(engine.prefill_tokens, engine.slots * length)
    yield Use("weights", _weight_bytes(config, shape), device)
    yield Use("KV cache", kv_bytes(shape, slots=engine.slots, length=length, item_bytes=item), device)
    yield Use("activations", tokens * width * item + 4 * engine.slots * shape.vocabulary * 4, device, varies=True)
    if engine.device == "cpu" and item == 4:
        yield Use("packed weights", packed_bytes(shape), varies=True)  # none if the forward can't be exported
    yield from _float32_head(config, shape, device)


def _trainer(config: RunConfig, shape: ModelShape, rank: int) -> Iterator[Use]:
    """One rank: its rows of weights, gradients and the optimizer's state, and what a micro-batch adds."""
    trainer, item, lora, ranks = config.trainer, _item_bytes(config), config.model.lora, config.trainer.ranks
    device = trainer.rank_device(rank)
    trained, rows = -(-shape.parameters // ranks), 4 if ranks > 1 and lora is None else item
    yield Use("weights", -(-rows * shape.parameters // ranks), device)  # ranks have the master copy
    if lora is not None:
        targets = lora.target_modules  # None: all but the output head
        adapted = [
            sizes
            for name, sizes in shape.linears.items()
            if name != shape.head and (targets is None or name.removesuffix(".weight").rpartition(".")[2] in targets)
        ]
        trained = sum(lora.rank * (rows + columns) for rows, columns in adapted)
        yield Use("adapters", 4 * trained, device)  # in float32
        if rank == 0:  # publishing makes merged copies of the layers with adapters
            yield Use("merged weights", item * sum(map(prod, adapted)), HOST if ranks > 1 else device)
    elif ranks == 1 and item != 4:
        yield Use("master weights in float32", (4 + item) * trained, device)  # and a micro-batch's gradients
    yield Use("gradients", 4 * trained, device)
    yield Use("Adam's moments", 8 * trained, device)
    if ranks > 1:
        ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        layer = max(0, shape.parameters - ends) // shape.layers
        # A layer is gathered while the one before it computes. Embedding and head stay gathered.
        gathered = ends + 2 * layer if trainer.reshard_after_forward else shape.parameters
        yield Use("gathered weights", item * gathered, device)
        if lora is None:  # as computed, joined in float32 to be sent, and the rows that come back
            yield Use("gradients of gathered weights", (item + 5) * (ends + layer), device, varies=True)
        if rank == 0:
            yield Use("all weights, to be published", _weight_bytes(config, shape))
    samples = -(-trainer.batch_size // ranks)
    tokens = min(trainer.micro_batch_tokens, samples * shape.slot_length(config.engine.max_length))
    kept = activation_bytes(shape, tokens, item_bytes=item, checkpointing=trainer.gradient_checkpointing)
    yield Use("activations", kept, device, varies=True)
    yield Use("logits", logit_bytes(config, shape, tokens) + LOGIT_CHUNKS, device, varies=True)
    yield from _float32_head(config, shape, device)
    if config.launch.preprocessor != "process" and lora is None:  # with adapters, it is the base model without them
        yield from _reference(config, shape, rank, holders=ranks)


def _float32_head(config: RunConfig, shape: ModelShape, device: str) -> Iterator[Use]:
    """The float32 copy of a narrower model's output head: an engine keeps one, a trainer makes one for each forward."""
    if config.model.head_dtype is not None and _item_bytes(config) != 4:
        yield Use("head in float32", 4 * shape.vocabulary * shape.hidden, device)


def _reference(config: RunConfig, shape: ModelShape, rank: int, holders: int) -> Uses:
    """The frozen reference model of a KL penalty, or the share of it that one of several `holders` has."""
    if config.trainer.kl_coefficient == 0:
        return []
    return [Use("reference model", -(-_weight_bytes(config, shape) // holders), config.trainer.rank_device(rank))]


def _server(config: RunConfig, shape: ModelShape) -> Iterator[Use]:
    size, device = _weight_bytes(config, shape), _numbered(config.engine.device)
    ours = config.engine.kind != "vllm" or device == HOST
    if ours:
        yield from _engine(config, shape)
    else:
        workers, first = vllm_workers(config.engine), int(device.partition(":")[2])
        needed = sum(use.size for use in _engine(config, shape))
        for gpu in (f"cuda:{first + number}" for number in range(workers)):  # with less, it fills fewer slots
            yield Use(VLLM, size // workers, gpu)
            yield Use(VLLM, (needed - size) // workers, gpu, varies=True)
    if ours and config.weights.kind == "shared":
        yield Use("staged weights", size, device)  # an update as it arrives
    yield from _staged(config, size, device)


def _staged(config: RunConfig, size: int, device: str, *, copies: int = 1) -> Uses:
    """The sender and each receiver of a broadcast keep a copy of the weights; the sender of deltas keeps two."""
    if config.weights.kind == "shared":
        return []
    staged = [Use("staged weights", copies * size, _numbered(device))]
    return [*staged, Use("a delta", size, _numbered(device), varies=True)] if config.weights.encoding == "delta" else staged


def _process(uses: Uses, itself: int = TORCH_PROCESS) -> Uses:
    """A process with these uses, with what it takes before it has any."""
    gpus = dict.fromkeys(use.device for use in uses if use.device != HOST)
    return [Use("the process itself", itself), *uses, *(Use("CUDA", CUDA_CONTEXT, gpu) for gpu in gpus)]


def _weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    return _item_bytes(config) * shape.parameters


def _item_bytes(config: RunConfig) -> int:
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


# ---- judgement: the prediction against a machine

SHOWN_USES = 5
ADVICE = {
    "activations": "lower trainer.micro_batch_tokens, or set trainer.gradient_checkpointing to true",
    "logits": "lower trainer.micro_batch_tokens, or set trainer.gradient_checkpointing to true",
    "KV cache": "lower engine.slots or engine.max_length",
    "Adam's moments": "set model.lora to {}, or raise trainer.ranks to use more GPUs",
    "gathered weights": "set trainer.reshard_after_forward to true",
    "reference model": "set trainer.kl_coefficient to 0",
}
"""What lowers a use of memory."""


class MemoryCheck(NamedTuple):
    """`line` is shown at the start of the run; each of `warnings` is one line on what may go wrong.

    `prediction` is empty if the sizes of the model are not known.
    """

    line: str
    warnings: Sequence[str] = ()
    prediction: Prediction = Prediction()

    def report(self) -> list[str]:
        """A table of every use of memory, as lines of text."""
        table = [
            f"  {role:<26} {use.name:<30} {'up to ' * use.varies + f'{use.size / 1e6:.0f} MB':>18}  {use.device}"
            for role, uses in self.prediction.items()
            for use in uses
        ]
        return [self.line, *table, *self.lines[1:]]

    @property
    def lines(self) -> list[str]:
        """The lines shown at the start of a run."""
        return [self.line, *(f"warning: {warning}" for warning in self.warnings)]


def check_memory(config: RunConfig) -> MemoryCheck:
    """Read the model's sizes, predict and judge.

    A run on several machines is only predicted: each machine is judged when it is known.

    Raises UserError for a run that can't fit or has too few GPUs, ModelLoadError if there is no model.
    """
    shape = shape_of(config)
    if shape is None:
        return MemoryCheck(f"memory: not predicted (the sizes of model {config.model.path!r} are not known here)")
    prediction = predict(config, shape)
    if config.launch.kind == "ray":
        most = gigabytes(sum(prediction.sizes.values()))
        return MemoryCheck(f"memory: up to {most} on all machines", prediction=prediction)
    if config.launch.kind == "processes" and on_gpus(config):
        from pipelinerl.resources.placement import place_here  # noqa: PLC0415 - only on GPUs

        prediction = prediction.on({BETWEEN: ()} | {place.role: place.gpus for place in place_here(config)[0]})
    return judge(prediction)


def on_gpus(config: RunConfig) -> bool:
    """Whether any of the processes computes on a CUDA device."""
    return config.engine.device.startswith("cuda") or config.trainer.device.startswith("cuda")


def shape_of(config: RunConfig) -> ModelShape | None:
    """The sizes of the run's model: a folder, or a hub id whose files are all downloaded; None if they are not known.

    Raises ModelLoadError if there is no model.
    """
    found = find_model(config.model.path)
    if Path(found).is_dir():
        return read_shape(Path(found))
    from pipelinerl.models.folder import downloaded  # noqa: PLC0415 - folders don't need it

    folder = downloaded(found)
    try:
        return None if folder is None else read_shape(Path(folder))
    except ModelLoadError:  # missing files are downloaded when the model is loaded
        return None


def judge(prediction: Prediction, memory_of: MemoryOf = memory_of) -> MemoryCheck:
    """Compare the prediction with the memory of the machine.

    Raises UserError only for a run that can't fit: if it exceeds the total memory of a device while all sequences are short.
    Warns if it may exceed the total memory, or the memory that other processes leave now.
    """
    lines, warnings = [], []
    for device in prediction.devices:
        memory, on = memory_of(device), "" if device == HOST else f" on {device}"
        most, least = prediction.bytes_on(device), prediction.bytes_on(device, least=True)
        if memory is None:
            lines.append(f"up to {gigabytes(most)}{on}")
            continue
        total = gigabytes(memory.total)
        lines.append(f"up to {gigabytes(most)} of {total}{on}")
        free = memory.total if memory.available is None else memory.available
        if most <= min(free, memory.total):
            continue
        details, needs = _details(prediction.uses_on(device)), f"the run may need {gigabytes(most)} of memory{on}"
        if least > memory.total:
            raise UserError(f"the run needs at least {gigabytes(least)} of memory{on}, and there are {total} {details}")
        if most > memory.total:
            warnings.append(f"{needs} if prompts and answers are as long as they may be, and there are {total} {details}")
        else:
            only = f"only {gigabytes(free)} are free now: other processes use the rest"
            warnings.append(f"{needs}, and {only} {details}")
    by_role = ", ".join(f"{role} {gigabytes(size)}" for role, size in prediction.sizes.items())
    return MemoryCheck(f"memory: {' and '.join(lines)} ({by_role})", warnings, prediction)


def share_for_vllm(config: RunConfig, memory_of: MemoryOf = memory_of) -> float | None:
    """The share of a GPU's memory, from 0 to 1, that the rest of the run leaves to each vLLM server on it.

    For a server process, which sees only its GPUs. None if nothing else is there, or if not all sizes are known.
    """
    shape, memory, numbered = shape_of(config), memory_of("cuda:0"), ":" in config.engine.device
    if shape is None or memory is None:
        return None
    servers = server_roles(config)[: None if numbered else 1]  # without a number, each process has GPUs of its own
    predicted, both = predict(config, shape), numbered and ":" in config.trainer.device
    sharing = Prediction((role, uses) for role, uses in predicted.items() if both or role in servers)
    gpus = [device for device in sharing.devices if any(use.name == VLLM for use in sharing.uses_on(device))]
    others = max(sum(use.size for use in sharing.uses_on(gpu) if use.name != VLLM) for gpu in gpus)
    weights = sum(use.size for use in sharing.uses_on(gpus[0]) if use.name == VLLM and not use.varies)
    left = max(memory.total - others, weights)
    return None if others <= CUDA_CONTEXT else min(VLLM_SHARE, left / memory.total / len(servers))


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _details(uses: Uses) -> str:
    """The largest sizes of memory, and what to change."""
    sizes: Counter[str] = Counter()
    for use in uses:
        sizes[use.name] += use.size
    largest = sizes.most_common(SHOWN_USES)
    advice = dict.fromkeys(ADVICE[name] for name, _ in largest if name in ADVICE)
    table = ", ".join(f"{name} {gigabytes(size)}" for name, size in largest)
    return f"({table}); {'; '.join([*advice, 'set model.dtype to bfloat16'])}; or take a smaller model"

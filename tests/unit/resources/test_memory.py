"""What a run will take of memory: the sums, what they are computed from, and what is said when it is too much."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pipelinerl.config.load import load_config
from pipelinerl.engine import LocalEngine
from pipelinerl.engine.runner import ModelRunner
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.models.folder import resolve_path
from pipelinerl.models.packed import PackedRow, TrainingForward, use_packed_attention
from pipelinerl.models.state import named_weights
from pipelinerl.resources import memory
from pipelinerl.resources.machine import Memory, host_memory, memory_of, usable_gpus
from pipelinerl.resources.memory import BETWEEN, MemoryCheck, bytes_by, check_memory, judge, predict, share_for_vllm
from pipelinerl.resources.shape import ModelShape, read_shape
from pipelinerl.trainer import logprobs
from pipelinerl.trainer.optimizer import Optimizer
from pipelinerl.types import Segment
from tests.parity.models import make_family

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
BILLION = ModelShape(
    parameters=10**9,
    linears={"mlp.up_proj.weight": (1 << 15, 1 << 15)},
    head="lm_head.weight",
    layers=16,
    hidden=2048,
    query_width=2048,
    kv_width=2 * 16 * 512,
    feed_forward=8192,
    vocabulary=128_000,
    max_length=8192,
)
GB = 10**9


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | changes))).eval()


def saved(folder: Path, model: Any, **options: Any) -> ModelShape:
    model.save_pretrained(folder, **options)
    shape = read_shape(folder)
    assert shape is not None
    return shape


def elements(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def predicted(*flags: str, shape: ModelShape = BILLION) -> dict[str, dict[str, int]]:
    """The sum of each use, by process."""
    found: dict[str, dict[str, int]] = {}
    for use in predict(load_config(None, flags), shape):
        found.setdefault(use.role, Counter())[use.name] += use.size
    return found


# ---- sizes of models


@pytest.mark.parametrize("tied", [True, False])
def test_the_sizes_of_a_model_are_read_from_its_files(tmp_path: Path, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    shape = saved(tmp_path, model, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert shape.parameters == elements(model)
    linear = {
        f"{name}.weight": (m.out_features, m.in_features) for name, m in model.named_modules() if hasattr(m, "in_features")
    }
    assert shape.linears == linear
    assert (shape.layers, shape.query_width, shape.kv_width, shape.vocabulary) == (3, 64, 2 * 3 * 32, 512)
    assert (shape.slot_length(None), shape.slot_length(100)) == (2048, 100)


def test_a_tied_head_that_is_stored_as_well_counts_once(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = llama(tie_word_embeddings=True)
    saved(tmp_path, model)
    save_file({name: weight.clone() for name, weight in named_weights(model).items()}, tmp_path / "model.safetensors")
    assert read_shape(tmp_path).parameters == elements(model)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", lambda whole: whole[:-100], "is damaged or incomplete"),
        ("model.safetensors", lambda _: b"<html>not found</html>", "is damaged or incomplete"),
        ("config.json", lambda whole: whole[:-5], "is not a JSON object"),
        ("model.safetensors.index.json", lambda _: b'{"weight_map": {"a": "model-00002.safetensors"}}', "No such file"),
    ],
)
def test_damaged_files_are_named_before_anything_starts(tmp_path: Path, name: str, content: Any, said: str) -> None:
    saved(tmp_path, llama())
    path = tmp_path / name
    path.write_bytes(content(path.read_bytes() if path.exists() else b""))
    with pytest.raises(ModelLoadError) as caught:
        check_memory(load_config(None, ["--model.path", str(tmp_path)]))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the sums are those of what is allocated


def test_constants_are_those_of_the_code_they_stand_for() -> None:
    assert (logprobs.LOGITS_AT_ONCE, max(logprobs.HEAD_CHUNK.values())) == (memory.LOGITS_AT_ONCE, memory.HEAD_CHUNK)


def test_the_engines_memory_is_what_the_engine_allocates(tmp_path: Path) -> None:
    model = llama(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    shape = saved(tmp_path, model)
    runner = ModelRunner(model, 8, 64)
    found = predicted("--engine.slots=8", "--engine.max_length=64", "--actor.max_tokens=32", shape=shape)["generation"]
    assert found["KV cache"] == sum(part.nbytes for part in runner.kv.parts(64))
    assert runner._flat is not None
    packed = sum(4 * linear._weight.numel() for linear in runner._flat._packed)
    assert packed <= found["packed weights"] <= 1.1 * packed


@pytest.mark.parametrize("family", ["deepseek-v3-latents", "mamba", "lfm2-conv", "qwen3.5-delta-rule"])
def test_latents_and_states_take_what_the_engine_allocates(tmp_path: Path, family: str) -> None:
    model = make_family(family)
    shape = saved(tmp_path, model)
    engine = LocalEngine(model, slots=3, max_length=40, flatten=False)
    flags = ("--engine.slots=3", "--engine.max_length=40", "--actor.max_tokens=20")
    allocated_bytes = sum(part.nbytes for part in engine._runner.kv.parts(40))
    assert predicted(*flags, shape=shape)["generation"]["KV cache"] == allocated_bytes


@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_trainers_memory_is_what_the_trainer_allocates(tmp_path: Path, dtype: torch.dtype, item: int) -> None:
    model = llama().to(dtype)
    shape = saved(tmp_path, model)
    optimizer = Optimizer(model, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.zero_grad()
    optimizer.step(learning_rate=1e-3, max_grad_norm=1.0)
    moments = sum(t.nbytes for name, t in optimizer.state().items() if "exp_avg" in name)
    masters = sum(t.nbytes for name, t in optimizer.state().items() if name.endswith(".master"))
    parts = predicted(f"--model.dtype={str(dtype).removeprefix('torch.')}", shape=shape)["training"]
    assert parts["Adam's moments"] == moments
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts.get("master weights in float32", item * shape.parameters) - item * shape.parameters == masters


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "intermediate_size": 512}])
def test_activations_are_near_what_autograd_keeps(tmp_path: Path, changes: dict[str, Any], shared: bool) -> None:
    model = llama(**changes)
    shape = saved(tmp_path, model)
    use_packed_attention(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = 128
    segments = [Segment(token_ids=tuple(range(64)), sampled=((63, 64),)) for _ in range(tokens // 64)]
    if shared:  # 65 tokens of a prompt, and three answers
        segments = [Segment(token_ids=(*range(66), *[n] * 20), sampled=((66, 86),)) for n in range(3)]
    row = PackedRow.of(segments, least_shared=0.2 if shared else 1.0)
    assert row.length == tokens
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = TrainingForward(model)(row)
    measured = sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in own)
    assert logits.requires_grad
    flags = (f"--trainer.micro_batch_tokens={tokens}", "--engine.max_length=64", "--actor.max_tokens=32")
    assert predicted(*flags, shape=shape)["training"]["activations"] == pytest.approx(measured, rel=0.25)
    saving = predicted(*flags, "--trainer.gradient_checkpointing=true", shape=shape)["training"]
    assert saving["activations"] < measured / 2


# ---- what settings change

KL = "--trainer.kl_coefficient=0.1 --preprocess.zero_advantage=keep"
BF16 = "--model.dtype=bfloat16"
LOGITS = "--trainer.micro_batch_tokens=8192 --trainer.batch_size=64 --engine.max_length=2048"
HEAD = 4 * BILLION.vocabulary * BILLION.hidden


@pytest.mark.parametrize(
    ("flags", "role", "use", "size"),
    [
        ("", "training", "Adam's moments", 8 * GB),
        ("", BETWEEN, "weights in transfer", 4 * GB),
        ("", "generation", "packed weights", 4 << 30),
        (BF16, "generation", "packed weights", 0),
        ("--model.lora={rank: 8}", "training", "Adam's moments", 8 * 8 * (1 << 16)),
        ("--model.lora={rank: 8}", "training", "weights to be published", 4 << 30),
        ("--model.lora={rank: 8} --weights.encoding=adapter", "generation", "weights without adapter", 4 << 30),
        ("--model.lora={rank: 8} --weights.encoding=adapter", BETWEEN, "weights in transfer", 4 * 8 * (1 << 16)),
        (KL, "training", "reference model", 4 * GB),
        (f"{KL} --trainer.teacher=http://teacher:1", "training", "reference model", 0),
        (f"{KL} --trainer.teacher=demo --model.lora={{}}", "training", "reference model", 4 * GB),
        (f"{KL} --model.lora={{}}", "training", "reference model", 0),
        (f"{KL} --trainer.ranks=4", "training-rank-3", "reference model", GB),
        (f"{KL} --trainer.ranks=4 --launch.preprocessor=process", "preprocessing", "reference model", 4 * GB),
        ("--trainer.ranks=4", "training-rank-1", "weights", GB),
        (f"{BF16} --trainer.ranks=4", "training-rank-1", "weights", GB),  # the master copy, in float32
        ("--trainer.ranks=4", "training", "weights to be published", 4 * GB),
        (f"{BF16} --model.head_dtype=float32", "generation", "head in float32", HEAD),
        ("--engine.kind=http", "server-0", "staged weights", 4 * GB),
        ("--engine.kind=http --weights.kind=collective", "server-0", "staged weights", 4 * GB),
        ("--weights.kind=collective --weights.encoding=delta", "generation", "staged weights", 8 * GB),
        ("--weights.kind=collective --weights.encoding=delta", "training", "staged weights", 12 * GB),
        (f"{LOGITS} --trainer.head_chunk=0", "training", "logits", 8192 * BILLION.vocabulary * 4),
        (f"{LOGITS} --trainer.head_chunk=100", "training", "logits", 100 * BILLION.vocabulary * 12),
        (f"{LOGITS} --trainer.head_chunk=100 {BF16}", "training", "logits", 100 * BILLION.vocabulary * 10 + HEAD),
    ],
)
def test_each_choice_costs_or_saves_what_it_should(flags: str, role: str, use: str, size: int) -> None:
    words = [f"--{word}" for word in flags.split("--")[1:]]
    assert predicted(*(word.strip() for word in words))[role].get(use, 0) == size


# ---- GPUs

VLLM = ("--engine.kind=vllm", "--engine.python=python", "--model.dtype=bfloat16")
SHARED = (*VLLM, "--engine.device=cuda:0", "--trainer.device=cuda:0", "--trainer.micro_batch_tokens=512")
APART = (*VLLM, "--engine.device=cuda", "--trainer.device=cuda")


def test_a_vllm_server_takes_what_its_slots_need_on_each_of_its_gpus() -> None:
    own = predicted("--model.dtype=bfloat16")["generation"]
    needed = own["weights"] + own["KV cache"] + own["activations"]
    assert predicted(*VLLM, "--engine.device=cuda")["server-0"]["vLLM"] == needed
    flags = [*VLLM, "--engine.device=cuda:1", "--engine.vllm_args=[--tensor-parallel-size=2]"]
    parallel = predict(load_config(None, flags), BILLION)
    elsewhere = predict(load_config(None, flags), BILLION, {"server-0": (5, 3)})
    for prediction, gpus in ((parallel, ("cuda:1", "cuda:2")), (elsewhere, ("cuda:5", "cuda:3"))):
        for gpu in gpus:
            halves = [part for part in prediction if part.device == gpu and part.name == "vLLM"]
            assert (sum(part.size for part in halves), halves[0].size) == (needed // 2, GB)


@pytest.mark.parametrize(
    ("flags", "total", "share"),
    [
        (SHARED, 80, 0.718),
        (SHARED, 20, 0.1),  # its weights have room beside a trainer that may need all
        ((*SHARED, "--weights.kind=collective"), 80, 0.668),
        (APART, 80, None),
        ((*APART, "--weights.kind=collective", "--launch.kind=ray"), 80, 0.92),
        ((*APART, "--weights.kind=collective", "--launch.kind=ray"), 20, 0.874),  # beside the update
        ((*VLLM, "--engine.device=cuda:0", "--engine.servers=2"), 80, 0.493),
    ],
)
def test_vllm_leaves_a_gpu_to_the_rest_of_the_run(
    flags: tuple[str, ...], total: int, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "shape_of", lambda _: BILLION)
    found = share_for_vllm(load_config(None, flags), lambda _: Memory(total * GB, total * GB))
    assert found == (None if share is None else pytest.approx(share, abs=0.001))
    assert share_for_vllm(load_config(None, flags), lambda _: None) is None


class Driver:
    """Two GPUs of 80 GB."""

    def cuInit(self, _: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = number
        return int(number > 1)

    def cuDeviceTotalMem_v2(self, total: Any, _: object) -> int:
        total._obj.value = 80 * GB
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, length: int, handle: Any) -> int:
        bus.value = b"0000:%02X:00.0" % (handle.value + 0x3B)
        return int(length < len("0000:3B:00.0") + 1)

    # The library of nvidia-smi: the second one's memory is in use, but for 30 GB.

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, device: Any) -> int:
        device._obj.value = int(bus.value[5:7], 16)
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, found: Any) -> int:
        free = {0x3B: 81, 0x3C: 30}[device.value]  # the driver counts a little more than CUDA
        found._obj[:] = [81 * GB, free * GB, (81 - free) * GB]
        return 0


def without_nvml(name: str) -> Driver:
    if "cuda" in name:
        return Driver()
    raise OSError(f"{name}: cannot open shared object file")


def test_what_each_process_needs_is_compared_with_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: Driver())
    assert usable_gpus() == 2
    assert [memory_of(f"cuda:{gpu}") for gpu in range(3)] == [Memory(80 * GB, 80 * GB), Memory(80 * GB, 30 * GB), None]
    monkeypatch.setattr("ctypes.CDLL", without_nvml)
    assert memory_of("cuda:1") == Memory(80 * GB, 80 * GB)
    apart = load_config(None, ["--engine.device=cuda", "--trainer.device=cuda"])
    both = load_config(None, ["--engine.device=cuda:0", "--trainer.device=cuda:0"])
    ours, shared = (bytes_by("device", check_memory(config).uses) for config in (apart, both))
    assert ours.keys() == {"cpu", "cuda:0", "cuda:1"}
    assert ours["cuda:0"] + ours["cuda:1"] == shared["cuda:0"]
    assert ours["cpu"] == shared["cpu"], "with the weights between them"


# ---- judging


def judged(total: float, available: float | None = None, *flags: str) -> MemoryCheck:
    memory = Memory(int(total * 1e9), int((total if available is None else available) * 1e9))
    return judge(predict(load_config(None, flags), BILLION), lambda _: memory)


def sums(*flags: str) -> tuple[float, float]:
    uses = [use for use in predict(load_config(None, flags), BILLION) if use.device == "cpu"]
    return sum(use.size for use in uses if not use.varies) / 1e9, sum(use.size for use in uses) / 1e9


def test_a_run_that_can_not_fit_is_refused_with_the_numbers_and_what_to_change() -> None:
    least, _ = sums()
    with pytest.raises(UserError) as caught:
        judged(least - 1)
    message = str(caught.value)
    assert f"needs at least {least:.1f} GB of memory, and there are {least - 1:.1f} GB" in message
    assert "Adam's moments 8.0 GB" in message
    assert "set model.lora to {}" in message
    assert "\n" not in message


def test_only_what_can_not_fit_is_refused() -> None:
    least, most = sums()
    assert least < most
    assert "if prompts and answers are as long as they may be" in judged(least + 0.1).lines[1]
    for available in (5, least - 0.1):  # short sequences don't fit either, now
        warning = judged(most + 1, available).lines[1]
        assert f"needs at least {least:.1f} GB of memory" in warning
        assert f"of which {available:.1f} GB are free now" in warning
    assert len(judged(most + 1, most + 0.5).lines) == len(judged(most + 1).lines) == 1
    assert f"up to {most:.1f} GB of {most + 1:.1f} GB" in judged(most + 1).lines[0]
    on_gpu = predict(load_config(None, ["--trainer.device=cuda:0"]), BILLION)
    assert "GB on cuda:0 (" in judge(on_gpu, lambda device: Memory(10**12, 10**12) if device == "cpu" else None).lines[0]
    with pytest.raises(UserError, match=r"on cuda:0, and there are 1\.0 GB"):
        judge(on_gpu, lambda device: Memory(10**12, 10**12) if device == "cpu" else Memory(GB, GB))


def test_the_demo_fits_a_small_machine_and_needs_no_torch_to_say_so() -> None:
    shape = read_shape(Path(resolve_path("demo")))
    assert shape is not None
    assert judge(predict(load_config(None), shape), lambda _: Memory(2 * GB, 2 * GB)).lines[1:] == []
    code = "import sys; from pipelinerl.resources.memory import *; from pipelinerl.config.load import load_config; "
    code += "check_memory(load_config(None)); assert not {'torch', 'transformers'} & sys.modules.keys()"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


MEMINFO = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("group", "files", "total", "available"),
    [
        ("", {}, 1000, 600),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/memory.max": str(400 << 10),  # a parent's limit counts
                "sys/fs/cgroup/a/memory.current": str(300 << 10),
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {50 << 10}\n",
            },
            400,
            150,
        ),
        ("4:memory:/x\n", {f"{V1}/x/memory.limit_in_bytes": "9223372036854771712"}, 1000, 600),
        (
            "9:cpu:/y\n4:memory:/not/mounted/here\n",
            {
                f"{V1}/memory.limit_in_bytes": str(500 << 10),  # a container sees its own group as the root
                f"{V1}/memory.usage_in_bytes": str(100 << 10),
            },
            500,
            400,
        ),
        ("0::/\n", {"sys/fs/cgroup/memory.max": str(9000 << 10)}, 1000, 600),
    ],
)
def test_limits_of_control_groups_are_limits(
    tmp_path: Path, group: str, files: dict[str, str], total: int, available: int
) -> None:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == Memory(total << 10, available << 10)

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
from pipelinerl.engine import LocalEngine, flat
from pipelinerl.engine.runner import ModelRunner
from pipelinerl.errors import ModelLoadError, UserError
from pipelinerl.models.folder import resolve_path
from pipelinerl.models.packed import PackedRow, sampled_logits, use_packed_attention
from pipelinerl.models.shape import ModelShape, read_shape
from pipelinerl.models.state import named_weights
from pipelinerl.resources import memory
from pipelinerl.resources.machine import Memory, device_memory, host_memory, usable_gpus
from pipelinerl.resources.memory import (
    BETWEEN,
    Prediction,
    activation_bytes,
    check_memory,
    judge,
    kv_bytes,
    packed_bytes,
    predict,
    share_for_vllm,
)
from pipelinerl.trainer import logprobs
from pipelinerl.trainer.optimizer import Optimizer
from pipelinerl.types import Segment
from tests.parity.models import THROUGH_CACHE, make_family

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
    for role, parts in predict(load_config(None, flags), shape).items():
        uses = found[role] = Counter[str]()
        for part in parts:
            uses[part.name] += part.size
    return found


# ------------------------------------------------------------------------------------------------ sizes of models


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


def test_a_model_that_does_not_say_its_sizes_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_shape(tmp_path) is None
    assert not check_memory(load_config(None, ["--model.path", str(tmp_path)])).prediction


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", lambda whole: whole[:-100], "is cut short: 100 bytes are missing"),
        ("model.safetensors", lambda _: b"<html>not found</html>", "is damaged or not a safetensors file"),
        ("model.safetensors", lambda _: b"", "is damaged or not a safetensors file"),
        ("config.json", lambda whole: whole[:-5], "is not a JSON object"),
        ("config.json", lambda _: b"[1]", "is not a JSON object"),
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


# ------------------------------------------------------------------------------------------------ the sums


def test_constants_are_those_of_the_code_they_stand_for() -> None:
    assert memory.PACK_FROM == flat.PACK_FROM
    assert memory.LOGIT_CHUNKS == 3 * 4 * logprobs.CHUNK_ELEMENTS
    assert memory.LOGITS_AT_ONCE == logprobs.LOGITS_AT_ONCE
    assert memory.HEAD_CHUNK == logprobs.HEAD_CHUNK


def test_the_engines_memory_is_what_the_engine_allocates(tmp_path: Path) -> None:
    model = llama(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    shape = saved(tmp_path, model)
    runner = ModelRunner(model, 8, 64)
    assert kv_bytes(shape, slots=8, length=64, item_bytes=4) == runner.kv.kv_bytes
    assert runner._flat is not None
    assert packed_bytes(shape) == sum(4 * linear._weight.numel() for linear in runner._flat._copies) > 0


@pytest.mark.parametrize(
    "family",
    [
        *["deepseek-v3-latents", "falcon", "gpt_bigcode", "kimi_linear", "mamba", "xglm"],
        *["gemma4_text", "mimo_v2_flash"],  # layers with other heads than the configuration's, shared keys and values
        *sorted(THROUGH_CACHE),
    ],
)
def test_latents_and_states_take_what_the_engine_allocates(tmp_path: Path, family: str) -> None:
    model = make_family(family)
    shape = saved(tmp_path, model)
    engine = LocalEngine(model, slots=3, max_length=40, flatten=False)
    assert kv_bytes(shape, slots=3, length=40, item_bytes=4) == engine._runner.kv.kv_bytes


def test_the_trainers_memory_is_what_the_trainer_allocates(tmp_path: Path) -> None:
    for dtype, item in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = llama().to(dtype)
        shape = saved(tmp_path, model)
        optimizer = Optimizer(model, betas=(0.9, 0.95), weight_decay=0.0)
        optimizer.zero_grad()
        optimizer.step(learning_rate=1e-3, max_grad_norm=1.0)
        moments = sum(t.nbytes for name, t in optimizer.state().items() if "exp_avg" in name)
        masters = sum(t.nbytes for name, t in optimizer.state().items() if name.endswith(".master"))
        parts = predicted(f"--model.dtype={'float32' if item == 4 else 'bfloat16'}", shape=shape)["training"]
        assert parts["Adam's moments"] == moments
        assert parts["weights"] == sum(p.nbytes for p in model.parameters())
        assert parts.get("master weights in float32", item * shape.parameters) - item * shape.parameters == masters


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"intermediate_size": 512}])
def test_activations_are_near_what_autograd_keeps(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = llama(**changes)
    shape = saved(tmp_path, model)
    use_packed_attention(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = 128
    row = PackedRow.of([Segment(token_ids=tuple(range(64)), sampled=((63, 64),)) for _ in range(tokens // 64)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = sampled_logits(model, row)
    measured = sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in own)
    assert logits.requires_grad
    assert activation_bytes(shape, tokens, item_bytes=4, checkpointing=False) == pytest.approx(measured, rel=0.25)
    assert activation_bytes(shape, tokens, item_bytes=4, checkpointing=True) < measured / 2


def test_each_choice_costs_or_saves_what_it_should() -> None:
    plain = predicted()
    assert plain["training"]["Adam's moments"] == 8 * 10**9
    assert plain["training"]["gradients"] == 4 * 10**9
    assert list(plain[BETWEEN].values()) == [4 * 10**9]
    assert plain["generation"]["packed weights"] == 4 << 30
    assert "packed weights" not in predicted("--model.dtype=bfloat16")["generation"]

    lora = predicted("--model.lora", "{rank: 8}")["training"]
    assert lora["Adam's moments"] == 8 * 8 * (1 << 16)
    assert lora["weights"] == plain["training"]["weights"]
    assert lora["merged weights"] == 4 << 30  # of the layers with adapters
    assert predicted("--model.lora.target_modules", "[q_proj]")["training"]["adapters"] == 0
    assert (
        predicted("--trainer.gradient_checkpointing=true")["training"]["activations"] < plain["training"]["activations"] / 5
    )
    assert predicted("--trainer.micro_batch_tokens=512")["training"]["logits"] < plain["training"]["logits"] / 3

    kl = ("--trainer.kl_coefficient=0.1", "--preprocess.zero_advantage=keep")
    assert predicted(*kl)["training"]["reference model"] == 4 * 10**9
    assert "reference model" not in predicted(*kl, "--model.lora", "{}")["training"]


def test_every_process_of_a_run_is_there() -> None:
    assert predicted("--engine.processes=3").keys() == {"generation-0", "generation-1", "generation-2", "training", BETWEEN}
    servers = predicted("--engine.kind=http", "--engine.servers=2", "--weights.kind=collective")
    assert servers.keys() == {"generation", "server-0", "server-1", "training"}
    assert servers["generation"].keys() == {"the process itself"}
    assert servers["training"]["staged weights"] == servers["server-0"]["staged weights"] == 4 * 10**9
    assert predicted("--engine.kind=http")["server-0"]["staged weights"] == 4 * 10**9
    assert predicted("--launch.kind=embedded").keys() == {"embedded"}
    delta = ("--weights.kind=collective", "--weights.encoding=delta")
    local, servers = predicted(*delta), predicted("--engine.kind=http", *delta)
    ends = [local["training"], servers["training"], local["generation"], servers["server-0"]]
    assert [(parts["staged weights"], parts["a delta"]) for parts in ends] == [
        (8 * 10**9, 4 * 10**9),
        (8 * 10**9, 4 * 10**9),
        (4 * 10**9, 4 * 10**9),
        (4 * 10**9, 4 * 10**9),
    ]


VLLM = ("--engine.kind=vllm", "--engine.python=python", "--model.dtype=bfloat16")
RAY = ("--launch.kind=ray",)
SHARED = (*VLLM, "--engine.device=cuda:0", "--trainer.device=cuda:0", "--trainer.micro_batch_tokens=512")


def test_a_vllm_server_takes_what_its_slots_need_on_each_of_its_gpus() -> None:
    own = predicted("--model.dtype=bfloat16")["generation"]
    needed = own["weights"] + own["KV cache"] + own["activations"]
    assert predicted(*VLLM, "--engine.device=cuda")["server-0"]["vLLM"] == needed
    flags = [*VLLM, "--engine.device=cuda:1", "--engine.vllm_args=[--tensor-parallel-size=2]"]
    parallel = predict(load_config(None, flags), BILLION)
    for prediction, gpus in ((parallel, ("cuda:1", "cuda:2")), (parallel.on({"server-0": (5, 3)}), ("cuda:5", "cuda:3"))):
        for gpu in gpus:
            halves = [part for part in prediction.uses_on(gpu) if part.name == "vLLM"]
            assert (sum(part.size for part in halves), halves[0].size) == (needed // 2, 10**9)


@pytest.mark.parametrize(
    ("flags", "sharers", "update"),
    [
        (SHARED, 1, 0),
        ((*SHARED, "--engine.servers=2"), 2, 0),
        ((*SHARED, "--weights.kind=collective"), 1, 2 * 10**9),
        ((*SHARED, "--engine.device=cuda:1"), 0, 0),
        ((*VLLM, "--engine.device=cuda", "--trainer.device=cuda"), 0, 0),
        ((*VLLM, "--engine.device=cuda", "--trainer.device=cuda", "--weights.kind=collective"), 1, 2 * 10**9),
        ((*VLLM, "--engine.device=cuda", "--trainer.device=cuda", "--weights.kind=collective", *RAY), 1, 2 * 10**9),
        ((*VLLM, "--engine.device=cuda:0", "--engine.servers=2"), 2, 0),
    ],
)
def test_vllm_leaves_a_gpu_to_the_rest_of_the_run(
    flags: tuple[str, ...], sharers: int, update: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "shape_of", lambda _: BILLION)
    config, asked = load_config(None, flags), []

    def machine(device: str) -> Memory:
        asked.append(device)
        return Memory(80 * 10**9, None)

    share = share_for_vllm(config, machine)
    assert set(asked) == {"cuda:0"}, "the first that the server sees"
    if not sharers:
        assert share is None
        return
    trainer = Prediction(training=predict(config, BILLION)["training"])
    shared = ":" in config.engine.device and ":" in config.trainer.device
    others = trainer.bytes_on("cuda:0") * shared + sharers * (update + memory.CUDA_CONTEXT)
    assert share == pytest.approx(min(0.92, (1 - others / 80e9) / sharers))
    assert share_for_vllm(config, lambda _: None) is None
    if flags == SHARED:  # its weights have room beside a trainer that may need all
        assert share_for_vllm(config, lambda _: Memory(20 * 10**9, None)) == pytest.approx(0.1)
        with pytest.raises(UserError, match=r"at least .* of memory on cuda:0, and there are 20\.0 GB .*vLLM"):
            judge(predict(config, BILLION), lambda _: Memory(20 * 10**9, None))


def test_what_is_on_a_gpu_is_not_in_the_machines_memory() -> None:
    prediction = predict(load_config(None, ["--trainer.device=cuda", "--engine.device=cuda:1"]), BILLION)
    assert prediction.devices == ["cpu", "cuda:0", "cuda:1"]
    assert prediction.bytes_on("cuda:0") > 16 * 10**9
    assert 4 * 10**9 < prediction.bytes_on("cuda:1") < 16 * 10**9
    assert [part.name for part in prediction["training"] if part.device == "cpu"] == ["the process itself"]


def test_ranks_share_the_weights_the_gradients_and_the_optimizers_state() -> None:
    one, four = predicted()["training"], predicted("--trainer.ranks=4")
    ranks = [four[role] for role in ("training", "training-rank-1", "training-rank-3")]
    for parts in ranks:
        for name in ("weights", "gradients", "Adam's moments"):
            assert parts[name] == one[name] / 4
        assert 0 < parts["gathered weights"] < one["weights"]
    assert [parts.get("all weights, to be published", 0) for parts in ranks] == [one["weights"], 0, 0]
    kept = predicted("--trainer.ranks=4", "--trainer.reshard_after_forward=false")["training"]
    assert kept["gathered weights"] == one["weights"]
    narrow = predicted("--trainer.ranks=4", "--model.dtype=bfloat16")["training"]
    assert narrow["weights"] == ranks[0]["weights"], "they are the master copy, in float32"
    assert narrow["gathered weights"] == ranks[0]["gathered weights"] / 2
    kl = ("--trainer.ranks=4", "--trainer.kl_coefficient=0.1", "--preprocess.zero_advantage=keep")
    assert [predicted(*kl)[role]["reference model"] for role in ("training", "training-rank-3")] == [10**9] * 2
    apart = predicted(*kl, "--launch.preprocessor=process")
    assert [role for role, parts in apart.items() if "reference model" in parts] == ["preprocessing"]
    assert apart["preprocessing"]["reference model"] == 4 * 10**9


def test_logits_take_at_most_the_limit_or_those_of_a_chunk() -> None:
    def logits(*flags: str) -> int:
        most = ("--trainer.micro_batch_tokens=8192", "--trainer.batch_size=64", "--engine.max_length=2048")
        return predicted(*most, *flags)["training"]["logits"] - memory.LOGIT_CHUNKS

    vocabulary, hidden = BILLION.vocabulary, BILLION.hidden
    assert logits("--trainer.head_chunk=0") == 8192 * vocabulary * 4
    assert logits() == 4 << 28, "as many may be sampled as fit the limit"
    assert logits("--trainer.head_chunk=100") == 100 * vocabulary * 12
    narrow = ("--trainer.head_chunk=100", "--model.dtype=bfloat16")
    assert logits(*narrow) == 100 * vocabulary * 10 + 4 * vocabulary * hidden, "and the sum of the head's gradient"
    assert logits(*narrow, "--model.lora={}") == 100 * vocabulary * 10
    few = logits("--trainer.micro_batch_tokens=2000")
    assert few == 2000 * vocabulary * 4 == logits("--trainer.micro_batch_tokens=2000", "--trainer.head_chunk=0")


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
        total._obj.value = 80 * 10**9
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, length: int, handle: Any) -> int:
        bus.value = b"0000:%02X:00.0" % (handle.value + 0x3B)
        return int(length < len("0000:3B:00.0") + 1)


class Management:
    """The second one's memory is in use, but for 30 GB."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, device: Any) -> int:
        device._obj.value = int(bus.value[5:7], 16)
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, found: Any) -> int:
        free = {0x3B: 81, 0x3C: 30}[device.value]  # the driver counts a little more than CUDA
        found._obj[:] = [81 * 10**9, free * 10**9, (81 - free) * 10**9]
        return 0


def missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_what_each_process_needs_is_compared_with_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver() if "cuda" in name else Management())
    assert usable_gpus() == 2
    assert device_memory("cuda:0") == Memory(80 * 10**9, 80 * 10**9)
    assert device_memory("cuda:1") == Memory(80 * 10**9, 30 * 10**9)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver() if "cuda" in name else missing(name))
    assert device_memory("cuda:1") == Memory(80 * 10**9, None)
    apart = load_config(None, ["--engine.device=cuda", "--trainer.device=cuda"])
    both = load_config(None, ["--engine.device=cuda:0", "--trainer.device=cuda:0"])
    ours, shared = (check_memory(config).prediction for config in (apart, both))
    assert ours.devices == ["cpu", "cuda:0", "cuda:1"]
    assert ours.bytes_on("cuda:0") + ours.bytes_on("cuda:1") == shared.bytes_on("cuda:0")
    assert ours.bytes_on("cpu") == shared.bytes_on("cpu"), "with the weights between them"
    with pytest.raises(UserError, match=r"needs 3 \(training, generation-0, generation-1\), and 2 of this machine's 2"):
        check_memory(load_config(None, ["--engine.device=cuda", "--trainer.device=cuda", "--engine.processes=2"]))


# ------------------------------------------------------------------------------------------------ judging


def judged(total: float, available: float | None = None, *flags: str) -> Any:
    config = load_config(None, flags)
    free = None if available is None else int(available * 1e9)
    return judge(predict(config, BILLION), lambda _: Memory(int(total * 1e9), free))


def sums(*flags: str) -> tuple[float, float]:
    prediction: Prediction = predict(load_config(None, flags), BILLION)
    return prediction.bytes_on("cpu", least=True) / 1e9, prediction.bytes_on("cpu") / 1e9


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
    assert "if prompts and answers are as long as they may be" in judged(least + 0.1).warnings[0]
    assert "only 5.0 GB are free now" in judged(most + 1, 5).warnings[0]
    assert judged(most + 1, most + 0.5).warnings == judged(most + 1).warnings == []
    assert f"up to {most:.1f} GB of {most + 1:.1f} GB" in judged(most + 1).line


def test_a_gpu_is_named_and_one_that_is_not_known_refuses_nothing() -> None:
    config = load_config(None, ["--trainer.device=cuda:0"])
    prediction = predict(config, BILLION)
    small = Memory(10**9, None)
    with pytest.raises(UserError, match=r"on cuda:0, and there are 1\.0 GB"):
        judge(prediction, lambda device: Memory(10**12, None) if device == "cpu" else small)
    assert "on cuda:0" in judge(prediction, lambda device: Memory(10**12, None) if device == "cpu" else None).line


def test_the_demo_fits_a_small_machine_and_needs_no_torch_to_say_so() -> None:
    config = load_config(None)
    shape = read_shape(Path(resolve_path("demo")))
    assert shape is not None
    assert judge(predict(config, shape), lambda _: Memory(2 * 10**9, None)).warnings == []
    code = "import sys; from pipelinerl.resources.memory import *; from pipelinerl.config.load import load_config; "
    code += "check_memory(load_config(None)); assert not {'torch', 'transformers'} & sys.modules.keys()"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------ the machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n"}
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 1000, 600),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 1000, 600),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": str(400 << 10),  # a parent's limit counts
                "sys/fs/cgroup/a/memory.current": str(300 << 10),
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {50 << 10}\n",
            },
            400,
            150,
        ),
        ({"proc/self/cgroup": "4:memory:/x\n", f"{V1}/x/memory.limit_in_bytes": "9223372036854771712"}, 1000, 600),
        (
            {
                "proc/self/cgroup": "9:cpu:/y\n4:memory:/not/mounted/here\n",
                f"{V1}/memory.limit_in_bytes": str(500 << 10),  # a container sees its own group as the root
                f"{V1}/memory.usage_in_bytes": str(100 << 10),
            },
            500,
            400,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(9000 << 10)}, 1000, 600),
    ],
)
def test_limits_of_control_groups_are_limits(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    assert host_memory(write(tmp_path, MEMINFO | files)) == Memory(total << 10, available << 10)

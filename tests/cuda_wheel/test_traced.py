"""The code for GPUs, traced with fake tensors of a CUDA device that is not there: needs PyTorch for CUDA, and no GPU.

`make test-cuda-wheel` runs this in an environment of its own; elsewhere it is skipped. A fake tensor has a device, a type
and a shape, and no content: so an operation that mixes devices fails, and so does what reads a value, for which a host
waits. Operations are those that PyTorch's own build gives to the device. Backward passes are not traced: autograd asks the
GPU for its streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from pipelinerl.engine import runner, static, varlen
from pipelinerl.engine.attention import Chunk, PackedTokens
from pipelinerl.engine.static import StaticEngine
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models import packed
from pipelinerl.models.packed import PackedRow, TrainingForward, use_packed_attention
from pipelinerl.types import Segment

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's build for CUDA: make test-cuda-wheel")

LAYERS = 3
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2.5": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, rope_parameters={**LLAMA_3, "original_max_position_embeddings": 1024}),
    "gemma3": Gemma3TextConfig(
        **SMALL, head_dim=256, sliding_window=32, layer_types=[*["sliding_attention"] * 2, "full_attention"]
    ),
    "gpt-oss": GptOssConfig(**SMALL, head_dim=64, sliding_window=32, num_local_experts=4, num_experts_per_tok=2),
}
DECODING = {"qwen2.5": 24, "llama": 24, "gemma3": 70}
TRAINING = {"qwen2.5": 50, "llama": 50, "gemma3": 95}
"""Most kernels a layer: of a decode step and of a prompt, and of a row in training, forward."""
FLASH = "aten._flash_attention_forward.default"


class Traced(TorchDispatchMode):
    """The operations that are kernels on the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
        none = func.namespace != "aten" or func.__name__.startswith(("empty", "new_empty", "sym_", "reshape"))
        if not none and not any(views):
            self.kernels.append(str(func))
        return func(*args, **(kwargs or {}))

    def between(self, operation: str) -> int:
        """Most kernels from one call of `operation` to the next: those of a layer."""
        at = [i for i, kernel in enumerate(self.kernels) if kernel == operation]
        return max(after - before for before, after in pairwise(at))


class Host(TorchFunctionMode):
    """Copies from the host to the device are counted, and made without a GPU. Memory is not pinned, which needs one."""

    copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        new = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        moves = new or (func is Tensor.to and not args[0].is_cuda)
        named = [part for part in (*args[1:], kwargs.get("device")) if isinstance(part, (str, torch.device))]
        if not moves or not named or torch.device(named[0]).type != "cuda":
            return func(*args, **kwargs)
        self.copies += 1
        made = func(args[0], **{key: value for key, value in kwargs.items() if key == "dtype"}) if new else args[0]
        return torch.empty(made.shape, dtype=made.dtype, device=named[0])


def _of_their_own_mode(change: Callable[..., None]) -> Callable[..., None]:
    """The examples in an exported graph are fake tensors, too, of another mode."""

    def changed(*given: Any) -> None:
        with unset_fake_temporarily():
            change(*given)

    return changed


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Inside, new tensors are fake, and what compares numbers when a model is loaded is left out."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(runner.ModelRunner, "_compare", lambda own, *_: setattr(own, "error", 0.0))
    monkeypatch.setattr(
        runner.ModelRunner, "_own_logits", lambda own, _: own.model.set_attn_implementation(runner.ATTENTION_NAME)
    )
    monkeypatch.setattr(packed, "_verify", lambda *_: None)
    monkeypatch.setattr(static.DeviceRows, "launch", lambda *_: None)
    monkeypatch.setattr(varlen, "COMPILERS", {})
    passes = tuple(map(_of_their_own_mode, varlen.VarlenRunner._passes))
    monkeypatch.setattr(varlen.VarlenRunner, "_passes", passes)
    with FakeTensorMode(allow_non_fake_inputs=False), Host() as host:
        yield host


def model_of(name: str) -> Any:
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()


def engine_of(name: str, *, flatten: bool = True) -> StaticEngine:
    engine = StaticEngine(model_of(name), slots=16, max_length=128, flatten=flatten)
    assert ("exported graph" in engine._runner.description) == flatten
    return engine


@pytest.mark.parametrize("name", DECODING)
def test_a_step_and_a_prompt_are_few_kernels_a_layer_and_read_nothing(name: str, host: Host) -> None:
    engine = engine_of(name)
    before = host.copies
    for plain in (True, False):
        with torch.inference_mode(), Traced() as traced:
            engine._rows.step(16, plain)
        assert traced.kernels.count(FLASH) == LAYERS
        assert traced.between(FLASH) <= DECODING[name]
    assert host.copies == before
    chunks = (Chunk(begin=0, count=40, row=1, offset=0), Chunk(begin=40, count=24, row=3, offset=8))
    with torch.inference_mode(), Traced() as traced:
        positions = [*range(40), *range(8, 32)]
        logits = engine._runner.forward(PackedTokens([1] * 64, positions, keep=[39], chunks=chunks))
    assert logits.shape == (1, SMALL["vocab_size"])
    assert traced.kernels.count(FLASH) == LAYERS
    assert traced.between(FLASH) <= DECODING[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_in_training_is_one_call_of_attention_a_layer_and_reads_nothing(name: str, host: Host) -> None:
    model = model_of(name)
    use_packed_attention(model)
    segments = [Segment(token_ids=tuple(range(1, n)), sampled=((2, n - 1),)) for n in (60, 12, 33)]
    before = host.copies
    row = PackedRow.of(segments, "cuda")
    assert host.copies == before + 1
    with Traced() as traced:
        logits = TrainingForward(model)(row)
    assert logits.requires_grad
    assert logits.shape == (sum(len(segment.token_ids) - 2 for segment in segments), SMALL["vocab_size"])
    assert traced.kernels.count(FLASH) == (0 if name == "gpt-oss" else LAYERS)  # sinks are not in this operation
    if name in TRAINING:
        assert traced.between(FLASH) <= TRAINING[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_of_shared_prefixes_is_one_call_of_attention_a_layer_and_reads_nothing(name: str, host: Host) -> None:
    model = model_of(name)
    use_packed_attention(model)
    segments = [Segment(token_ids=(*range(1, 40), *[n] * n), sampled=((39, 39 + n),)) for n in (60, 12, 33)]
    before = host.copies
    row = PackedRow.of(segments, "cuda", least_shared=0.2)
    assert host.copies == before + 1
    assert row.length == 38 + 61 + 13 + 34
    with Traced() as traced:
        logits = TrainingForward(model)(row)
    assert logits.shape == (60 + 12 + 33, SMALL["vocab_size"])
    assert traced.kernels.count(FLASH) == (0 if name == "gpt-oss" else LAYERS)


@pytest.mark.usefixtures("host")
def test_sinks_are_left_to_the_other_engine_with_a_reason() -> None:
    engine = engine_of("gpt-oss", flatten=False)
    with pytest.raises(UnsupportedModelError, match="sinks"), torch.inference_mode():
        engine._rows.step(16, True)


@pytest.mark.usefixtures("host")
def test_a_planted_tensor_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen2.5", flatten=False)
    monkeypatch.setattr(varlen, "to_device", lambda array, _: torch.as_tensor(array))
    chunk = Chunk(begin=0, count=4, row=0, offset=0)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="device"):
        engine._runner.forward(PackedTokens([1] * 4, range(4), keep=[3], chunks=(chunk,)))


@pytest.mark.usefixtures("host")
def test_a_planted_reading_of_a_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen2.5", flatten=False)
    own = varlen.VarlenBatch.attend

    def attend(batch: varlen.VarlenBatch, *parts: Any) -> Tensor:
        assert batch.used.max().item() >= 0
        return own(batch, *parts)

    monkeypatch.setattr(varlen.VarlenBatch, "attend", attend)
    with torch.inference_mode(), pytest.raises(DataDependentOutputException):
        engine._rows.step(16, True)

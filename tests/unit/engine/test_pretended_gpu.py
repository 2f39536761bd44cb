"""The engine for GPUs on a device that is pretended: the same tokens as on the CPU, one wait a step, and faults show."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.engine import local, static, varlen
from pipelinerl.engine.static import DeviceRows, StaticEngine
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import GenerationRequest
from tests.parity.models import make_model
from tests.pretend_cuda import CUDA, pretended_cuda
from tests.unit.engine.engine_parts import request, serve

MODELS = [make_model("qwen3", seed=seed).bfloat16() for seed in range(2)]
NEW = {name: tensor.clone() for name, tensor in named_weights(MODELS[1]).items()}


def requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (3 + 5 * (i % 4),), generator=generator).tolist() for i in range(count)]
    return [request(f"r{i}", tuple(prompt), 6 + 2 * i, seed=i, **sampling) for i, prompt in enumerate(prompts)]


SCENARIOS: dict[str, tuple[list[GenerationRequest], int | None]] = {
    "plain": (requests(6), None),
    "an update in flight": (requests(6), 5),
    "top-k and top-p": (requests(4, temperature=0.7, top_p=0.9, top_k=20), None),
    "greedy": (requests(4, temperature=0.0), None),
    "many stop tokens": (requests(4, stop_token_ids=tuple(range(3, 12))), None),
}


def engine_on(where: str) -> StaticEngine:
    return StaticEngine(copy.deepcopy(MODELS[0]).to(where), slots=8, max_length=64, flatten=False)


def tokens(engine: StaticEngine, scenario: str) -> list[object]:
    """The tokens that it samples, and their versions."""
    wanted, update_at = SCENARIOS[scenario]
    updates = {} if update_at is None else {update_at: WeightUpdate(engine.version + 1, checksum(NEW), NEW)}
    done = serve(engine, wanted, updates)
    return [(done[one.id].token_ids, done[one.id].weight_versions) for one in wanted]


@cache
def expected_of(*scenarios: str) -> list[object]:
    """The tokens of the CPU, one scenario after the other. Asked for before a fault is planted."""
    on_cpu = engine_on("cpu")
    return [tokens(on_cpu, scenario) for scenario in scenarios]


def test_it_samples_what_the_cpu_samples_and_waits_once_a_step() -> None:
    expected = dict(zip(SCENARIOS, expected_of(*SCENARIOS), strict=True))
    with pretended_cuda() as device:
        engine = engine_on("cuda")
        assert "one CUDA graph each" in engine.progress().runner
        for name, (_, update_at) in SCENARIOS.items():
            device.waits.clear()
            device.operations.clear()
            before = engine.progress().decode_steps
            assert tokens(engine, name) == expected[name], name
            steps = engine.progress().decode_steps - before
            assert device.operations["attention, slow"] == 0
            if update_at is None:
                assert set(device.waits) == {"an event"}, name
                assert device.waits["an event"] <= steps, name
                assert device.operations["replay"] >= steps - 1, name


def planted_rebinding(patch: pytest.MonkeyPatch) -> None:
    """An update that replaces the weights' storage: recorded graphs would read the old one."""

    def rebind(model: Any, tensors: dict[str, Tensor], **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = tensors[name].to(parameter.device)

    patch.setattr(local, "load_weights", rebind)


def planted_wait(patch: pytest.MonkeyPatch) -> None:
    own = DeviceRows.step

    def step(rows: DeviceRows, count: int, plain: bool) -> None:
        assert bool((rows.integers[-1] >= 0).all())
        own(rows, count, plain)

    patch.setattr(DeviceRows, "step", step)


def planted_early_reading(patch: pytest.MonkeyPatch) -> None:
    def early(tensor: Tensor) -> Callable[[], Any]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        return host.numpy

    patch.setattr(static, "to_host", early)


def planted_cpu_tensor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(varlen, "to_device", lambda array, _: torch.as_tensor(array))


def planted_old_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceRows, "clear_graphs", lambda rows: rows._graphs.clear())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [planted_rebinding, planted_wait, planted_early_reading, planted_cpu_tensor, planted_old_pool]
)
def test_a_planted_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("an update in flight", "many stop tokens")
    expected = expected_of(*names)
    fault(monkeypatch)
    found: object = None
    with pretended_cuda():
        try:
            engine = engine_on("cuda")
            found = [tokens(engine, name) for name in names]
        except Exception as error:  # noqa: BLE001 - however a device shows it
            found = error
    assert found != expected


@pytest.mark.slow
def test_an_engine_that_fails_has_left_the_device_when_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def unrecordable(rows: DeviceRows, count: int, plain: bool) -> None:
        try:
            rows.integers.sum().item()
        except RuntimeError as error:
            kept = error  # refers to this frame, which refers to it
            raise kept from None

    monkeypatch.setattr(DeviceRows, "step", unrecordable)
    failed: list[weakref.ref[Any]] = []
    begin = static.DeviceRows.__init__
    left: list[object] = []

    def noted(rows: DeviceRows, runner: Any, *rest: Any) -> None:
        failed.append(weakref.ref(runner))
        begin(rows, runner, *rest)

    monkeypatch.setattr(DeviceRows, "__init__", noted)
    with pretended_cuda():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.extend(ref() for ref in failed))
        engine = static.engine_for(copy.deepcopy(MODELS[0]).to("cuda"), slots=4, max_length=64, flatten=False)
        assert type(engine) is local.LocalEngine
    assert left == [None]


def test_the_device_counts_and_refuses_as_a_real_one_does() -> None:
    with pretended_cuda() as device:
        here = torch.arange(4, device="cuda")
        assert here.is_cuda
        assert here.device == CUDA
        with pytest.raises(RuntimeError, match="same device"):
            here + torch.arange(4)
        with pytest.raises(TypeError, match="numpy"):
            here.numpy()
        assert not device.waits
        assert (here * 2).sum().item() == 12
        assert here.cpu().numpy().tolist() == [0, 1, 2, 3]
        assert sum(device.waits.values()) == 2
    assert not torch.cuda.is_available()
    assert here.device == torch.device("cpu")

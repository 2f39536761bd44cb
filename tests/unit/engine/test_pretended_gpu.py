"""The engine for GPUs on a device that is pretended: the same tokens as on the CPU, and one wait a step."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from pipelinerl.engine import local, static
from pipelinerl.engine.static import DeviceRows, StaticEngine
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import Completion, GenerationRequest, SamplingParams
from tests.parity.models import make_model
from tests.pretend_cuda import pretended_cuda

MODELS = [make_model("qwen3", seed=seed).bfloat16() for seed in range(2)]
NEW = {name: tensor.clone() for name, tensor in named_weights(MODELS[1]).items()}


def requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (3 + 5 * (i % 4),), generator=generator).tolist() for i in range(count)]
    return [
        GenerationRequest(
            id=f"r{i}", prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=6 + 2 * i, seed=i, **sampling)
        )
        for i, prompt in enumerate(prompts)
    ]


SCENARIOS: dict[str, tuple[list[GenerationRequest], int | None]] = {
    "plain": (requests(6), None),
    "an update in flight": (requests(6), 5),
    "top-k and top-p": (requests(4, temperature=0.7, top_p=0.9, top_k=20), None),
    "greedy": (requests(4, temperature=0.0), None),
    "many stop tokens": (requests(4, stop_token_ids=tuple(range(3, 12))), None),
}


def run(engine: StaticEngine, wanted: list[GenerationRequest], update_at: int | None) -> tuple[list[Completion], int]:
    """The completions, and the number of steps."""
    for request in wanted:
        engine.submit(request)
    done: dict[str, Completion] = {}
    steps = 0
    while len(done) < len(wanted):
        if steps == update_at:
            engine.update_weights(WeightUpdate(engine.version + 1, checksum(NEW), NEW))
        done |= {completion.request_id: completion for completion in engine.step().finished}
        steps += 1
        assert steps < 100
    return [done[request.id] for request in wanted], steps


def engine_on(where: str) -> StaticEngine:
    return StaticEngine(copy.deepcopy(MODELS[0]).to(where), slots=8, max_length=64, flatten=False)


def tokens(completions: list[Completion]) -> list[object]:
    return [(completion.token_ids, completion.weight_versions) for completion in completions]


def test_it_samples_what_the_cpu_samples_and_waits_once_a_step() -> None:
    on_cpu = engine_on("cpu")
    expected = {name: tokens(run(on_cpu, *scenario)[0]) for name, scenario in SCENARIOS.items()}
    with pretended_cuda() as device:
        engine = engine_on("cuda")
        assert "one CUDA graph each" in engine.progress().runner
        for name, (wanted, update_at) in SCENARIOS.items():
            device.waits.clear()
            device.operations.clear()
            found, steps = run(engine, wanted, update_at)
            assert tokens(found) == expected[name], name
            assert device.operations["attention, slow"] == 0
            if update_at is None:
                assert set(device.waits) == {"an event"}, name
                assert device.waits["an event"] <= steps, name
                assert device.operations["replay"] >= steps - 1, name


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

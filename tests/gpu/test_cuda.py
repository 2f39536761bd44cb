"""The engine and the trainer on a CUDA device. Skipped where there is none.

Run them with `pytest tests/gpu -m gpu` on a machine that has one.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelinerl
from pipelinerl.engine import LocalEngine, local
from pipelinerl.engine.sampler import uniforms
from pipelinerl.engine.static import StaticEngine, engine_for
from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import shared_memory
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.models import packed
from pipelinerl.models.attention import attend
from pipelinerl.models.device import pin
from pipelinerl.models.loading import Float32Head
from pipelinerl.models.packed import PackedRow, training_forward
from pipelinerl.models.state import checksum, device_checksum, device_digests_of, digests_of, named_weights
from pipelinerl.models.varlen import attention_of, varlen_reference
from pipelinerl.types import Segment
from pipelinerl.weights.delta import apply, encode
from pipelinerl.weights.receiving import SharedWeightReceiver
from pipelinerl.weights.sending import SharedWeightSender
from tests.parity import test_engine as parity
from tests.parity.models import CONFIGS, make_model
from tests.parity.test_engine import gaps_to_full_forwards, requests
from tests.unit.engine.engine_parts import request as request_of
from tests.unit.engine.engine_parts import serve, update_of
from tests.unit.models import test_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_log_probabilities_are_those_of_a_full_forward_on_the_cpu(family: str) -> None:
    reference = make_model(family)
    engine = LocalEngine(make_model(family).cuda(), slots=6, max_length=128, prefill_tokens=24)
    wanted = requests(10, temperature=1.0)
    for request, done in zip(wanted, engine.generate(wanted), strict=True):
        assert (gaps_to_full_forwards({0: reference}, request, done) < 1e-3).all()


@pytest.mark.parametrize(
    ("kind", "family", "dtype", "tolerance"),
    [(LocalEngine, "llama", torch.float32, 1e-3), (StaticEngine, "qwen3", torch.bfloat16, 0.3)],
)
def test_an_update_from_cpu_tensors_is_whole_and_takes_effect_at_once(
    kind: type[LocalEngine], family: str, dtype: torch.dtype, tolerance: float
) -> None:
    models = {version: make_model(family, seed=version).to(dtype) for version in range(2)}
    served = make_model(family).to(dtype).cuda()
    engine = kind(served, slots=4, max_length=128, kv_on_update="recompute")
    wanted, update = request_of("x", (5, 6, 7), 20, seed=1), update_of(models[1], version=1)
    done = serve(engine, [wanted], {8: update})["x"]
    assert checksum(named_weights(served)) == update.checksum
    assert [(span.version, span.end) for span in done.weight_versions] == [(0, 8), (1, 20)]
    assert (gaps_to_full_forwards(models, wanted, done) < tolerance).all()


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("counts", [[1] * 3, [1] * 64, [1, 5, 40, 1]], ids=["few rows", "rows", "rows and chunks"])
def test_attention_over_slots_is_the_reference(counts: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    slot, rows = 512, len(counts)
    used = [max(count, int(torch.randint(1, slot, (), generator=generator))) for count in counts]
    key, value = torch.randn(2, rows * slot + 1, 2, 64, generator=generator).to(torch.bfloat16)
    query = torch.randn(sum(counts), 12, 64, generator=generator).to(torch.bfloat16)
    order = torch.randperm(rows, generator=generator).tolist()
    begins = torch.tensor([0, *counts]).cumsum(0).int()
    places = torch.tensor([row * slot for row in [*order, rows]], dtype=torch.int32)
    options = {"scale": 0.125, "window_size": (-1 if window is None else window - 1, 0)}
    given = (query, key, value, begins, places)
    expected = varlen_reference(*given, max(counts), slot, seqused_k=torch.tensor(used, dtype=torch.int32), **options)
    attention = attention_of(query.cuda())
    on_gpu = (tensor.cuda() for tensor in given)
    found = attention(*on_gpu, max(counts), slot, seqused_k=torch.tensor(used, dtype=torch.int32).cuda(), **options)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt-neox"])
def test_one_call_for_all_sequences_of_a_row_has_the_gradients_of_buckets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads_of_16 = ("hidden_size", 64) if name == "gpt-neox" else ("head_dim", 16)  # FlashAttention has none of 12
    monkeypatch.setattr(CONFIGS[name], *heads_of_16)
    segments, found = test_packed.make_segments(test_packed.LENGTHS), []
    for once in (False, True):
        monkeypatch.setattr(packed, "_in_one_call", lambda _, once=once: once)
        model = test_packed.make_model(name).bfloat16().cuda()
        forward = training_forward(model)
        monkeypatch.setattr(packed, "attend", None if once else attend)  # must not be called
        logits_PV = forward(PackedRow.of(segments, "cuda")).float()
        (logits_PV * torch.arange(logits_PV.numel(), device="cuda").cos().view_as(logits_PV)).sum().backward()
        found.append(test_packed.gradients(model))
    for parameter in found[0]:
        of_buckets, of_call = (gradients[parameter].float().flatten() for gradients in found)
        similarity = torch.nn.functional.cosine_similarity(of_buckets, of_call, dim=0)
        assert similarity > 0.99, parameter


@pytest.mark.parametrize(
    ("name", "dtype", "least"),
    [
        ("llama", torch.float32, 0.9999),
        ("llama", torch.bfloat16, 0.99),
        ("mistral-window", torch.bfloat16, 0.99),
        ("gemma2", torch.bfloat16, 0.99),  # with soft caps: no kernel
    ],
)
def test_shared_prefixes_have_the_gradients_of_separate_sequences(
    name: str, dtype: torch.dtype, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "gemma2":
        monkeypatch.setattr(CONFIGS[name], "head_dim", 16)
    draw, segments = torch.Generator().manual_seed(3), []
    for length in (20, 35, 20, 9, 31):
        turns = [torch.randint(0, test_packed.VOCABULARY, (n,), generator=draw).tolist() for n in (length, 14)]
        for n in (3, 8, 12):
            answer = torch.randint(0, test_packed.VOCABULARY, (n,), generator=draw).tolist()
            ids = (*turns[0], *turns[1], *answer) if n > 3 else (*turns[0], *answer)
            segments.append(Segment(token_ids=ids, sampled=((len(ids) - n, len(ids)),)))
    found = []
    for shared in (0.0, 1.0):
        model = test_packed.make_model(name).to(dtype).cuda()
        forward, row = training_forward(model), PackedRow.of(segments, "cuda", least_shared=shared)
        assert (row.stops_T is None) == (shared == 1.0)
        logits_PV = forward(row).float()
        (logits_PV * torch.arange(logits_PV.numel(), device="cuda").cos().view_as(logits_PV)).sum().backward()
        found.append(test_packed.gradients(model))
    for parameter in found[0]:
        of_shared, of_separate = (gradients[parameter].float().flatten() for gradients in found)
        assert torch.nn.functional.cosine_similarity(of_shared, of_separate, dim=0) > least, parameter


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
def test_turns_continue_from_what_rows_hold(dtype: torch.dtype, tolerance: float, kv: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(parity, "TOLERANCE", tolerance)
    monkeypatch.setattr(parity, "make_model", lambda *named, **seed: make_model(*named, **seed).to(dtype))
    made = []

    def engine_on_device(model: Any, **settings: Any) -> LocalEngine:
        made.append(engine_for(model.cuda(), slots=6, max_length=parity.MAX_LENGTH, prefill_tokens=24, **settings))
        return made[-1]

    monkeypatch.setattr(parity, "engine_of", engine_on_device)
    parity.test_turns_continue_from_what_rows_hold("qwen3", kv)
    assert isinstance(made[0], StaticEngine) == (dtype == torch.bfloat16)


def test_graphs_give_what_plain_calls_give() -> None:
    wanted = requests(10, temperature=1.0)
    engines = [StaticEngine(make_model("qwen3").bfloat16().cuda(), slots=16, max_length=128) for _ in range(2)]
    assert all("compiled pieces" in engine.progress().runner for engine in engines)
    engines[1]._rows.launch = engines[1]._rows.step  # type: ignore[method-assign]
    replayed, called = (engine.generate(wanted) for engine in engines)
    assert [completion.token_ids for completion in replayed] == [completion.token_ids for completion in called]
    reference = make_model("qwen3").bfloat16()
    for request, done in zip(wanted, replayed, strict=True):
        assert (gaps_to_full_forwards({0: reference}, request, done) < 0.3).all()


def test_sampling_and_digests_on_the_device_are_those_on_the_cpu() -> None:
    keys, positions = torch.randint(-(2**62), 2**62, (1000,)), torch.randint(40_000, (1000,))
    assert torch.equal(uniforms(keys.cuda(), positions.cuda()).cpu(), uniforms(keys, positions))
    tensors = named_weights(make_model("qwen3").bfloat16())
    assert digests_of({name: tensor.cuda() for name, tensor in tensors.items()}) == digests_of(tensors)


def test_an_update_is_verified_by_sums_that_devices_compute_and_nothing_is_copied_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = make_model("qwen3", seed=1).bfloat16().cuda()
    served = make_model("qwen3").bfloat16().cuda()
    engine = LocalEngine(served, slots=4, max_length=128)
    fd, hub = shared_memory(), DirectMessages()
    with (
        closing(SharedWeightSender(fd, hub, 1)) as sender,
        closing(SharedWeightReceiver(fd, hub, "cuda")) as receiver,
    ):
        digest = sender.send(1, named_weights(trained))
        update = receiver.poll()
        assert update is not None
        assert all(tensor.is_pinned() for tensor in update.tensors.values())
        assert update.device_checksum == device_checksum(named_weights(trained))
        assert update.device_checksum == checksum(update.tensors, device_digests_of(update.tensors))
        monkeypatch.setattr(local, "checksum", None)  # it must not be called
        assert engine.update_weights(update).checksum == digest
        monkeypatch.undo()
        assert checksum(named_weights(served)) == digest
        changed = engine._runner.weights_changed

        def damaged() -> None:
            changed()
            named_weights(served)["model.norm.weight"].view(torch.int16)[3] ^= 1

        engine._runner.weights_changed = damaged  # type: ignore[method-assign]
        with pytest.raises(WeightUpdateError, match="holds weights of checksum"):
            engine.update_weights(update)
    os.close(fd)


def test_memory_that_can_not_be_pinned_is_used_as_it_is() -> None:
    memory_U8 = torch.zeros(1 << 20, dtype=torch.uint8)
    unpin = pin(memory_U8, torch.device("cuda"))
    pin(memory_U8, torch.device("cuda"))()  # CUDA refuses to pin it twice, and reports that in the next call that is checked
    assert float(torch.ones(3, device="cuda").sum()) == 3
    assert memory_U8.is_pinned()
    unpin()
    assert not memory_U8.is_pinned()


def test_the_float32_head_needs_no_float32_copies() -> None:
    head = torch.nn.Linear(64, 1000, bias=False).to(torch.bfloat16).cuda()
    given = torch.randn(32, 64).to(torch.bfloat16).cuda().requires_grad_()
    expected = given.float() @ head.weight.float().t()
    found = Float32Head(head)(given)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    found.log_softmax(-1)[:, 3].sum().backward()
    exact = torch.autograd.grad(expected.log_softmax(-1)[:, 3].sum(), given)[0]
    torch.testing.assert_close(given.grad, exact, atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_deltas_on_the_device_are_those_on_the_cpu() -> None:
    base_U8 = torch.randint(0, 256, (3 * 2**17 + 100,), dtype=torch.uint8)
    for share in (0.0, 0.01, 0.5):
        new_U8 = torch.where(torch.rand(base_U8.shape) < share, base_U8 + 1, base_U8)
        ours, theirs = encode(new_U8.cuda(), base_U8.cuda()), encode(new_U8, base_U8)
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.cpu(), theirs)
        buffer_U8 = base_U8.cuda()
        apply(ours, buffer_U8)
        assert torch.equal(buffer_U8.cpu(), new_U8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_learns_with_engine_and_trainer_on_the_device(dtype: str, tmp_path: Path) -> None:
    flags = "--engine.device cuda:0 --trainer.device cuda:0 --trainer.steps 40 --evaluation.problems 256 --metrics.view none"
    flags += " --model.dtype bfloat16 --model.head_dtype float32" if dtype == "bfloat16" else ""
    config = pipelinerl.load_config(None, [*flags.split(), "--run_dir", str(tmp_path / "run")])
    summary = pipelinerl.train(config).summary
    assert summary["eval_reward_after"] > summary["eval_reward_before"] + 0.2
    assert summary["ess_mean"] > 0.9

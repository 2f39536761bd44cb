"""The engine and the trainer on a CUDA device. Skipped, and said so, where there is none.

Run them with `pytest tests/gpu -m gpu` on a machine that has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipelinerl
from pipelinerl.engine import LocalEngine
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import GenerationRequest, SamplingParams
from pipelinerl.weights.delta import apply, encode
from tests.parity.models import CONFIGS, make_model
from tests.parity.test_engine import full_forward_logprobs, requests, run_with_updates

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
        rows = full_forward_logprobs(reference, request.prompt_ids, done.token_ids)[len(request.prompt_ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(done.logprobs)).abs().max() < 1e-3


def test_an_update_from_cpu_tensors_is_whole_and_takes_effect_at_once() -> None:
    models = {version: make_model("llama", seed=version) for version in range(2)}
    served = make_model("llama").cuda()
    engine = LocalEngine(served, slots=6, max_length=128, kv_on_update="recompute")
    tensors = named_weights(models[1])
    wanted = [GenerationRequest(id="x", prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=20, seed=1))]
    done = run_with_updates(engine, wanted, {8: WeightUpdate(1, checksum(tensors), tensors)})["x"]
    assert checksum(named_weights(served)) == checksum(tensors)
    for version, part in ((0, slice(0, 8)), (1, slice(8, 20))):
        rows = full_forward_logprobs(models[version], (5, 6, 7), done.token_ids)[2:-1]
        expected = rows.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert (expected[part] - torch.tensor(done.logprobs)[part]).abs().max() < 1e-3


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


def test_the_demo_learns_with_engine_and_trainer_on_the_device(tmp_path: Path) -> None:
    flags = "--engine.device cuda:0 --trainer.device cuda:0 --trainer.steps 40 --evaluation.problems 256 --metrics.view none"
    config = pipelinerl.load_config(None, [*flags.split(), "--run_dir", str(tmp_path / "run")])
    summary = pipelinerl.train(config).summary
    assert summary["eval_reward_after"] > summary["eval_reward_before"] + 0.2
    assert summary["ess_mean"] > 0.9

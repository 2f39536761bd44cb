"""The trainer and its weights on a device that is pretended: the numbers of the CPU, and few waits."""

from __future__ import annotations

import copy
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.checkpoint import CheckpointState
from pipelinerl.config.schema import LoraConfig, TrainerConfig
from pipelinerl.engine.static import StaticEngine
from pipelinerl.files import shared_memory
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.models import packed
from pipelinerl.models.loading import use_float32_head
from pipelinerl.models.lora import LoraModel
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.trainer.saving import write_checkpoint
from pipelinerl.trainer.step import Learner
from pipelinerl.weights.receiving import SharedWeightReceiver
from pipelinerl.weights.sending import SharedWeightSender
from tests.parity.models import make_model
from tests.pretend_cuda import pretended_cuda
from tests.unit.test_checkpoint import make_tokenizer
from tests.unit.trainer.test_trainer_step import make_samples

WAITS_A_STEP = 5
"""For the loss, the statistics, the gradient's norm, the optimizer's master weights, and whether weights are finite."""
WAITS_TO_SEND = 3
"""For the copies, whether weights are finite, and their sums."""


@pytest.mark.parametrize(("wide_head", "prompt"), [(False, 0), (False, 20), pytest.param(True, 0, marks=pytest.mark.slow)])
def test_steps_have_the_losses_of_the_cpu_and_a_bounded_number_of_waits(
    wide_head: bool, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where samples share a prompt."""
    monkeypatch.setattr(packed, "_in_one_call", lambda _: True)  # on the CPU, too: its numbers in buckets differ by rounding
    model = make_model("qwen3").bfloat16()
    samples = make_samples(model, prompt=prompt)
    if wide_head:
        use_float32_head(model)

    def learner(where: str, tokens: int) -> Learner:
        config = TrainerConfig(micro_batch_tokens=tokens)
        return Learner(copy.deepcopy(model).to(where), config, temperature=1.0)

    for tokens in (64, 256):
        expected = learner("cpu", tokens).step(samples, version=4)
        with pretended_cuda() as device:
            on_device = learner("cuda", tokens)
            device.waits.clear()
            found = on_device.step(samples, version=4)
            assert device.waits.total() <= WAITS_A_STEP, "none of them for a micro-batch"
            assert device.waits["a copy from the host"] == 0
        assert found.loss == pytest.approx(expected.loss, abs=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


def test_an_update_is_verified_by_the_device_and_waits_for_it_once() -> None:
    fd, hub = shared_memory(), DirectMessages()
    models = [make_model("qwen3", seed=seed).bfloat16() for seed in (1, 0)]
    with pretended_cuda() as device:
        trained, served = (model.to("cuda") for model in models)
        engine: Any = StaticEngine(served, slots=4, max_length=96, flatten=False)
        with (
            closing(SharedWeightSender(fd, hub, 1)) as sender,
            closing(SharedWeightReceiver(fd, hub, "cuda")) as receiver,
        ):
            device.waits.clear()
            digest = sender.send(1, named_weights(trained))
            assert device.waits["a stream"] == 1, "for the copies of all tensors"
            assert device.waits.total() <= WAITS_TO_SEND
            device.waits.clear()
            update = receiver.poll()
            assert update is not None
            assert not device.waits
            receipt = engine.update_weights(update)
            assert device.waits.total() == 1, "for the sums of its parameters"
        assert receipt.checksum == digest == checksum(named_weights(served))
    os.close(fd)
    assert torch.equal(served.model.norm.weight, trained.model.norm.weight)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_is_written_in_parts_of_which_the_host_has_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: bool
) -> None:
    monkeypatch.setattr("pipelinerl.models.device.PART", 1000)
    model = make_model("qwen3").bfloat16()
    samples = make_samples(model)
    with pretended_cuda() as device:
        model = model.to("cuda")
        lora = LoraModel(model, LoraConfig(rank=2), seed=0) if adapters else None
        learner = Learner(model, TrainerConfig(), temperature=1.0, lora=lora)
        learner.step(samples, version=0)
        expected = {
            "model.safetensors": {name: tensor.cpu() for name, tensor in learner.weights().items()},
            "optimizer.safetensors": {name: tensor.cpu() for name, tensor in learner.optimizer.state().items()},
        }
        device.waits.clear()
        device.most_pinned = 0
        parts: Any = {"model": learner, "optimizer": learner.save_optimizer, "tokenizer": make_tokenizer()}
        path = write_checkpoint(tmp_path, CheckpointState(version=1), **parts)()
        assert device.waits.keys() == {"an event"}, "nothing else is copied to the host"
        assert 0 < device.most_pinned <= 3 * 1000
    for name, tensors in expected.items():
        saved = load_file(path / name)
        assert saved.keys() == tensors.keys()
        assert all(torch.equal(saved[key], tensors[key]) for key in saved)

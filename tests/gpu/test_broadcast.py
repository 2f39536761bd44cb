"""Weights from a trainer's GPU to an engine's: nccl between two of them, gloo where they share one. Skipped without CUDA."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from pipelinerl.models.state import checksum, named_weights
from tests.parity.models import make_model
from tests.unit.weights.test_collective import BOUND_S, Rig, eventually, receipt, taken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("place", "backend", "arrives_on"),
    [("cuda:0", "gloo", "cpu"), pytest.param("cuda:1", "nccl", "cuda", marks=TWO)],
)
def test_each_version_gets_from_one_gpu_to_another(place: str, backend: str, arrives_on: str) -> None:
    with closing(Rig()) as rig:
        bounds = {
            "timeout_s": BOUND_S,
            "stall_s": BOUND_S / 2,
            "join_timeout_s": BOUND_S,
        }  # nccl's first start takes seconds
        sender = rig.sender(**bounds, bucket_bytes=1 << 16, device=torch.device("cuda:0"))
        receiver = rig.receiver(sender, device=torch.device(place), timeout_s=BOUND_S)
        for version in range(3):
            weights = named_weights(make_model("llama", seed=version).to("cuda:0"))
            digest = sender.send(version, weights)
            update = taken(receiver)
            assert {tensor.device.type for tensor in update.tensors.values()} == {arrives_on}
            assert checksum(update.tensors) == digest == checksum(weights)
            receiver.acknowledge(receipt(version, digest))
            eventually(lambda: not sender.unanswered())
        assert sender._backend == backend
        assert sender._staging_U8.device.type == arrives_on

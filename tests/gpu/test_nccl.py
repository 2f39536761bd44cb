"""Between GPUs: a sharded trainer over nccl with the one rank that one GPU allows, and weights from trainer to engine.

They go over nccl between two GPUs, and over gloo where trainer and engine share one.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.channel import listen
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.trainer.sharding import ranks
from tests.integration import sharded_parts as parts
from tests.parity.models import make_model
from tests.unit.group_parts import receipt
from tests.unit.weights.test_collective import BOUND_S, Rig, eventually, taken

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ["default", "untied", "checkpointing", "lora", "bfloat16", "kl", "kl_lora"]


def test_one_rank_over_nccl_equals_one_process(tmp_path: Path) -> None:
    parts.write_models(tmp_path)
    config = TrainerConfig(ranks=1, device="cuda")
    with ranks.join(config, 0, listen(), parts.KEY, start_s=60.0, stall_s=60.0) as team:
        for name in NAMES:
            parts.train_alone(tmp_path, name, tmp_path / "alone" / name, device="cuda")
            parts.train_as_rank(tmp_path, name, tmp_path / "rank" / name, team, device="cuda")
    for name in NAMES:
        ours, theirs = (
            msgspec.json.decode((tmp_path / who / name / "outcome.json").read_bytes(), type=parts.Outcome)
            for who in ("rank", "alone")
        )
        for step, expected in zip(ours.steps, theirs.steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-5), name
        weights, expected_weights = (load_file(tmp_path / who / name / "weights.safetensors") for who in ("rank", "alone"))
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected_weights[key], rtol=0.01, atol=1e-5, msg=f"{name}: {key}")


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("place", "backend", "arrives_on"),
    [("cuda:0", "gloo", "cpu"), pytest.param("cuda:1", "nccl", "cuda", marks=TWO)],
)
def test_each_version_gets_from_one_gpu_to_another(place: str, backend: str, arrives_on: str) -> None:
    with closing(Rig()) as rig:
        # nccl's first start takes seconds.
        bounds = {"timeout_s": BOUND_S, "stall_s": BOUND_S / 2, "join_timeout_s": BOUND_S}
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

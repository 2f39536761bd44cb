"""Weights from a trainer's GPU to an engine's: nccl between two of them, gloo where they share one. Skipped without CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.hub.client import HubClient
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from tests.parity.models import make_model
from tests.unit.hub.hub_parts import Place
from tests.unit.weights.test_collective import BOUND_S, Rig, eventually

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VERSIONS = 3

# An engine's process on the second GPU: it takes every version into tensors of its own, and answers with their checksum.
ENGINE = """
import json, socket, sys, time
import torch
from pipelinerl.hub.client import HubClient
from pipelinerl.models.state import checksum
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver

hub, versions, devices = HubClient(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]), set()
receiver = CollectiveWeightReceiver(hub, "secret", 0, engine="second", device=torch.device("cuda:1"))
for version in range(versions):
    while (update := receiver.poll()) is None:
        time.sleep(0.001)
    devices |= {str(tensor.device) for tensor in update.tensors.values()}
    held = {name: tensor.clone() for name, tensor in update.tensors.items()}
    receiver.acknowledge(
        UpdateReceipt(engine="second", version=version, checksum=checksum(held), pause_s=0.0, sequences_in_flight=0)
    )
print(json.dumps(sorted(devices)))
receiver.close()
hub.close()
"""


def model_on(device: str, seed: int) -> dict[str, torch.Tensor]:
    return named_weights(make_model("llama", seed=seed).to(device))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_carries_weights_from_one_gpu_to_another(tmp_path: Path) -> None:
    options: Any = {"timeout_s": BOUND_S, "bucket_bytes": 1 << 16, "device": torch.device("cuda:0")}
    with (
        HubServer(Place(tmp_path).hub) as server,
        closing(HubClient(server.connect(WorkerKind(follows=True)))) as hub,
        closing(CollectiveWeightSender("127.0.0.1", "secret", 1, hub, **options)) as sender,
        server.connect(WorkerKind(process=0)) as connected,
    ):
        command = [sys.executable, "-c", ENGINE, str(connected.fileno()), str(VERSIONS)]
        fds, folder = [connected.fileno()], Path(__file__).parents[2]
        with subprocess.Popen(command, cwd=folder, pass_fds=fds, stdout=subprocess.PIPE, text=True) as engine:
            for version in range(VERSIONS):
                weights = model_on("cuda:0", seed=version)
                digest = sender.send(version, weights)
                assert digest == checksum(weights)
                eventually(lambda: not sender.unanswered())
                assert [one.checksum for one in sender.receipts()] == [digest]
            assert sender._backend == "nccl"
            assert sender._staging_U8.device == torch.device("cuda:0")
            output, _ = engine.communicate(timeout=BOUND_S)
    assert engine.returncode == 0
    assert json.loads(output) == ["cuda:1"]


def test_gloo_carries_weights_where_both_ends_share_a_gpu() -> None:
    device = torch.device("cuda:0")
    with closing(Rig()) as rig:
        sender = rig.sender(timeout_s=BOUND_S, device=device)
        receiver = rig.receiver(sender, device=device)
        weights = model_on("cuda:0", seed=1)
        digest = sender.send(0, weights)
        eventually(lambda: receiver.offered() == 0)
        update = receiver.poll()
        assert update is not None
        assert checksum(update.tensors) == digest == checksum(weights)
        assert {tensor.device.type for tensor in update.tensors.values()} == {"cpu"}
        assert sender._backend == "gloo"

"""Which backend a broadcast uses: nccl where each end has a GPU of its own, else gloo."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from pipelinerl.models.state import named_weights
from pipelinerl.weights.broadcast.group import Gpu, choose_backend, gpu_of, staging_device
from tests.unit.weights.test_collective import BOUND_S, Rig, eventually, taken
from tests.unit.weights.test_collective import rig as rig  # noqa: PLC0414 - a fixture
from tests.unit.weights.test_weights import Tied

A, B, C = (Gpu(f"GPU-{name}", "2.29.7") for name in "abc")
NEWER_C = Gpu("GPU-c", "2.30.7")


@pytest.mark.parametrize(
    ("sender", "receivers", "why_gloo"),
    [
        (A, [B], ""),
        (A, [B, C], ""),
        (A, [A], "share a GPU"),
        (A, [B, B], "share a GPU"),
        (A, [B, None], "has no GPU"),
        (None, [B], "has no GPU"),
        (None, [None], "has no GPU"),
        (A, [NEWER_C], r"NCCL differ \(2.29.7, 2.30.7\)"),
        (A, [B, NEWER_C], r"NCCL differ \(2.29.7, 2.30.7\)"),
        (NEWER_C, [A, B], r"NCCL differ \(2.29.7, 2.30.7\)"),
    ],
)
def test_nccl_is_for_a_gpu_of_its_own_and_the_same_version_at_every_end(
    sender: Gpu | None, receivers: list[Gpu | None], why_gloo: str
) -> None:
    backend, why = choose_backend(sender, receivers)
    assert backend == ("gloo" if why_gloo else "nccl")
    assert re.search(why_gloo, why) if why_gloo else not why


def test_what_nccl_sends_stays_on_the_gpu_and_what_gloo_sends_does_not_go_there() -> None:
    gpu = torch.device("cuda:1")
    assert staging_device("nccl", gpu) == gpu
    assert staging_device("gloo", gpu) == torch.device("cpu")
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.parametrize(("last", "why"), [(None, "no GPU"), (NEWER_C, "NCCL differ")])
def test_receivers_say_which_gpu_they_have(
    rig: Rig, last: Gpu | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that has none, or another NCCL, is enough for gloo, which the sender says."""
    gpus = {"sender": [A], "receiver": [B, last]}
    for side, found in gpus.items():
        monkeypatch.setattr(f"pipelinerl.weights.broadcast.{side}.gpu_of", lambda _, found=found: found.pop(0))
    sender = rig.sender(2, timeout_s=BOUND_S)
    first = rig.receiver(sender, 0)
    eventually(lambda: len(gpus["receiver"]) == 1)
    sending = threading.Thread(target=sender.send, args=(0, named_weights(Tied())))
    sending.start()  # waits: where its copy has to be is not known yet
    receivers = [first, rig.receiver(sender, 1)]
    assert [taken(receiver).version for receiver in receivers] == [0, 0]
    sending.join()
    assert sender._backend == "gloo"
    assert why in caplog.text

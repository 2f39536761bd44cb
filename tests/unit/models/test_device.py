"""Transfers off a GPU: copies, which later writes do not change; memory that CUDA pins, or refuses to."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl.models import device
from pipelinerl.models.device import pin, to_device, to_host

CPU = torch.device("cpu")


def test_what_is_sent_is_as_it_was_then() -> None:
    array = np.arange(3)
    there = to_device(array, CPU)
    back = to_host(there)
    array += 1
    there += 5
    assert there.tolist() == [5, 6, 7]
    assert back().tolist() == [0, 1, 2]


def test_tensors_arrive_under_their_names_in_order_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PART", 2)
    tensors = {name: torch.full((3,), i, dtype=torch.uint8) for i, name in enumerate("ca")}
    found = [(name, array.tolist()) for name, array in device.arriving(tensors.items())]
    assert found == [("c", [0, 0]), ("c", [0]), ("a", [1, 1]), ("a", [1])]


@pytest.mark.parametrize("error", [0, 801])
def test_memory_is_pinned_until_it_is_unpinned_and_a_refusal_is_logged(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_U8, pinned = torch.zeros(100, dtype=torch.uint8), {}

    def register(address: int, size: int, _: int) -> int:
        if not error:
            pinned[address] = size
        return error

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    unpin = pin(memory_U8[7:20], CPU)
    assert pinned == ({} if error else {memory_U8.data_ptr(): 100})
    assert ["can't be pinned (CUDA error 801)" in message for message in caplog.messages] == [True] * bool(error)
    unpin()
    assert not pinned

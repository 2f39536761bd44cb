"""Transfers off a GPU: copies, which later writes do not change."""

from __future__ import annotations

import numpy as np
import torch

from pipelinerl.models.transfers import arriving, to_device, to_host

CPU = torch.device("cpu")


def test_what_is_sent_is_as_it_was_then() -> None:
    array = np.arange(3)
    there = to_device(array, CPU)
    back = to_host(there)
    array += 1
    there += 5
    assert there.tolist() == [5, 6, 7]
    assert back().tolist() == [0, 1, 2]


def test_tensors_arrive_under_their_names_in_order() -> None:
    tensors = {name: torch.full((2,), i) for i, name in enumerate("cab")}
    assert [(name, array.tolist()) for name, array in arriving(tensors)] == [("c", [0, 0]), ("a", [1, 1]), ("b", [2, 2])]

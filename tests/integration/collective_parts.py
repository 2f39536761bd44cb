"""A trainer and engines that only send and take weights, each for a process of its own: see `test_collective.py`."""

from __future__ import annotations

import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.hub.client import HubClient
from pipelinerl.models.state import checksum
from pipelinerl.types import Encoding, UpdateReceipt
from pipelinerl.weights.broadcast.group import Group
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender

LAST = 6
KEY = "a key that only this test has"


class Doom(msgspec.Struct, frozen=True):
    """The process ends itself by the signal `end`: when it has taken version `at`, `between` two updates, or in the `middle`
    of the broadcast of version `at`."""

    end: signal.Signals
    when: str
    at: int

    def strike(self) -> None:
        os.kill(os.getpid(), self.end)


def trainer(doom: Doom | None, words: Connection, hub: socket.socket, encoding: Encoding = "full") -> None:
    _end_in_the_middle(doom)
    options: Any = {"timeout_s": 30, "stall_s": 3, "bucket_bytes": 1 << 20, "encoding": encoding}
    sender = CollectiveWeightSender("127.0.0.1", KEY, 3, HubClient(hub), **options)
    versions: list[int] = []
    error = None
    try:
        for version in range(LAST + 1):
            sender.send(version, weights_of(version))
            versions += [one.version for one in sender.receipts()]
        while sender.unanswered():
            time.sleep(0.01)
            versions += [one.version for one in sender.receipts()]
        versions += [one.version for one in sender.receipts()]
        sender.close()
    except WeightUpdateError as caught:
        error = str(caught)  # And it ends without closing anything, as the worst of owners would.
    words.send({"versions": versions, "error": error})


def engine(doom: Doom | None, words: Connection, hub: socket.socket, index: int) -> None:
    """It holds a copy of the weights it took last; at the end it says whether they are exactly those of one version."""
    _end_in_the_middle(doom)
    name = f"engine-{index}"
    receiver = CollectiveWeightReceiver(HubClient(hub), KEY, index, engine=name)
    held, version, error = None, -1, None
    try:
        while version < LAST:
            if receiver._group is not None and receiver._group.problem is not None and receiver._offer is None:
                raise receiver._group.problem
            if receiver.offered() is None:
                time.sleep(0.001)
                continue
            update = receiver.poll()
            assert update is not None
            assert update.version == version + 1
            assert update.tensors["embed"].data_ptr() == update.tensors["head"].data_ptr()
            held = {name: tensor.clone() for name, tensor in update.tensors.items()}
            version = update.version
            receiver.acknowledge(
                UpdateReceipt(engine=name, version=version, checksum=checksum(held), pause_s=0.0, sequences_in_flight=0)
            )
            if doom is not None and doom.when == "between" and version == doom.at:
                doom.strike()
    except WeightUpdateError as caught:
        error = str(caught)
        time.sleep(1)  # an engine does not end at once, and the sender hears that this one is not lost
    exact = held is None or checksum(held) == checksum(weights_of(version))
    words.send({"version": version, "exact": exact, "error": error})
    if error is None:
        receiver.close()


def weights_of(version: int) -> dict[str, torch.Tensor]:
    big = torch.full((2000, 4000), float(version))  # 32 MB: more than the sockets between two processes hold
    return {
        "embed": big,
        "half": torch.full((9, 3), version, dtype=torch.bfloat16),
        "head": big,
        "scale": torch.tensor(version),
        "none": torch.zeros(0),
        "flags": torch.full((7,), version % 2, dtype=torch.bool),
    }


def _end_in_the_middle(doom: Doom | None) -> None:
    if doom is None or doom.when != "middle":
        return
    whole, broadcasts = Group.broadcast, 0

    def partly(self: Group, flat: torch.Tensor, bucket_bytes: int, check: Any) -> None:
        nonlocal broadcasts
        broadcasts += 1
        if broadcasts == doom.at + 1:
            whole(self, flat[: 3 * bucket_bytes], bucket_bytes, check)
            doom.strike()
        whole(self, flat, bucket_bytes, check)

    Group.broadcast = partly  # type: ignore[method-assign]

"""Weights arrive whole, exact and in order, or not at all; tied parameters stay one tensor."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import shared_memory
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.models.adapters import tensors_of
from pipelinerl.models.state import checksum, load_weights, named_weights
from pipelinerl.serving.incoming import read_file
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights import receiving, sending
from pipelinerl.weights.layout import mapped
from pipelinerl.weights.receiving import Receiver, SharedWeightReceiver
from pipelinerl.weights.sending import MemoryWeightSender, Sender, SharedWeightSender, WeightFolder
from tests.limits import small_files
from tests.unit.group_parts import receipt
from tests.unit.weights.relay import Relay


class Tied(nn.Module):
    """Embedding and head share a matrix; one buffer is persistent, one is not."""

    def __init__(self, seed: int = 0, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.randn(()))
        self.register_buffer("cache", torch.randn(3), persistent=False)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# A model's weights


# Both kinds of hand-over, in one process


class Shared:
    """A shared file, and the connections of both sides."""

    def __init__(self) -> None:
        self.fd, self.relay = shared_memory(), Relay()

    def sender(self, engines: int = 1, **options: Any) -> SharedWeightSender:
        return SharedWeightSender(self.fd, self.relay.trainer, engines, **options)

    def receiver(self, index: int = 0, device: str = "cpu") -> SharedWeightReceiver:
        """Of a process that is ready for weights."""
        receiver = SharedWeightReceiver(self.fd, self.relay.engine(index), device)
        assert receiver.poll() is None
        return receiver


@pytest.fixture
def file() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    os.close(shared.fd)


Ends = tuple[Sender, Receiver]


@pytest.fixture(params=["memory", "shared"])
def ends(request: pytest.FixtureRequest, file: Shared) -> Ends:
    if request.param == "shared":
        return file.sender(timeout_s=0.05), file.receiver()
    messages = DirectMessages()
    sender = MemoryWeightSender(messages)
    return sender, Receiver(messages, sender.tensors)


def test_updates_arrive_exactly_and_once(ends: Ends) -> None:
    sender, receiver = ends
    engine, begin_s = Tied(seed=99), time.monotonic()
    assert sender.transfer is None
    assert receiver.poll() is None
    assert list(sender.receipts()) == []
    for version in (0, 1, 5, 6):
        model, weights = Tied(seed=version), named_weights(Tied(seed=version))
        digest = sender.send(version, named_weights(model))
        with torch.no_grad():
            model.embed.weight.add_(1)  # what was sent is a copy
        assert digest == checksum(weights)
        assert receiver.offered() == receiver.offered() == version
        update = receiver.poll()
        assert update is not None
        assert update[:2] == (version, digest)
        assert receiver.offered() is receiver.poll() is None
        assert same(dict(update.tensors), weights)
        assert update.tensors["head.weight"].data_ptr() == update.tensors["embed.weight"].data_ptr()
        load_weights(named_weights(engine), update.tensors)
        echo = receipt(version, checksum(named_weights(engine)))
        receiver.acknowledge(echo)
        assert list(sender.receipts()) == [echo]
        assert list(sender.receipts()) == []
        size = sum(weight.nbytes for name, weight in weights.items() if name != "head.weight")
        assert (transfer := sender.transfer) is not None
        assert (transfer.version, transfer.encoding, transfer.bytes) == (version, "full", size)
        assert 0 < transfer.time_s < time.monotonic() - begin_s
    sender.close()
    receiver.close()


def test_of_an_adapter_only_its_own_tensors_are_sent(file: Shared) -> None:
    sender, receiver, whole = file.sender(encoding="adapter"), file.receiver(), named_weights(Tied())
    for version in (0, 1):
        adapter = tensors_of({"layer": (torch.randn(2, 3), torch.randn(5, 2), 1 / 3)})
        digest = sender.send(version, whole, adapter)
        update = receiver.poll()
        assert update is not None
        assert (update.checksum, update.adapter) == (digest, True) == (checksum(whole), True)
        assert same(dict(update.tensors), adapter)
        assert (transfer := sender.transfer) is not None
        assert (transfer.encoding, transfer.bytes) == ("adapter", 4 * (2 * 3 + 5 * 2 + 1))
        receiver.acknowledge(receipt(version, digest))
    sender.send(2, whole, adapter)
    mapped(file.fd)["layer.A"][0, 0] += 1
    with pytest.raises(WeightUpdateError, match="weights of version 2 arrived damaged"):
        receiver.poll()


def test_versions_rise_and_only_what_was_taken_is_acknowledged(ends: Ends) -> None:
    sender, receiver = ends

    def refused() -> None:
        with pytest.raises(ValueError, match="waiting for a receipt"):
            receiver.acknowledge(receipt(3, ""))

    refused()
    digest = sender.send(3, named_weights(Tied()))
    refused()
    assert receiver.poll() is not None
    receiver.acknowledge(receipt(3, digest))
    refused()
    for version in (3, 2):
        with pytest.raises(WeightUpdateError, match=f"must rise: {version} was sent after 3"):
            sender.send(version, named_weights(Tied()))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (receipt(0, "0" * 32), "'engine-0' says it took weights of version 0, but holds others: checksum 000"),
        (receipt(0, "", error="out of memory"), "did not apply weights of version 0: out of memory"),
    ],
)
def test_a_receipt_for_anything_else_is_an_error_from_then_on(ends: Ends, answer: UpdateReceipt, complaint: str) -> None:
    sender, receiver = ends
    sender.send(0, named_weights(Tied()))
    receiver.poll()
    receiver.acknowledge(answer)
    for _ in range(2):
        with pytest.raises(WeightUpdateError, match=complaint):
            sender.receipts()
        with pytest.raises(WeightUpdateError, match=complaint):
            sender.send(1, named_weights(Tied()))


# Shared memory


def test_changed_weights_are_refused(file: Shared) -> None:
    sender, weights = file.sender(), named_weights(Tied())
    sender.send(0, weights)
    for changed in (
        {**weights, "tail": torch.zeros(1)},
        {**weights, **dict.fromkeys(["embed.weight", "head.weight"], torch.zeros(12, 6))},
        {name: weight for name, weight in weights.items() if name != "middle.bias"},
        {**weights, "scale": weights["scale"].double()},
        {**weights, "head.weight": weights["head.weight"].clone()},
    ):
        with pytest.raises(WeightUpdateError, match="differ from those of earlier updates"):
            sender.send(1, changed)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_gpus_pin_the_buffers_until_both_ends_close_and_the_host_hashes_what_they_will_not_verify(
    on_gpu: bool, file: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_gpu`: the trainer's weights. The engine is on a GPU anyway."""
    calls: list[str] = []

    def pin(tensor: Tensor, device: torch.device) -> Callable[[], None]:
        calls.append(f"{device} pins {tensor.untyped_storage().nbytes() == os.fstat(file.fd).st_size}")
        return lambda: calls.append(f"{device} unpins")

    monkeypatch.setattr("pipelinerl.models.device.pin", pin)
    monkeypatch.setattr(receiving, "checksum", lambda tensors: calls.append("host hashes") or checksum(tensors))
    monkeypatch.setattr(sending, "on_gpu", lambda _: on_gpu)
    monkeypatch.setattr(sending, "device_checksum", lambda _: "of the device")
    sender, receiver = file.sender(), file.receiver(device="cuda:1")
    for version, scale in enumerate((1.0, math.nan)):
        weights = named_weights(Tied()) | {"scale": torch.tensor(scale)}
        digest = sender.send(version, weights)
        update = receiver.poll()
        assert update is not None
        assert update.device_checksum == ("of the device" if on_gpu and version == 0 else "")
        receiver.acknowledge(receipt(version, digest))
    receiver.close()
    sender.close()
    if on_gpu:
        assert calls == ["cpu pins True", "cuda:1 pins True", "host hashes", "cuda:1 unpins", "cpu unpins"]
    else:
        assert calls == ["cuda:1 pins True", "host hashes", "host hashes", "cuda:1 unpins"]


def test_damage_in_the_buffer_is_found(file: Shared) -> None:
    sender, receiver = file.sender(), file.receiver()
    weights = {"x": torch.arange(100, dtype=torch.int64)}
    digest = sender.send(0, weights)
    contents = os.pread(file.fd, os.fstat(file.fd).st_size, 0)
    os.pwrite(file.fd, b"\xff", contents.index(weights["x"].numpy().tobytes()) + 500)
    with pytest.raises(WeightUpdateError, match=f"version 0 arrived damaged: checksum .*, sent {digest}"):
        receiver.poll()


def test_an_engine_that_does_not_answer_is_named(file: Shared) -> None:
    sender = file.sender(2, timeout_s=0.02)
    receivers = [file.receiver(index) for index in range(2)]
    digest = sender.send(0, named_weights(Tied()))
    views = [update.tensors for receiver in receivers if (update := receiver.poll()) is not None]
    receivers[0].acknowledge(receipt(0, digest, engine="left"))
    assert list(sender.unanswered()) == ["number 1"]
    with pytest.raises(WeightUpdateError, match=r"engine number 1 did not answer weights of version 0 in the [\d.]+ s"):
        sender.send(1, named_weights(Tied(seed=1)))
    assert checksum(views[1]) == digest, "views hold until the update is answered"
    receivers[1].acknowledge(receipt(0, digest, engine="right"))
    assert list(sender.unanswered()) == []
    sender.send(1, named_weights(Tied()))
    with pytest.raises(WeightUpdateError, match=r"engine number 0 \(left\), number 1 \(right\) did not answer"):
        sender.send(2, named_weights(Tied()))
    receivers[1].close()
    sender.close()
    assert checksum(views[1]) == digest, "and views of the last one for ever"
    assert {one.engine for one in sender.receipts()} == {"left", "right"}


def test_an_engine_that_died_is_not_waited_for_until_its_replacement_asks(file: Shared) -> None:
    """The first process dies with version 1 in its hands. None takes 2, until the second one asks; then 3 waits for it."""
    sender = file.sender(timeout_s=0.05)
    digest = sender.send(0, named_weights(Tied()))
    first = SharedWeightReceiver(file.fd, file.relay.engine())
    assert first.offered() is None, "it has loaded longer than the trainer, and asks"
    assert list(sender.unanswered()) == ["number 0"]
    assert first.poll() is not None
    first.acknowledge(receipt(0, digest))
    sender.send(1, named_weights(Tied(seed=1)))
    assert first.poll() is not None
    file.relay.lose(0)
    digest = sender.send(2, named_weights(Tied(seed=2)))
    assert not sender.unanswered()
    second = SharedWeightReceiver(file.fd, file.relay.engine())
    assert second.offered() is None, "what was offered to the first one is not offered to it"
    with pytest.raises(WeightUpdateError, match="did not answer weights of version 2"):
        sender.send(3, named_weights(Tied(seed=3)))
    update = second.poll()
    assert update is not None
    assert (update.version, checksum(update.tensors)) == (2, digest), "the buffer was not written"
    second.acknowledge(receipt(2, digest))
    assert second.poll() is None
    sender.send(3, named_weights(Tied(seed=3)))
    assert [one.version for one in sender.receipts()] == [0, 2]


def test_no_room_is_said_with_numbers(file: Shared) -> None:
    sender = file.sender()
    with small_files(1 << 20), pytest.raises(WeightUpdateError, match=r"no room for a copy of the weights \(4 MB\)"):
        sender.send(0, {"x": torch.zeros(1 << 20)})


# Files for engine servers


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def test_files_are_written_in_turn_and_are_what_safetensors_reads(tmp_path: Path) -> None:
    """The previous one stays, for a server that is started again while the next one is written."""
    relay = Relay()
    torch.manual_seed(0)
    others = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(2, 6).T,
        "odd": torch.ones(3) > 0,
    }
    with closing(SharedWeightSender(WeightFolder(tmp_path), relay.trainer, 1)) as sender:
        receiver = Receiver(relay.engine())
        assert receiver.poll() is None
        sent: list[tuple[Path, str]] = []
        for version in range(4):
            weights = {**named_weights(Tied(version)), **others}
            digest = sender.send(version, weights)
            update = receiver.poll()
            assert update is not None
            assert (update.version, update.checksum, update.tensors) == (version, digest, {})
            sent.append((Path(update.path), digest))
            for path, earlier in sent[-2:]:
                assert checksum(read_file(path)) == earlier
            assert same(read_file(sent[-1][0]), weights)
            assert load_file(sent[-1][0]).keys() == weights.keys() - {"head.weight"}
            receiver.acknowledge(receipt(version, digest))
        assert [path for path, _ in sent[:2]] == [path for path, _ in sent[2:]] == files(tmp_path)[::-1]
    assert not list(tmp_path.iterdir())


def test_the_last_file_stays_until_it_is_acknowledged_or_the_run_is_ending(tmp_path: Path) -> None:
    ending = threading.Event()
    for answers in (True, False):
        relay = Relay()
        sender = SharedWeightSender(WeightFolder(tmp_path), relay.trainer, 1, give_up=ending.is_set)
        receiver = Receiver(relay.engine())
        assert receiver.poll() is None
        digest = sender.send(1, named_weights(Tied()))
        assert (update := receiver.poll()) is not None
        with ThreadPoolExecutor(1) as pool:
            closing_sender = pool.submit(sender.close)
            time.sleep(0.1)
            assert Path(update.path).is_file()
            if answers:
                receiver.acknowledge(receipt(1, digest))
            else:
                ending.set()
            closing_sender.result(10)
        assert not list(tmp_path.iterdir())


def test_the_first_directory_with_room_is_taken_and_the_error_names_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"  # in a file system that can only be read; root may write to a folder of any mode
    there = tmp_path / "there"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
    for directory in (locked, there):
        directory.mkdir()
    with closing(SharedWeightSender(WeightFolder(tmp_path / "missing", locked, there), Relay().trainer, 0)) as sender:
        sender.send(0, named_weights(Tied()))
        assert len(files(there)) == 2
    with pytest.raises(WeightUpdateError, match=rf"no room .*{tmp_path / 'missing'}"):
        SharedWeightSender(WeightFolder(tmp_path / "missing"), Relay().trainer, 0).send(0, named_weights(Tied()))


def test_what_a_dead_process_left_is_removed_but_not_what_a_living_one_uses(tmp_path: Path) -> None:
    dead, living = tmp_path / "pipelinerl-weights-1-dead", WeightFolder(tmp_path)
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "0.safetensors").touch()
    kept = living.open(1)
    assert not dead.exists()
    with closing(WeightFolder(tmp_path)) as another:
        another.open(1)
        assert all(Path(path).is_file() for path in kept)
    living.close()
    assert list(tmp_path.iterdir()) == []

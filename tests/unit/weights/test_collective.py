"""Weights over a collective arrive as over shared memory: whole, exact, in order; a missing member is named."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pipelinerl.channel import listen
from pipelinerl.errors import BroadcastEndedError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import TYPES, checksum, named_weights
from pipelinerl.serving.wire import ProcessGroupRequest
from pipelinerl.weights.broadcast.group import PROTOCOL, BroadcastGroup, Gpu, choose_backend
from pipelinerl.weights.broadcast.receiver import BroadcastReceiver, CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from pipelinerl.weights.layout import decode_layout, layout_of
from pipelinerl.weights.receiving import Receiver
from tests.unit.group_parts import receipt
from tests.unit.weights.relay import Relay
from tests.unit.weights.test_weights import Tied

BOUND_S = 120.0
KEY = "a key that only this test has"


def eventually(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Rig:
    """A sender and receivers in this process, with the hub between them, closed at the end of the test."""

    def __init__(self) -> None:
        self.relay = Relay()
        self._closing: list[Callable[[], None]] = []

    def sender(self, receivers: int = 1, *, key: str = KEY, **options: Any) -> CollectiveWeightSender:
        self.relay = Relay()
        options = {"timeout_s": 0.3, "stall_s": 5.0, "join_timeout_s": 10.0, **options}
        sender = CollectiveWeightSender("127.0.0.1", key, receivers, self.relay.trainer, **options)
        self._closing.append(sender.close)
        return sender

    def receiver(self, sender: CollectiveWeightSender, index: int = 0, **options: Any) -> CollectiveWeightReceiver:
        """Of a generation process, which is ready for weights."""
        options = {"key": KEY, "name": f"engine-{index}", "timeout_s": 10.0, **options}
        receiver = CollectiveWeightReceiver(self.relay.engine(index), index=index, **options)
        self._closing.insert(0, receiver.close)
        assert receiver.offered() is None
        sender.unanswered()  # takes what it asks
        assert receiver.offered() is None
        return receiver

    def server(self, port: int, index: int = 0, **options: Any) -> BroadcastReceiver:
        """Of an engine server."""
        options = {"key": KEY, "name": f"engine-{index}", "timeout_s": 10.0, **options}
        receiver = BroadcastReceiver(ProcessGroupRequest(host="127.0.0.1", port=port, index=index, **options))
        self._closing.insert(0, receiver.close)
        return receiver

    def coordinator(self, sender: CollectiveWeightSender) -> Receiver:
        coordinator = Receiver(self.relay.engine(0))
        assert coordinator.offered() is None
        sender.unanswered()
        assert coordinator.offered() is None
        assert coordinator.meeting is not None
        assert (coordinator.meeting.host, coordinator.meeting.port) == (sender.host, sender.port)
        return coordinator

    def close(self) -> None:
        for close in self._closing:
            close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def taken(receiver: CollectiveWeightReceiver) -> WeightUpdate:
    eventually(lambda: receiver.offered() is not None)
    update = receiver.poll()
    assert update is not None
    return update


def failure(sender: CollectiveWeightSender) -> WeightUpdateError:
    """What `receipts` raises, when it does."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        try:
            sender.receipts()
        except WeightUpdateError as error:
            return error
        time.sleep(0.005)
    raise AssertionError("no problem came up")


def problem(receiver: BroadcastReceiver) -> str:
    """Why it receives nothing any more."""
    eventually(lambda: receiver.problem)
    assert receiver.problem is not None
    return str(receiver.problem)


# What arrives


def test_a_run_that_ends_is_not_waited_for(rig: Rig) -> None:
    ending = threading.Event()
    sender = rig.sender(timeout_s=100.0, join_timeout_s=100.0, give_up=ending.is_set)
    sender.send(0, named_weights(Tied()))
    ending.set()
    assert sender.send(1, named_weights(Tied())) == ""
    sender.close()


# Deltas


def weights_of(version: int) -> dict[str, Tensor]:
    """Weights of every type; each version changes few of them."""
    torch.manual_seed(0)
    tensors = {
        f"{dtype}": torch.randint(0, 2, (50, 41)).to(dtype) for dtype in (*TYPES, torch.float8_e4m3fn, torch.complex64)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7)}
    tensors["tied"] = tensors["torch.bfloat16"]
    tensors["nan"] = torch.full((300,), float("nan"))
    for step in range(1, version + 1):
        for name in ("torch.float32", "torch.bfloat16", "torch.bool", "nan"):
            tensors[name].view(-1)[7 * step] = -0.0 if step % 2 else float("nan")
        tensors["nan"].view(torch.int32)[step] ^= step
    return tensors


class Fleet:
    """A sender and receivers that take every update at once and echo its checksum."""

    def __init__(self, rig: Rig, count: int = 3, **options: Any) -> None:
        self.sender = rig.sender(count, **{"encoding": "delta", "bucket_bytes": 4096, "timeout_s": BOUND_S} | options)
        self.receivers = [rig.receiver(self.sender, index) for index in range(count)]

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """Send, and compare what arrives bit by bit. Returns the encoding, and its share of all bytes in percent."""
        digest = self.sender.send(version, tensors)
        for receiver in self.receivers:
            update = taken(receiver)
            assert update[:2] == (version, digest)
            assert checksum(update.tensors) == digest == checksum(tensors)
            receiver.acknowledge(receipt(version, digest))
        eventually(lambda: not self.sender.unanswered())
        self.sender.receipts()
        transfer = self.sender.transfer
        assert transfer is not None
        assert transfer.version == version
        return transfer.encoding, round(100 * transfer.bytes / layout_of(tensors).buffer_bytes)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_every_bit_of_every_type_arrives_in_buckets_that_cut_tensors(encoding: str, rig: Rig) -> None:
    fleet = Fleet(rig, encoding=encoding, bucket_bytes=900)
    assert fleet.send(0, weights_of(0)) == ("full", 100)
    sent = [fleet.send(version, weights_of(version)) for version in (1, 2, 5)]
    assert all(update == ("full", 100) or (update[0] == "delta" and update[1] <= 1) for update in sent)
    assert fleet.send(9, weights_of(5)) == ((encoding, 0) if encoding == "delta" else ("full", 100)), "nothing has changed"
    assert fleet.send(10, weights_of(0))[0] == encoding, "back to the first weights"


def test_an_update_that_a_delta_would_not_shorten_is_sent_in_full_and_is_the_next_base(rig: Rig) -> None:
    torch.manual_seed(0)
    fleet = Fleet(rig, bucket_bytes=1 << 20)
    others = {"weight": torch.randn(100_000)}
    assert fleet.send(0, {"weight": torch.randn(100_000)}) == ("full", 100)
    assert fleet.send(1, others) == ("full", 100)
    others["weight"][5] = 0.0
    assert fleet.send(2, others) == ("delta", 0)


@pytest.mark.parametrize(
    ("encoding", "damage", "error"),
    [
        ("full", "in what arrives", "weights of version 1 arrived damaged"),
        ("delta", "in what arrives", "weights of version 1 arrived damaged"),
        ("delta", "malformed", "the delta of a weight update is malformed"),
        ("delta", "in the base", "weights of version 1 arrived damaged"),
    ],
)
def test_weights_that_differ_from_those_sent_are_applied_by_nobody(
    rig: Rig, encoding: str, damage: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(rig, encoding=encoding)
    fleet.send(0, weights_of(0))
    victim = group_of(fleet.receivers[1])
    if damage == "in the base":
        victim._buffer_U8[1000] ^= 1
    broadcast = BroadcastGroup.broadcast

    def damaged(group: BroadcastGroup, flat_U8: Tensor, check: Callable[[], None]) -> None:
        broadcast(group, flat_U8, check)
        if group._rendezvous is victim._rendezvous:
            flat_U8[0 if damage == "malformed" else -3] ^= 255

    if damage != "in the base":
        monkeypatch.setattr(BroadcastGroup, "broadcast", damaged)
    fleet.sender.send(1, weights_of(1))
    expected = rf"engine number 1 \(engine-1\) can't receive weights: {error}"
    caught = failure(fleet.sender)
    assert re.search(expected, str(caught))
    assert not isinstance(caught, BroadcastEndedError), "it would happen again"
    with pytest.raises(WeightUpdateError, match=expected):
        fleet.sender.send(2, weights_of(2))
    with pytest.raises(WeightUpdateError, match=error):
        fleet.receivers[1].offered()
    assert fleet.receivers[0].offered() is None


# Who is missing, or does not belong


def group_of(receiver: CollectiveWeightReceiver) -> BroadcastReceiver:
    assert receiver._group is not None
    return receiver._group


def test_an_engine_that_never_comes_is_named(rig: Rig) -> None:
    sender = rig.sender(2, join_timeout_s=0.5)
    rig.receiver(sender, 0)
    sender.send(0, named_weights(Tied()))
    expected = f"engine number 1 did not connect to 127.0.0.1:{sender.port} in"
    assert expected in str(failure(sender))
    with pytest.raises(WeightUpdateError, match=expected):
        sender.send(1, named_weights(Tied()))


def test_a_sender_that_is_not_there(rig: Rig) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        receiver = rig.server(port)
        assert f"the weight sender at 127.0.0.1:{port} can't be reached" in problem(receiver)
    with pytest.raises(WeightUpdateError, match="can't be reached"):
        receiver.wait_joined(BOUND_S)


def test_a_receiver_with_another_key_is_refused_and_the_others_go_on(rig: Rig) -> None:
    sender = rig.sender()
    assert "does not have the key" in problem(rig.server(sender.port, key="guessed"))
    receiver = rig.receiver(sender)
    sender.send(0, named_weights(Tied()))
    assert taken(receiver).version == 0


def test_another_protocol_is_told_apart(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.weights.broadcast.receiver.PROTOCOL", "weights-0")
    sender = rig.sender()
    receiver = rig.server(sender.port)
    expected = f"it uses weights-0, the weight sender {PROTOCOL}: install the same version"
    assert expected in problem(receiver)
    assert f"engine number 0 (engine-0) can't receive weights: {expected}" in str(failure(sender))


# Who dies, and when


@pytest.mark.slow
def test_a_receiver_that_is_gone_is_named(rig: Rig) -> None:
    sender = rig.sender(2, stall_s=1.5)
    receivers = [rig.receiver(sender, index) for index in range(2)]
    digest = sender.send(0, named_weights(Tied()))
    for receiver in receivers:
        taken(receiver)
        receiver.acknowledge(receipt(0, digest))
    eventually(lambda: not sender.unanswered())
    group_of(receivers[1])._store = None  # it says nothing any more
    receivers[1].close()
    assert len(sender.receipts()) == 2, "it has answered: nobody waits for it"
    sender.send(1, named_weights(Tied()))
    caught = failure(sender)
    assert isinstance(caught, BroadcastEndedError)
    assert re.search(r"^engine number 1 \(engine-1\) is gone, or stopped: ", str(caught))
    assert receivers[0].offered() is None, "it is applied by nobody"


def test_a_sender_that_dies_is_noticed_after_the_last_whole_update(rig: Rig) -> None:
    sender = rig.sender()
    server = rig.server(sender.port)
    digest = sender.send(0, named_weights(Tied()))
    eventually(server.newest)
    sender.close()
    assert "has closed" in problem(server)
    update = server.newest()
    assert update is not None
    assert checksum(update.tensors) == digest


def test_a_receiver_that_is_closed_does_not_wait_for_its_group(rig: Rig) -> None:
    receiver = rig.server(rig.sender(2).port, timeout_s=BOUND_S)
    closing = threading.Timer(0.1, receiver.close)
    closing.start()
    with pytest.raises(WeightUpdateError, match="this receiver of weights has closed"):
        receiver.wait_joined(BOUND_S)
    closing.join()


# Servers receive, and a coordinator says when they take it


def test_an_update_is_offered_once_all_servers_have_it_and_one_answer_is_for_all(rig: Rig) -> None:
    sender = rig.sender(2, engines=1)
    coordinator, servers = rig.coordinator(sender), [rig.server(sender.port, 0)]
    for version in (0, 3):
        digest = sender.send(version, named_weights(Tied(seed=version)))
        if version == 0:
            time.sleep(0.05)
            assert coordinator.offered() is None, "one is not there yet"
            servers.append(rig.server(sender.port, 1))
        eventually(lambda: coordinator.offered() is not None)
        for server in servers:
            arrived = server.newest()
            assert arrived is not None
            assert (arrived.version, checksum(arrived.tensors)) == (version, digest)
        assert coordinator.poll() == WeightUpdate(version, digest, {})
        assert coordinator.poll() is None
        assert next(iter(sender.unanswered())).startswith("number 0")
        coordinator.acknowledge(receipt(version, digest))
        assert not sender.unanswered()
        assert [one.version for one in sender.receipts()] == [version]
    with pytest.raises(ValueError, match="no weight update"):
        coordinator.acknowledge(receipt(3, digest))


def test_a_sender_listens_at_one_address() -> None:
    for host in ("", "0.0.0.0", "::"):  # noqa: S104
        with pytest.raises(ValueError, match="one address of this machine"):
            listen(host)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"start":0', '"start":-64'),
        ('"start":0', '"start":2'),
        ("[11,6]", "[-11,6]"),
        ('"float32"', '"save"'),
        ("{", "{{"),
    ],
)
def test_a_layout_from_outside_stays_within_its_buffer(old: str, new: str) -> None:
    text = msgspec.json.encode(layout_of(named_weights(Tied()))).decode()
    assert decode_layout(text) == layout_of(named_weights(Tied()))
    assert old in text
    with pytest.raises(WeightUpdateError, match=r"weight sender's description|weights of an unknown type"):
        decode_layout(text.replace(old, new, 1))


# nccl where each end has a GPU of its own, else gloo


A, B, C = (Gpu(f"GPU-{name}", "2.29.7") for name in "abc")
NEWER_C = Gpu("GPU-c", "2.30.7")


@pytest.mark.parametrize(
    ("sender", "receivers", "why_gloo"),
    [
        (A, [B, C], ""),
        (A, [A], "share a GPU"),
        (A, [B, None], "has no GPU"),
        (None, [B], "has no GPU"),
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


@pytest.mark.parametrize(("last", "why"), [(None, "no GPU"), (NEWER_C, "NCCL differ")])
def test_receivers_say_which_gpu_they_have(
    rig: Rig, last: Gpu | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver without one, or with another NCCL, is enough for gloo, which the sender logs."""
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


def test_the_last_update_can_be_taken_after_the_sender_closed(rig: Rig) -> None:
    sender = rig.sender()
    receiver = rig.receiver(sender)
    eventually(lambda: sender._formed)
    digest = sender.send(7, named_weights(Tied()))
    sender.close()
    assert checksum(taken(receiver).tensors) == digest

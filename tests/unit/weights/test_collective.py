"""Weights over a collective arrive as over shared memory: whole, exact, in order; whoever is missing is named."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pipelinerl.channel import Channel, dial, listen
from pipelinerl.errors import BroadcastEndedError, UserError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights import delta
from pipelinerl.weights.broadcast.control import PROTOCOL, Apply, Close, Form, FromMember, FromSender, Hello, Report
from pipelinerl.weights.broadcast.group import Group, require_backend
from pipelinerl.weights.broadcast.members import Member
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from pipelinerl.weights.layout import decode_layout
from pipelinerl.weights.messages import Answer, Offer
from pipelinerl.weights.sending import layout_of
from tests.unit.weights.test_weights import (  # noqa: F401 - the contract of every hand-over, run with this module's `ends`
    Ends,
    Tied,
    ends,
    receipt,
    test_a_receipt_for_anything_else_is_an_error_from_then_on,
    test_an_update_that_was_taken_and_not_answered_stops_the_next,
    test_floating_point_weights_are_converted_on_sending,
    test_only_what_was_taken_is_acknowledged,
    test_the_sums_of_the_trainers_gpu_come_with_an_update_unless_it_is_converted,
    test_updates_arrive_exactly_and_once,
    test_versions_rise,
    test_what_was_sent_is_a_copy,
)

BOUND_S = 120.0
KEY = "a key that only this test has"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def eventually(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class SettledSender:
    """A sender that returns when everything has arrived, as the others do."""

    def __init__(self, sender: CollectiveWeightSender, receiver: CollectiveWeightReceiver) -> None:
        self._sender, self._receiver = sender, receiver

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        digest = self._sender.send(version, tensors)
        eventually(lambda: self._receiver.offered() == version)
        return digest

    def receipts(self) -> Sequence[UpdateReceipt]:
        return self._sender.receipts()

    def close(self) -> None:
        self._sender.close()


class SettledReceiver:
    def __init__(self, sender: CollectiveWeightSender, receiver: CollectiveWeightReceiver) -> None:
        self._sender, self._receiver = sender, receiver

    def offered(self) -> int | None:
        return self._receiver.offered()

    def poll(self) -> WeightUpdate | None:
        return self._receiver.poll()

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        self._receiver.acknowledge(receipt)
        eventually(lambda: not self._sender.unanswered())

    def close(self) -> None:
        self._receiver.close()


def cut(channel: Channel[Any] | None) -> None:
    """End a connection as the system does for a process that died."""
    assert channel is not None
    with socket.socket(fileno=os.dup(channel.fileno())) as connected:
        connected.shutdown(socket.SHUT_RDWR)


class Dying(CollectiveWeightReceiver):
    """It dies when it is about to send a message of the step, or type, `dies`; or to `form` the group, or to `receive`."""

    def __init__(self, dies: object, *arguments: Any, **options: Any) -> None:
        self._dies = dies
        super().__init__(*arguments, **options)

    def _send(self, message: FromMember) -> None:
        step = message.step if isinstance(message, Report) else type(message)
        if step == self._dies:
            cut(self._channel)
        super()._send(message)

    def _form_group(self, form: Form) -> Group:
        if self._dies == "form":
            cut(self._channel)
            self._next()  # It never comes.
        return super()._form_group(form)

    def _stage(self, offer: Offer, bucket_bytes: int) -> None:
        if self._dies == "receive":
            cut(self._channel)
            self._next()  # It never comes.
        super()._stage(offer, bucket_bytes)


class Rig:
    """A sender and receivers in this process, closed at the end of the test."""

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []

    def sender(
        self, receivers: int = 1, *, at: socket.socket | None = None, key: str = KEY, **options: object
    ) -> CollectiveWeightSender:
        """`at`: a socket that listens, which stays open."""
        defaults: dict[str, object] = {"timeout_s": 0.3, "stall_s": 10.0, "join_timeout_s": 10.0}
        listener = at.dup() if at else listen()
        sender = CollectiveWeightSender(listener, key, receivers, **{**defaults, **options})  # type: ignore[arg-type]
        self._closing.append(sender.close)
        return sender

    def receiver(self, sender: CollectiveWeightSender, index: int | None = 0, **options: Any) -> CollectiveWeightReceiver:
        return self.receiver_at(sender.port, index, **options)

    def receiver_at(
        self, port: int, index: int | None = 0, *, key: str = KEY, dies: object = None, **options: Any
    ) -> CollectiveWeightReceiver:
        """`dies`: see `Dying`."""
        defaults: dict[str, object] = {"engine": f"engine-{index}", "join_timeout_s": 10.0}
        kind = partial(Dying, dies) if dies else CollectiveWeightReceiver
        receiver = kind("127.0.0.1", port, key, index, **{**defaults, **options})  # type: ignore[arg-type]
        self._closing.insert(0, receiver.close)
        return receiver

    def pair(
        self, second_dies: object = None, **options: Any
    ) -> tuple[CollectiveWeightSender, list[CollectiveWeightReceiver]]:
        """A sender and its two receivers. `second_dies`: see `Dying`."""
        sender = self.sender(2, **options)
        return sender, [self.receiver(sender, 0), self.receiver(sender, 1, dies=second_dies)]

    def close(self) -> None:
        for close in self._closing:
            close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture(params=["full", "delta"])
def make_ends(request: pytest.FixtureRequest, rig: Rig) -> Callable[..., Ends]:
    def settled_ends(**options: Any) -> Ends:
        sender = rig.sender(encoding=request.param, **options)
        receiver = rig.receiver(sender)
        return SettledSender(sender, receiver), SettledReceiver(sender, receiver)

    return settled_ends


def taken(receiver: CollectiveWeightReceiver) -> WeightUpdate:
    eventually(lambda: receiver.offered() is not None)
    update = receiver.poll()
    assert update is not None
    return update


def problem(receiver: CollectiveWeightReceiver) -> str:
    """What `offered` raises, when it does; before that, no update may have arrived."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        try:
            receiver.offered()
        except WeightUpdateError as error:
            with pytest.raises(WeightUpdateError):
                receiver.poll()
            return str(error)
        time.sleep(0.005)
    raise AssertionError("no problem came up")


# What arrives


def test_every_type_arrives_exactly_in_buckets_that_cut_tensors(rig: Rig) -> None:
    torch.manual_seed(0)
    tensors = {f"{dtype}-{n}": torch.randint(0, 2, (n, 7)).to(dtype) for dtype in DTYPES for n in (0, 1, 5)}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["nan"] = torch.tensor([float("nan"), -0.0])
    sender = rig.sender(3, bucket_bytes=100)
    receivers = [rig.receiver(sender, index, receivers=3) for index in range(3)]
    for version in (0, 4):
        tensors["scalar"] += 1
        digest = sender.send(version, tensors)
        for receiver in receivers:
            update = taken(receiver)
            assert update[:2] == (version, digest)
            assert checksum(update.tensors) == checksum(tensors) == digest
            assert list(update.tensors) == list(tensors)
        for index, receiver in enumerate(receivers):
            receiver.acknowledge(receipt(version, digest, engine=f"engine-{index}"))
        eventually(lambda: not sender.unanswered())
        assert sorted(one.engine for one in sender.receipts()) == ["engine-0", "engine-1", "engine-2"]


def test_changed_weights_are_refused_by_name(rig: Rig) -> None:
    sender = rig.sender()
    weights = named_weights(Tied())
    sender.send(0, weights)
    with pytest.raises(WeightUpdateError, match=r"earlier updates in names, types, shapes or tying: scale"):
        sender.send(1, {**weights, "scale": weights["scale"].double()})


def test_the_next_update_waits_for_every_engine_and_names_the_missing(rig: Rig) -> None:
    sender, receivers = rig.pair()
    digest = sender.send(0, named_weights(Tied()))
    for receiver in receivers:
        taken(receiver)
    receivers[0].acknowledge(receipt(0, digest, engine="left"))
    eventually(lambda: list(sender.unanswered()) == ["number 1 (engine-1)"])
    with pytest.raises(
        WeightUpdateError, match=r"engine number 1 \(engine-1\) did not answer weights of version 0 in [\d.]+ s"
    ):
        sender.send(1, named_weights(Tied()))
    receivers[1].acknowledge(receipt(0, digest, engine="right"))
    eventually(lambda: not sender.unanswered())
    sender.send(1, named_weights(Tied(seed=1)))
    assert taken(receivers[0]).version == taken(receivers[1]).version == 1


def test_the_last_update_can_be_taken_after_the_sender_closed(rig: Rig) -> None:
    sender = rig.sender()
    receiver = rig.receiver(sender)
    receiver.wait_joined(BOUND_S)
    digest = sender.send(7, named_weights(Tied()))
    sender.close()
    update = taken(receiver)
    assert checksum(update.tensors) == digest
    receiver.acknowledge(receipt(7, digest))
    time.sleep(0.05)
    assert receiver.offered() is None
    assert receiver.poll() is None


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
    tensors = {f"{dtype}": torch.randint(0, 2, (50, 41)).to(dtype) for dtype in DTYPES}
    tensors["tied"] = tensors["torch.bfloat16"]
    tensors["nan"] = torch.full((300,), float("nan"))
    for step in range(1, version + 1):
        for name in ("torch.float32", "torch.bfloat16", "torch.bool", "nan"):
            tensors[name].view(-1)[7 * step] = -0.0 if step % 2 else float("nan")
        tensors["nan"].view(torch.int32)[step] ^= step
    return tensors


class Fleet:
    """A sender and receivers that take every update at once and echo its checksum."""

    def __init__(self, rig: Rig, count: int = 3, coordinated: bool = False, **options: Any) -> None:
        options = {"encoding": "delta", "bucket_bytes": 4096, "timeout_s": BOUND_S, "coordinated": coordinated} | options
        self.sender = rig.sender(count, **options)
        self.receivers = [rig.receiver(self.sender, index) for index in range(count)]
        self.coordinator = rig.receiver(self.sender, None) if coordinated else None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """Send, and compare what arrives bit by bit. Returns the encoding, and its share of all bytes in percent."""
        digest = self.sender.send(version, tensors)
        if self.coordinator is not None:
            taken(self.coordinator)
        for receiver in self.receivers:
            update = taken(receiver)
            assert update[:2] == (version, digest)
            assert checksum(update.tensors) == digest == checksum(tensors)
            receiver.acknowledge(receipt(version, digest))
        if self.coordinator is not None:
            self.coordinator.acknowledge(receipt(version, digest))
        eventually(lambda: not self.sender.unanswered())
        self.sender.receipts()
        transfer = self.sender.transfer
        assert transfer is not None
        assert transfer.version == version
        return transfer.encoding, round(100 * transfer.bytes / layout_of(tensors, None).buffer_bytes)


@pytest.mark.parametrize("coordinated", [False, True])
def test_deltas_restore_every_bit_of_every_type(rig: Rig, coordinated: bool) -> None:
    fleet = Fleet(rig, coordinated=coordinated)
    assert fleet.send(0, weights_of(0)) == ("full", 100)
    sent = [fleet.send(version, weights_of(version)) for version in (1, 2, 5)]
    assert all(encoding == "delta" and percent <= 1 for encoding, percent in sent)
    assert fleet.send(9, weights_of(5)) == ("delta", 0), "nothing has changed"
    assert fleet.send(10, weights_of(0))[0] == "delta", "back to the first weights"


def test_an_update_that_a_delta_would_not_shorten_is_sent_in_full_and_is_the_next_base(rig: Rig) -> None:
    torch.manual_seed(0)
    fleet = Fleet(rig, bucket_bytes=1 << 20)
    others = {"weight": torch.randn(100_000)}
    assert fleet.send(0, {"weight": torch.randn(100_000)}) == ("full", 100)
    assert fleet.send(1, others) == ("full", 100)
    others["weight"][5] = 0.0
    assert fleet.send(2, others) == ("delta", 0)


def test_every_kth_update_is_sent_in_full(rig: Rig) -> None:
    fleet = Fleet(rig, full_every=3)
    encodings = [fleet.send(version, weights_of(version))[0] for version in range(7)]
    assert encodings == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_without_deltas_every_update_is_sent_in_full(rig: Rig) -> None:
    fleet = Fleet(rig, encoding="full")
    assert [fleet.send(version, weights_of(version)) for version in range(3)] == [("full", 100)] * 3


def test_engines_that_join_late_and_those_of_a_new_sender_begin_with_all_weights(rig: Rig) -> None:
    sender = rig.sender(encoding="delta", timeout_s=BOUND_S)
    digest = sender.send(4, weights_of(4))
    time.sleep(0.05)
    receiver = rig.receiver(sender)
    assert taken(receiver).checksum == digest
    assert sender.transfer is not None
    assert sender.transfer.encoding == "full"
    assert Fleet(rig).send(5, weights_of(5)) == ("full", 100), "a trainer that resumes is a new sender"


@pytest.mark.parametrize("coordinated", [False, True])
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ("on the way", "weights of version 1 arrived damaged"),
        ("malformed", "the delta of a weight update is malformed"),
        ("in the base", "weights of version 1 arrived damaged"),
    ],
)
def test_a_delta_that_gives_other_weights_is_applied_by_nobody(
    rig: Rig, damage: str, error: str, coordinated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(rig, coordinated=coordinated)
    fleet.send(0, weights_of(0))
    victim = fleet.receivers[1]._buffer_U8
    if damage == "in the base":
        victim[1000] ^= 1
    apply = delta.apply

    def damaged(delta_U8: Tensor, buffer_U8: Tensor) -> None:
        if buffer_U8.data_ptr() == victim.data_ptr():
            delta_U8[0 if damage == "malformed" else -9] ^= 1
        apply(delta_U8, buffer_U8)

    if damage != "in the base":
        monkeypatch.setattr("pipelinerl.weights.broadcast.receiver.apply", damaged)
    fleet.sender.send(1, weights_of(1))
    expected = rf"engine number 1 \(engine-1\) can't receive weights: {error}"
    assert re.search(expected, problem(fleet.coordinator or fleet.receivers[0]))
    with pytest.raises(WeightUpdateError, match=expected) as caught:
        fleet.sender.send(2, weights_of(2))
    assert not isinstance(caught.value, BroadcastEndedError), "it would happen again"


# Who is missing, or does not belong


def test_engines_may_leave_when_the_run_ends(rig: Rig) -> None:
    ending = threading.Event()
    sender = rig.sender(give_up=ending.is_set)
    receiver = rig.receiver(sender)
    receiver.wait_joined(BOUND_S)
    receiver.close()
    eventually(lambda: sender._members.all[0].lost)
    with pytest.raises(WeightUpdateError, match="has left"):
        sender.send(0, named_weights(Tied()))
    ending.set()
    assert sender.send(0, named_weights(Tied())) == ""
    assert list(sender.receipts()) == []


def test_an_engine_that_never_comes_is_named_to_all(rig: Rig) -> None:
    sender = rig.sender(2, join_timeout_s=1.0)
    receiver = rig.receiver(sender, 0)
    sender.send(0, named_weights(Tied()))
    expected = f"engine number 1 did not connect to 127.0.0.1:{sender.port} in"
    assert expected in problem(receiver)
    with pytest.raises(WeightUpdateError, match=expected):
        sender.receipts()
    with pytest.raises(WeightUpdateError, match=expected):
        sender.send(1, named_weights(Tied()))


def test_a_sender_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    receiver = CollectiveWeightReceiver("127.0.0.1", port, KEY, 0, join_timeout_s=0.2)
    assert f"the weight sender at 127.0.0.1:{port} can't be reached within 0.2 s" in problem(receiver)
    with pytest.raises(WeightUpdateError, match="can't be reached"):
        receiver.wait_joined(BOUND_S)
    receiver.close()


@pytest.mark.parametrize(
    ("index", "receivers", "complaint"),
    [
        (2, None, "has receivers number 0 to 1, not 2"),
        (-1, None, "has receivers number 0 to 1, not -1"),
        (1, 3, "has 2 receivers, but number 1 expects 3"),
        (0, 2, "there is a receiver number 0 already"),
    ],
)
def test_a_wrong_number_is_refused_and_the_others_go_on(rig: Rig, index: int, receivers: int | None, complaint: str) -> None:
    sender = rig.sender(2)
    first = rig.receiver(sender, 0, receivers=2)
    eventually(lambda: sender._members.all[0].channel)
    assert complaint in problem(rig.receiver(sender, index, receivers=receivers))
    second = rig.receiver(sender, 1)
    second.wait_joined(BOUND_S)
    sender.send(0, named_weights(Tied()))
    assert taken(first).version == taken(second).version == 0


def test_strangers_at_the_door_disturb_nothing(rig: Rig) -> None:
    sender = rig.sender()
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 5) + b"hello", struct.pack(">I", 1 << 31)):
        with socket.create_connection(("127.0.0.1", sender.port)) as stranger:
            stranger.sendall(words)
    idle = socket.create_connection(("127.0.0.1", sender.port))
    receiver = rig.receiver(sender)
    sender.send(0, named_weights(Tied()))
    assert taken(receiver).version == 0
    idle.close()


def test_a_listener_that_is_no_weight_sender(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = rig.receiver_at(server.getsockname()[1])
        stranger, _ = server.accept()
        stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert "can't be used: it does not have the key of this run" in problem(receiver)
        stranger.close()


def test_a_listener_that_says_nothing(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = rig.receiver_at(server.getsockname()[1], join_timeout_s=0.2)
        assert "can't be reached within 0.2 s: it accepts connections, but does not answer" in problem(receiver)


def test_a_receiver_that_leaves_is_named(rig: Rig) -> None:
    sender, receivers = rig.pair()
    digest = sender.send(0, named_weights(Tied()))
    for receiver in receivers:
        taken(receiver)
        receiver.acknowledge(receipt(0, digest))
    eventually(lambda: not sender.unanswered())
    receivers[1].close()
    eventually(lambda: sender._members.all[1].lost)
    assert len(sender.receipts()) == 2, "it has answered: nobody waits for it"
    with pytest.raises(WeightUpdateError, match=r"engine number 1 \(engine-1\) has left"):
        sender.send(1, named_weights(Tied()))


def test_a_sender_that_dies_is_noticed_after_the_last_whole_update(rig: Rig) -> None:
    sender = rig.sender()
    receiver = rig.receiver(sender)
    digest = sender.send(0, named_weights(Tied()))
    eventually(lambda: receiver.offered() == 0)
    cut(sender._members.all[0].channel)
    time.sleep(0.05)
    assert checksum(taken(receiver).tensors) == digest
    assert "is gone: its process exited unexpectedly" in problem(receiver)


def test_a_receiver_says_whether_the_failure_is_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receivers = rig.pair("staged", stall_s=5.0, timeout_s=BOUND_S)
    sender.send(0, named_weights(Tied()))
    with pytest.raises(BroadcastEndedError, match=r"engine number 1 \(engine-1\) is gone"):
        eventually(receivers[0].offered)
    with pytest.raises(WeightUpdateError) as caught:
        eventually(rig.receiver(sender, key="another").offered)
    assert not isinstance(caught.value, BroadcastEndedError)


def test_a_receiver_that_is_closed_does_not_wait_for_its_group(rig: Rig) -> None:
    receiver = rig.receiver(rig.sender(2), 0, join_timeout_s=BOUND_S)
    closing = threading.Timer(0.1, receiver.close)
    closing.start()
    with pytest.raises(WeightUpdateError, match="or this receiver has closed"):
        receiver.wait_joined(BOUND_S)
    closing.join()


def test_what_differs_from_what_was_sent_is_applied_by_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receivers = rig.pair()
    arrived: list[str] = []

    def damaged_once(tensors: Mapping[str, Tensor]) -> str:
        arrived.append(checksum(tensors))
        return "0" * 32 if len(arrived) == 1 else arrived[0]

    monkeypatch.setattr("pipelinerl.weights.broadcast.receiver.checksum", damaged_once)
    digest = sender.send(3, named_weights(Tied()))
    expected = rf"weights of version 3 arrived damaged: checksum 0{{32}}, sent {digest}"
    for receiver in receivers:
        assert re.search(expected, problem(receiver))
    with pytest.raises(WeightUpdateError, match=rf"engine number . \(engine-.\) can't receive weights: {expected}"):
        sender.receipts()


# Who dies, and when


@pytest.mark.parametrize("dies", ["receive", "staged"])
def test_an_update_that_one_receiver_does_not_get_is_applied_by_nobody(rig: Rig, dies: str) -> None:
    sender, receivers = rig.pair(dies, stall_s=5.0, timeout_s=BOUND_S)
    sender.send(0, named_weights(Tied()))
    expected = "engine number 1 (engine-1) is gone: its process exited unexpectedly"
    assert expected in problem(receivers[0])  # and none is offered before, or `problem` would not come up
    with pytest.raises(WeightUpdateError, match=re.escape(expected)):
        sender.send(1, named_weights(Tied()))
    assert problem(receivers[1])


def test_a_receiver_that_dies_before_the_group_is_formed_is_named(rig: Rig) -> None:
    sender, receivers = rig.pair("form", stall_s=1.0)
    sender.send(0, named_weights(Tied()))
    assert "engine number 1 (engine-1) is gone: its process exited unexpectedly" in problem(receivers[0])


def test_a_receiver_that_dies_before_it_answers_is_named(rig: Rig) -> None:
    sender, receivers = rig.pair(Answer, timeout_s=BOUND_S)
    digest = sender.send(0, named_weights(Tied()))
    for receiver in receivers:
        assert checksum(taken(receiver).tensors) == digest
        receiver.acknowledge(receipt(0, digest))
    with pytest.raises(WeightUpdateError, match=r"engine number 1 \(engine-1\) is gone"):
        sender.send(1, named_weights(Tied()))
    assert "engine number 1 (engine-1) is gone" in problem(receivers[0])


@pytest.mark.parametrize("dies", [Offer, Apply])
def test_a_sender_that_dies_leaves_whole_updates_or_none(rig: Rig, dies: object, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receivers = rig.pair(stall_s=5.0)
    whole, members = sender._members.send, sender._members

    def until_death(message: FromSender, to: Sequence[Member] | None = None) -> None:
        if type(message) is not dies:
            whole(message, to)
            return
        whole(message, members.receivers[:1])
        for member in members.all:
            cut(member.channel)

    monkeypatch.setattr(members, "send", until_death)
    digest = sender.send(0, named_weights(Tied()))
    if dies is Apply:  # Every receiver has all of it, and the first one was told.
        assert checksum(taken(receivers[0]).tensors) == digest
    for receiver in receivers:
        assert "the weight sender at 127.0.0.1" in problem(receiver)


def test_a_receiver_may_join_late(rig: Rig) -> None:
    sender = rig.sender(2, timeout_s=BOUND_S)
    first = rig.receiver(sender, 0)
    digest = sender.send(0, named_weights(Tied()))
    with pytest.raises(WeightUpdateError, match=r"formed no group in 0\.3 s"):
        first.wait_joined(0.3)
    assert first.offered() is None, "not before all have it"
    second = rig.receiver(sender, 1)
    for receiver in (first, second):
        assert checksum(taken(receiver).tensors) == digest


# Who has no right to be there


def test_a_receiver_with_another_key_is_refused_and_the_others_go_on(rig: Rig) -> None:
    sender = rig.sender()
    assert "can't be used: it does not have the key" in problem(rig.receiver(sender, key="guessed"))
    receiver = rig.receiver(sender)
    sender.send(0, named_weights(Tied()))
    assert taken(receiver).version == 0


def test_a_sender_with_another_key_is_not_listened_to(rig: Rig) -> None:
    """It is the sender that is asked to prove itself, even if it lets everyone in."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = rig.receiver_at(server.getsockname()[1])
        connection = Connection(server.accept()[0].detach())
        connection.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
        assert len(connection.recv_bytes(256)) > 10, "its answer"
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes(256)
        connection.send_bytes(b"{sha256}" + bytes(32))
        assert "can't be used: it does not have the key" in problem(receiver)
        connection.close()


def test_an_answer_to_another_update_is_none(rig: Rig) -> None:
    sender = rig.sender()
    receiver = rig.receiver(sender)
    digest = sender.send(0, named_weights(Tied()))
    taken(receiver)
    receiver._send(Answer(99, receipt(0, digest)))
    receiver._send(Answer(0, receipt(0, "0" * 32)))
    time.sleep(0.1)
    assert list(sender.unanswered()) == ["number 0 (engine-0)"]
    receiver.acknowledge(receipt(0, digest))
    eventually(lambda: not sender.unanswered())
    assert [one.checksum for one in sender.receipts()] == [digest]


def test_settings_that_make_no_sense() -> None:
    for host in ("", "0.0.0.0", "::"):  # noqa: S104
        with pytest.raises(ValueError, match="one address of this machine"):
            listen(host)
    with listen() as listener, pytest.raises(ValueError, match="1 to 64 receivers, not 0"):
        CollectiveWeightSender(listener, KEY, 0)
    with listen() as listener, pytest.raises(ValueError, match="at least one byte"):
        CollectiveWeightSender(listener, KEY, 1, bucket_bytes=0)
    with listen() as listener, pytest.raises(ValueError, match="at least a second"):
        CollectiveWeightSender(listener, KEY, 1, stall_s=0.5)
    with pytest.raises(UserError, match="with gloo or nccl, not 'mpi'"):
        require_backend("mpi", torch.device("cpu"))
    with pytest.raises(UserError, match="gloo broadcasts weights between cpu devices, not cuda:0"):
        require_backend("gloo", torch.device("cuda:0"))
    if not torch.distributed.is_nccl_available():
        with pytest.raises(UserError, match="has no nccl"):
            require_backend("nccl", torch.device("cuda:0"))


# What is said


def told(sender: CollectiveWeightSender, message: object) -> FromSender:
    """The answer to the first message of a connection."""
    channel = dial("127.0.0.1", sender.port, KEY, BOUND_S, lambda: False, incoming=FromSender)
    assert channel is not None
    channel.send(message)  # type: ignore[arg-type]
    answer: FromSender = channel.receive()
    channel.close()
    return answer


def test_another_protocol_is_told_apart(rig: Rig) -> None:
    answer = told(rig.sender(), Hello(protocol="pipelinerl-weights-0", index=0))
    assert isinstance(answer, Close)
    assert answer.error is not None
    assert PROTOCOL in answer.error


@pytest.mark.parametrize("message", [{"type": "go", "number": "one"}, {"type": "hello"}, [], Report("staged", 1)])
def test_what_is_no_hello_is_not_answered(rig: Rig, message: object) -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        told(rig.sender(), message)


def test_a_message_out_of_order_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.weights.broadcast.receiver._EXPLANATION_S", 0.1)
    sender = rig.sender()
    receiver = rig.receiver(sender)
    receiver.wait_joined(BOUND_S)
    sender._members.send(Apply(1))
    assert "the weight sender sent Apply out of order" in problem(receiver)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"start":0', '"start":-64'),
        ('"start":0', '"start":4'),
        ('"start":0', '"start":1048576'),
        ("[11,6]", "[-11,6]"),
        ("[11,6]", "[1100,600]"),
        ('"float32"', '"save"'),
        ('"float32"', "1"),
        ("{", "{{"),
    ],
)
def test_a_layout_from_outside_stays_within_its_buffer(old: str, new: str) -> None:
    text = msgspec.json.encode(layout_of(named_weights(Tied()), None)).decode()
    assert decode_layout(text) == layout_of(named_weights(Tied()), None)
    assert old in text
    with pytest.raises(WeightUpdateError, match=r"weight sender's description|weights of an unknown type"):
        decode_layout(text.replace(old, new, 1))

"""Members of a broadcast that are lost, and those that take their place: the others go on, and all get whole updates."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.channel import listen
from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast import control
from pipelinerl.weights.broadcast import receiver as broadcast_receiver
from pipelinerl.weights.broadcast import sender as broadcast_sender
from pipelinerl.weights.broadcast.group import Group
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender

BOUND_S = 45.0
KEY = "a key of this test"
CPU = torch.device("cpu")


def eventually(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def weights_of(version: int) -> dict[str, Tensor]:
    """Other weights for each version; most elements stay as they are."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) for name, size in (("a", 3000), ("b", 50))}
    tensors["a"][: 10 * (version + 1)] += version
    tensors["b"][version % 50] = version
    return tensors


class Engine:
    """An engine with a receiver, in a thread: it takes every update, notes its version and echoes its checksum.

    `dies_at`: a step of the protocol (`Report.step`, or `Answer`) at which it dies instead of sending the message.
    """

    def __init__(
        self, sender: CollectiveWeightSender, index: int | None = 0, *, dies_at: object = None, device: torch.device = CPU
    ) -> None:
        self.index, self.versions, self.dead = index, list[int](), threading.Event()
        self._sent: dict[int, str] = {}
        engine = self

        class Receiver(CollectiveWeightReceiver):
            def _send(self, message: control.FromMember) -> None:
                step = message.step if isinstance(message, control.Report) else type(message)
                if dies_at is not None and step == dies_at:
                    engine.die()
                super()._send(message)

        self.receiver = Receiver(
            "127.0.0.1", sender.port, KEY, index, engine=f"engine-{index}", join_timeout_s=BOUND_S, device=device
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def die(self) -> None:
        """End as the system ends a killed process: the connection is closed, and nothing more is said."""
        self.dead.set()
        self.receiver._closed.set()
        self.cut()

    def cut(self) -> None:
        """End the connection only."""
        channel = self.receiver._channel
        if channel is not None:  # otherwise it is connecting
            with suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as connected:
                connected.shutdown(socket.SHUT_RDWR)

    def has(self, version: int) -> bool:
        return bool(self.versions) and self.versions[-1] == version

    def close(self) -> None:
        self.dead.set()
        self._thread.join(BOUND_S)
        self.receiver.close()

    def _run(self) -> None:
        while not self.dead.is_set():
            try:
                update = self.receiver.poll()
            except WeightUpdateError:
                return
            if update is None:
                time.sleep(0.001)
                continue
            if self.index is not None:
                assert checksum(update.tensors) == update.checksum == checksum(weights_of(update.version))
            assert not self.versions or update.version >= self.versions[-1]
            self.versions.append(update.version)
            self.receiver.acknowledge(
                UpdateReceipt(
                    engine="e", version=update.version, checksum=update.checksum, pause_s=0.0, sequences_in_flight=0
                )
            )


class Rig:
    def __init__(self) -> None:
        self.closing: list[Callable[[], None]] = []

    def sender(self, receivers: int, **options: Any) -> CollectiveWeightSender:
        defaults = {"timeout_s": BOUND_S, "stall_s": 10.0, "join_timeout_s": BOUND_S, "bucket_bytes": 4096, "regroups": True}
        sender = CollectiveWeightSender(listen(), KEY, receivers, **{**defaults, **options})  # type: ignore[arg-type]
        self.closing.append(sender._closing.set)  # a test that fails closes it without waiting
        return sender

    def engine(self, sender: CollectiveWeightSender, index: int | None = 0, **options: Any) -> Engine:
        engine = Engine(sender, index, **options)
        self.closing.insert(0, engine.close)
        return engine


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for close in rig.closing:
        close()


def send(sender: CollectiveWeightSender, version: int) -> None:
    sender.send(version, weights_of(version))


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("step", ["ready", "staged", control.Answer])
def test_when_a_receiver_dies_the_others_go_on_and_a_new_one_gets_the_newest_weights(
    rig: Rig, step: object, encoding: str
) -> None:
    sender = rig.sender(3, encoding=encoding)
    engines = [rig.engine(sender, index) for index in range(2)]
    lost = rig.engine(sender, 2)
    send(sender, 0)
    eventually(lambda: all(engine.has(0) for engine in (*engines, lost)))
    lost.die()
    dying = rig.engine(sender, 2, dies_at=step)  # it takes the place of the first, and dies in its turn
    for version in (1, 2, 3):
        send(sender, version)
    eventually(lambda: all(engine.has(3) for engine in engines))
    eventually(dying.dead.is_set)
    new = rig.engine(sender, 2)
    eventually(lambda: new.has(3))
    send(sender, 4)
    eventually(lambda: all(engine.has(4) for engine in (*engines, new)))
    assert new.versions == [3, 4]
    for engine in engines:
        assert engine.versions == sorted(set(engine.versions)), "what an engine has applied is not offered to it again"
    assert sender.transfer is not None
    assert sender.transfer.version == 4
    sender.receipts()
    sender.close()


def test_the_trainer_goes_on_without_any_receiver(rig: Rig) -> None:
    sender = rig.sender(1)
    first = rig.engine(sender)
    send(sender, 0)
    eventually(lambda: first.has(0))
    first.die()
    eventually(lambda: not sender._members.group)
    for version in range(1, 6):
        send(sender, version)
    assert not sender.unanswered()
    second = rig.engine(sender)
    eventually(lambda: second.versions == [5])
    sender.close()


def test_a_connection_that_is_cut_is_made_again_by_the_same_process(rig: Rig) -> None:
    sender = rig.sender(2)
    engines = [rig.engine(sender, index) for index in range(2)]
    send(sender, 0)
    eventually(lambda: all(engine.has(0) for engine in engines))
    for version in range(1, 5):
        engines[version % 2].cut()
        send(sender, version)
    eventually(lambda: all(engine.has(4) for engine in engines))
    for engine in engines:
        assert engine.versions == sorted(set(engine.versions))
    sender.close()


def test_a_silent_receiver_is_not_waited_for_and_comes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = rig.sender(2, stall_s=1.0)
    engines = [rig.engine(sender, index) for index in range(2)]
    send(sender, 0)
    eventually(lambda: all(engine.has(0) for engine in engines))
    frozen = threading.Event()
    send_on = engines[1].receiver._send

    def stopped(message: control.FromMember) -> None:
        frozen.wait()
        send_on(message)

    monkeypatch.setattr(engines[1].receiver, "_send", stopped)
    for version in (1, 2):
        send(sender, version)
    eventually(lambda: engines[0].has(2))
    frozen.set()
    eventually(lambda: engines[1].has(2))
    sender.close()


def test_a_receiver_whose_engine_is_not_there_yet_is_not_waited_for(rig: Rig) -> None:
    sender = rig.sender(2)
    first, lost = rig.engine(sender, 0), rig.engine(sender, 1)
    send(sender, 0)
    eventually(lambda: first.has(0) and lost.has(0))
    lost.die()
    loading = CollectiveWeightReceiver("127.0.0.1", sender.port, KEY, 1, join_timeout_s=BOUND_S, at_once=False)
    rig.closing.insert(0, loading.close)
    for version in (1, 2):
        send(sender, version)
    eventually(lambda: first.has(2))
    assert sender._members.newcomers == []
    eventually(lambda: loading.offered() == 2)


def test_the_last_update_waits_for_a_receiver_that_is_away(rig: Rig) -> None:
    sender = rig.sender(2)
    first, lost = rig.engine(sender, 0), rig.engine(sender, 1)
    send(sender, 0)
    eventually(lambda: first.has(0) and lost.has(0))
    lost.die()
    send(sender, 1)
    closed = threading.Thread(target=sender.close)
    closed.start()
    eventually(lambda: first.has(1))
    first.close()  # it has what it needs
    new = rig.engine(sender, 1)
    closed.join(BOUND_S)
    assert not closed.is_alive()
    eventually(lambda: new.has(1))


def test_a_run_that_ends_does_not_wait_for_a_receiver_that_is_away(rig: Rig) -> None:
    ending = threading.Event()
    sender = rig.sender(1, give_up=ending.is_set)
    lost = rig.engine(sender)
    send(sender, 0)
    eventually(lambda: lost.has(0))
    lost.die()
    send(sender, 1)
    ending.set()
    sender.close()


def test_a_failure_that_a_receiver_reports_still_ends_the_transfer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = rig.sender(2)
    engines = [rig.engine(sender, index) for index in range(2)]
    send(sender, 0)
    eventually(lambda: all(engine.has(0) for engine in engines))
    monkeypatch.setattr("pipelinerl.weights.broadcast.receiver.checksum", lambda _: "another")
    send(sender, 1)
    with pytest.raises(WeightUpdateError, match="arrived damaged"):
        send(sender, 2)
    assert all(engine.versions == [0] for engine in engines), "nobody applies it"


@pytest.mark.parametrize("lost", [0, None])
def test_of_several_servers_one_is_lost_or_their_coordinator(rig: Rig, lost: int | None) -> None:
    sender = rig.sender(2, coordinated=True)
    members = {index: rig.engine(sender, index) for index in (0, 1, None)}
    send(sender, 0)
    eventually(lambda: all(member.has(0) for member in members.values()))
    members[lost].die()
    for version in (1, 2):
        send(sender, version)
    members[lost] = rig.engine(sender, lost)
    eventually(lambda: all(member.has(2) for member in members.values()))
    send(sender, 3)
    eventually(lambda: all(member.has(3) for member in members.values()))
    eventually(lambda: not sender.unanswered())
    if lost == 0:
        assert members[None].versions[-2:] == [2, 3] or members[None].versions.count(2) == 2
    sender.close()


def test_each_group_has_the_backend_of_its_own_members(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that share a GPU receive by gloo; the one that is left has it alone, and its GPU is used."""
    gpus = iter([control.Gpu(name, "2.29.7") for name in ("a", "b", "b")])
    chosen: list[tuple[str, torch.device]] = []

    def staging_device(backend: str, device: torch.device) -> torch.device:
        chosen.append((backend, device))
        return torch.device("cpu")

    class OverGloo(Group):
        def __init__(self, _: str, *parts: Any, **options: Any) -> None:
            super().__init__("gloo", *parts, **options)

    for end in (broadcast_sender, broadcast_receiver):
        monkeypatch.setattr(end, "gpu_of", lambda _: next(gpus))
        monkeypatch.setattr(end, "staging_device", staging_device)
        monkeypatch.setattr(end, "Group", OverGloo)
    here = torch.device("cuda", 0)
    sender = rig.sender(2, device=here)
    kept, lost = (rig.engine(sender, index, device=here) for index in range(2))
    send(sender, 0)
    eventually(lambda: kept.has(0) and lost.has(0))
    assert {backend for backend, _ in chosen} == {"gloo"}
    lost.die()
    send(sender, 1)
    eventually(lambda: kept.has(1))
    assert chosen[-1][0] == "nccl"
    assert {device for _, device in chosen} == {here}
    sender._closing.set()


def test_a_dead_sender_is_an_error_as_before(rig: Rig) -> None:
    with closing(listen()) as listener:
        sender = CollectiveWeightSender(listener.dup(), KEY, 1, timeout_s=BOUND_S, stall_s=5.0, regroups=True)
        receiver = CollectiveWeightReceiver("127.0.0.1", sender.port, KEY, 0, join_timeout_s=1.0)
        sender.send(0, weights_of(0))
        eventually(lambda: receiver.offered() == 0)
        assert receiver.poll() is not None
        sender._members.fail("it failed")
        with pytest.raises(WeightUpdateError, match="it failed"):
            eventually(lambda: receiver.offered() is not None)
        receiver.close()
        sender.close()


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_deaths_cuts_and_returns(rig: Rig, seed: int, encoding: str) -> None:
    """Every update that any engine takes is whole (see `Engine`), and in the end all have the last one."""
    chance = random.Random(seed)
    sender = rig.sender(3, encoding=encoding, full_every=5)
    engines = {index: rig.engine(sender, index) for index in range(3)}
    send(sender, 0)
    eventually(lambda: all(engine.has(0) for engine in engines.values()))  # the first group can't do without any
    for version in range(1, 40):
        send(sender, version)
        index, event = chance.randrange(3), chance.random()
        if event < 0.15:
            engines[index].die()
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.05)
            engines[index] = rig.engine(sender, index)
        elif event < 0.3:
            engines[index].cut()
        elif event < 0.5:
            time.sleep(chance.random() * 0.02)
    eventually(lambda: all(engine.has(39) for engine in engines.values()))
    sender.receipts()
    sender.close()


def test_a_process_that_is_killed_in_a_broadcast(rig: Rig) -> None:
    """The thread's death is simulated elsewhere; here a real process gets SIGKILL."""
    import subprocess
    import sys

    sender = rig.sender(2, bucket_bytes=64)
    code = (
        "import sys, time\n"
        "from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver\n"
        f"receiver = CollectiveWeightReceiver('127.0.0.1', int(sys.argv[1]), {KEY!r}, 1)\n"
        "while receiver.poll() is None: time.sleep(0.001)\n"
        "print('taken', flush=True)\n"
        "time.sleep(600)\n"
    )
    engine = rig.engine(sender, 0)
    process = subprocess.Popen([sys.executable, "-c", code, str(sender.port)], stdout=subprocess.PIPE)
    send(sender, 0)
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    for version in (1, 2):
        send(sender, version)
    eventually(lambda: engine.has(2))
    new = rig.engine(sender, 1)
    eventually(lambda: new.has(2))
    sender.close()

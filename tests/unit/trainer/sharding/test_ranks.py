"""How ranks find each other and notice that one is lost. The ranks are threads here."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipelinerl.channel import Channel, dial
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RankLostError
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.ranks import Close, Gather, Message, Peers, Saved, Update, backend_of, device_of

KEY = "key"
LONG_S = 60.0


def pair(stall_s: float = LONG_S, end: Callable[[str], None] = lambda _: None) -> tuple[Peers, Channel[Any]]:
    """Rank 0, whose only peer is rank 1, and the end of the channel that rank 1 has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    found: queue.Queue[Channel[Any]] = queue.Queue()
    other = threading.Thread(target=lambda: found.put(Channel(far, KEY, Message, dialled=True)))
    other.start()
    line: Channel[Any] = Channel(near, KEY, Message, dialled=False)
    other.join()
    return Peers({1: line}, {1: 4711}, stall_s=stall_s, end=end), found.get()


def test_messages_arrive_in_order_without_heartbeats() -> None:
    peers, rank_1 = pair()
    for message in (ranks.Beat(), Saved(""), ranks.Beat(), Saved("full")):
        rank_1.send(message)
    assert [peers.receive(Saved, 1).error for _ in range(2)] == ["", "full"]
    peers.send(Update(0.5))
    peers.send(Gather(), 1)
    orders = [message for message in (rank_1.receive() for _ in range(3)) if message != ranks.Beat()]
    assert orders[0] == Update(0.5)
    peers.close()


def test_a_rank_that_is_gone_is_named() -> None:
    peers, rank_1 = pair()
    rank_1.close()
    with pytest.raises(RankLostError, match=r"rank 1 of the trainer \(pid 4711\) is gone: its process has ended"):
        peers.receive(Saved, 1)
    with pytest.raises(RankLostError, match="rank 1"):
        peers.send(Gather())


def test_a_silent_rank_is_named() -> None:
    peers, _rank_1 = pair(stall_s=0.3)
    with pytest.raises(RankLostError, match=r"rank 1 .* sent nothing for 0\.3 s: its process is stopped"):
        peers.receive(Saved, 1)


def test_a_rank_that_takes_no_messages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, _rank_1 = pair()
    monkeypatch.setattr(peers._lines[1], "send", lambda _: False)
    with pytest.raises(RankLostError, match=r"rank 1 .* takes no messages"):
        peers.receive(Saved, 1)


def test_a_rank_that_ends_with_an_error_says_why() -> None:
    peers, rank_1 = pair()
    rank_1.send(Close("no memory"))
    rank_1.close()
    with pytest.raises(RankLostError, match=r"rank 1 .* ended: no memory"):
        peers.receive(Saved, 1)


def test_a_rank_that_ends_after_training_is_not_lost() -> None:
    peers, rank_1 = pair(stall_s=0.3)
    rank_1.send(Close())
    rank_1.close()
    assert peers.next(1) == Close()
    time.sleep(0.6)
    peers.require_all()


def test_the_error_of_a_collective_operation_becomes_the_loss_that_caused_it() -> None:
    peers, rank_1 = pair()
    rank_1.close()
    with pytest.raises(RankLostError, match="rank 1") as caught, peers.naming_the_lost():
        raise RuntimeError("Connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_another_error_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    peers, _rank_1 = pair()
    with pytest.raises(RuntimeError, match="out of memory"), peers.naming_the_lost():
        raise RuntimeError("out of memory")
    peers.close()


def test_a_main_thread_that_can_not_notice_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    ended: queue.Queue[str] = queue.Queue()
    _peers, rank_1 = pair(end=ended.put)
    rank_1.close()
    assert "rank 1 of the trainer (pid 4711) is gone" in ended.get(timeout=LONG_S)


def test_a_main_thread_that_noticed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    ended: queue.Queue[str] = queue.Queue()
    peers, rank_1 = pair(end=ended.put)
    rank_1.close()
    with pytest.raises(RankLostError):
        peers.receive(Saved, 1)
    time.sleep(0.4)
    assert ended.empty()


def test_ranks_that_do_not_start_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entered = ranks.lead(listener, KEY, TrainerConfig(ranks=3), bound_s=0.2, stall_s=LONG_S, end=lambda _: None)
        with pytest.raises(RankLostError, match=r"rank 1, 2 of the trainer did not start within 0\.2 s"), entered:
            pass


def test_strangers_and_second_ranks_of_a_number_are_turned_away() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    found: queue.Queue[Any] = queue.Queue()
    accepting = threading.Thread(target=lambda: found.put(ranks._accept_all(listener, KEY, 3, LONG_S)))
    accepting.start()

    def connect(key: str, rank: int) -> Channel[Any]:
        line = dial("127.0.0.1", port, key, LONG_S, lambda: False, incoming=Message)
        assert line is not None
        line.send(ranks.Hello(rank, rank * 100))
        return line

    with pytest.raises(Exception, match="key"):
        connect("another", 1)
    first = connect(KEY, 1)
    second = connect(KEY, 1)
    with pytest.raises(EOFError):
        second.receive()
    last = connect(KEY, 2)
    lines, pids = found.get(timeout=LONG_S)
    assert sorted(lines) == [1, 2]
    assert pids == {1: 100, 2: 200}
    for line in (first, last):
        assert isinstance(line.receive(), ranks.Hello)
    listener.close()


def test_backends_and_devices() -> None:
    assert backend_of(TrainerConfig(ranks=2)) == "gloo"
    assert backend_of(TrainerConfig(ranks=2, device="cuda")) == "nccl"
    assert [str(device_of(TrainerConfig(ranks=2, device="cuda:2"), rank)) for rank in (0, 1)] == ["cuda:2", "cuda:3"]
    assert str(device_of(TrainerConfig(ranks=2), 1)) == "cpu"

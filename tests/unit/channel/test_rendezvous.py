"""Nobody without the key uses a group's store, or takes part in the group."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from time import sleep
from typing import Any

import pytest
import torch
from torch import distributed

from pipelinerl.channel import ProtocolError, listen
from pipelinerl.channel.rendezvous import Rendezvous, gloo_group, join_store, prove_members, serve_store

KEY, BOUND_S = "the key of the run", 10.0
_distributed: Any = distributed
Proof = Callable[[Any, int], None]


@contextmanager
def rendezvous_of(size: int) -> Iterator[list[Rendezvous]]:
    """Of a group's members in this process, rank 0 first."""
    with closing(serve_store(listen(), KEY, BOUND_S)) as served:
        joined = [join_store("127.0.0.1", served.port, KEY, BOUND_S) for _ in range(1, size)]
        yield [served, *joined]
        for rendezvous in joined:
            rendezvous.close()


def in_a_group(*proofs: Proof) -> list[ProtocolError | None]:
    """Form a gloo group of as many members and have each do its proof. Returns what each raised."""

    def member(rank: int, rendezvous: Rendezvous) -> ProtocolError | None:
        group = gloo_group(rendezvous.store, rank, len(proofs), timedelta(seconds=BOUND_S), host="127.0.0.1")
        try:
            proofs[rank](group, rank)
        except ProtocolError as error:
            return error
        return None

    with rendezvous_of(len(proofs)) as members, ThreadPoolExecutor(len(proofs)) as pool:
        return list(pool.map(member, range(len(proofs)), members))


def with_key(key: str, size: int, bound_s: float = BOUND_S) -> Proof:
    return lambda group, rank: prove_members(group, key, rank=rank, size=size, bound_s=bound_s)


def echo(group: Any, rank: int) -> None:
    """Send back whatever comes."""
    for _ in range(2):
        data_U8 = torch.empty(32, dtype=torch.uint8)
        group.recv([data_U8], 1 - rank, 0).wait()
        group.send([data_U8], 1 - rank, 0).wait()


def silent(group: Any, rank: int) -> None:
    group.recv([torch.empty(32, dtype=torch.uint8)], 1 - rank, 0).wait()


def test_who_has_taken_a_members_place_is_noticed_by_every_other_member_and_an_echo_is_no_proof() -> None:
    first, second, stranger = map(str, in_a_group(with_key(KEY, 3), with_key(KEY, 3), with_key("a guess", 3)))
    assert first == second == "member 2 of the group does not have the key of this run"
    assert stranger == "member 0 of the group does not have the key of this run"
    found, _ = in_a_group(with_key(KEY, 2), echo)
    assert str(found) == "member 1 of the group does not have the key of this run"


def test_a_silent_member_is_named_within_the_bound() -> None:
    found, _ = in_a_group(with_key(KEY, 2, bound_s=0.5), silent)
    assert str(found).startswith("member 1 of the group did not answer: ")


def test_without_the_key_there_is_no_store() -> None:
    with closing(serve_store(listen(), KEY, BOUND_S)) as served:
        with pytest.raises((ProtocolError, EOFError, OSError)):
            join_store("127.0.0.1", served.port, "a guess", BOUND_S)
        with pytest.raises(RuntimeError):  # PyTorch's own client
            _distributed.TCPStore("127.0.0.1", served.port, wait_for_workers=False, timeout=timedelta(seconds=0.5))
        with closing(join_store("127.0.0.1", served.port, KEY, BOUND_S)) as joined:
            joined.store.set("still", b"here")  # returns before the store has it
            assert served.store.get("still") == b"here"


def test_a_member_may_wait_for_a_key_longer_than_connecting_may_take() -> None:
    with (
        closing(serve_store(listen(), KEY, 0.2)) as served,
        closing(join_store("127.0.0.1", served.port, KEY, BOUND_S)) as joined,
        ThreadPoolExecutor(1) as pool,
    ):
        found = pool.submit(joined.store.get, "late")
        sleep(0.6)
        served.store.set("late", b"here")
        assert found.result(BOUND_S) == b"here"
    with closing(listen()) as silent, pytest.raises(TimeoutError, match=r"in 0\.2 s"):
        join_store("127.0.0.1", silent.getsockname()[1], KEY, 0.2)


def test_a_closed_store_can_not_be_reached() -> None:
    with closing(serve_store(listen(), KEY, BOUND_S)) as served, socket.socket() as waiting:
        waiting.connect(("127.0.0.1", served.port))
        joined = join_store("127.0.0.1", served.port, KEY, BOUND_S)
    with pytest.raises(RuntimeError):
        joined.store.get("anything")
    joined.close()
    with pytest.raises(ConnectionRefusedError):
        join_store("127.0.0.1", served.port, KEY, BOUND_S)

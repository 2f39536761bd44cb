"""The connection between a worker and the hub: messages stay whole, nothing waits, and what is no message ends it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.hub import wire
from pipelinerl.hub.wire import ClosedError, HandOver, Wire


@contextmanager
def raw_end() -> Iterator[tuple[socket.socket, Wire]]:
    here, there = socket.socketpair()
    with here, closing(Wire(there, wire.ToHub)) as end:
        yield here, end


def framed(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(payload)) + payload


def received(end: Wire, count: int) -> list[Any]:
    """So many messages, or all before the connection ends."""
    found: list[Any] = []
    while len(found) < count:
        end.wait(10.0)
        try:
            new = end.receive()
        except ClosedError:
            return found
        found += new
    return found


@settings(max_examples=60)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(1 << 16, 1 << 19)), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 1 << 18), max_size=50),
)
def test_messages_of_any_size_arrive_whole_however_they_are_split(sizes: list[int], cuts: list[int]) -> None:
    messages = [HandOver(number, 1, False, bytes([number]) * size) for number, size in enumerate(sizes)]
    sent, found = memoryview(b"".join(map(framed, messages))), list[Any]()
    with raw_end() as (here, there):
        here.setblocking(False)
        while sent:
            with suppress(BlockingIOError):
                sent = sent[here.send(sent[: cuts.pop() if cuts else 1 << 16]) :]
            found += there.receive()
        here.close()
        assert found + received(there, len(messages)) == messages
        there.send(messages[0])  # nobody reads it
        assert not there.backlog


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        struct.pack("!I", 3) + b"\xc1\xc1\xc1",
        framed(wire.Grant(3)),  # from the other side
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 0),
        framed(wire.MayTake(1))[:-1] + b"\xc0",
    ],
    ids=["another protocol", "not MessagePack", "another message", "too long", "empty", "another type"],
)
def test_what_is_no_message_ends_the_connection(garbage: bytes) -> None:
    with raw_end() as (here, there):
        here.sendall(garbage)
        with pytest.raises(ClosedError):
            there.receive()

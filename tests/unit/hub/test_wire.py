"""The connection between a worker and the hub: messages stay whole, nothing waits, and what is no message ends it."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.hub import wire
from pipelinerl.hub.wire import ClosedError, HandOver, Wire
from tests.unit.record_parts import status


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


def test_real_signals_between_any_two_instructions_break_no_message() -> None:
    found, interrupts = list[Any](), 0
    with raw_end() as (here, other), closing(Wire(here.dup(), wire.ToHub)) as one:
        here.close()

        def handler(*_: object) -> None:
            nonlocal interrupts
            interrupts += 1
            one.send(wire.Publish(status("engine", detail=str(interrupts))))

        reader = threading.Thread(target=lambda: found.extend(received(other, 1 << 30)))
        reader.start()
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        sent = 0
        try:
            while interrupts < 300:
                one.send(HandOver(sent, 1, False, bytes(sent % 3000)))
                sent += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert one.drain(10.0)
        one.close()
        reader.join()
    assert [message.index for message in found if isinstance(message, HandOver)] == list(range(sent))
    details = [message.status.detail for message in found if isinstance(message, wire.Publish)]
    assert sorted(map(int, details)) == list(range(1, interrupts + 1))

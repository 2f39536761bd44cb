"""Strangers at the ports of a run's own processes: they change nothing, and who has the key is served."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress
from random import Random

import pytest

from tests.unit.group_parts import receipt
from tests.unit.weights.test_collective import KEY, Rig, Tied, rig, taken  # noqa: F401 - `rig` is a fixture


def noise(rng: Random) -> bytes:
    """Random bytes, false lengths of messages, and parts of the protocol."""
    text = rng.randbytes(rng.randint(0, 200))
    return rng.choice(
        (
            text,
            struct.pack("!i", rng.choice((-1, -2, 0, 1, 255, 257, 2**31 - 1))) + text,
            struct.pack("!iQ", -1, rng.choice((0, 1, 2**40, 2**64 - 1))) + text,
            struct.pack("!i", 11 + len(text)) + b"#CHALLENGE#" + text,
            struct.pack("!i", 9) + b"#WELCOME#" + text,
            b"GET / HTTP/1.1\r\n\r\n",
        )
    )


def pester(port: int, rng: Random) -> None:
    """Connect, say something, and leave in one of several ways."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(rng.randint(0, 3)):
            connection.sendall(noise(rng))
        if rng.random() < 0.3:
            connection.recv(100)
        if rng.random() < 0.3:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(("seed", "count"), [(0, 300), pytest.param(1, 3000, marks=pytest.mark.exhaustive)])
def test_the_store_of_a_weight_broadcast(seed: int, count: int, rig: Rig) -> None:  # noqa: F811
    """Some strangers stay connected and silent. The receiver then joins, and gets exactly the weights."""
    rng = Random(seed)
    sender = rig.sender(join_timeout_s=60.0, timeout_s=60.0)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", sender.port), timeout=10))
        for _ in range(count):
            pester(sender.port, rng)
        receiver = rig.receiver(sender)
        weights = Tied().state_dict()
        checksum = sender.send(1, weights)
        for _ in range(20):  # in the middle of an update, too
            pester(sender.port, rng)
        update = taken(receiver)
        assert update.checksum == checksum
        receiver.acknowledge(receipt(1, checksum))

"""Messages between processes of a run: JSON over authenticated connections. Does not import torch.

`multiprocessing.connection` frames the messages and authenticates both ends: each proves by HMAC that it knows the key.
Only its methods for bytes are used, so nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Generic, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA

POLL_S = 0.05
_SOCKET_BOUND_S = 10
_LONGEST_BYTES = 64 << 20  # a layout of half a million tensors

M = TypeVar("M")


class ProtocolError(Exception):
    """The other side has another key, or sent an invalid message."""


class Channel(Generic[M]):
    """Messages over an authenticated connection. One thread receives and closes; any thread may send."""

    def __init__(self, connected: socket.socket, key: str, incoming: Any, *, dialled: bool) -> None:
        """`incoming`: the union of the messages to receive. `dialled`: this side has connected to the other.

        Takes the socket over. Raises EOFError or OSError if the other side breaks off, ProtocolError if it has another key.
        """
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A stopped peer may leave a message half sent or half read: neither side waits for it without a bound.
        _bound(connected, _SOCKET_BOUND_S)
        self.local_host: str = connected.getsockname()[0]
        self.peer_host: str = connected.getpeername()[0]
        self._decoder = msgspec.json.Decoder(incoming)
        self._sending = threading.Lock()
        self._connection = Connection(connected.detach())
        _prove(self._connection, key, dialled=dialled)

    def send(self, message: msgspec.Struct) -> bool:
        """False if the connection is broken or the other side does not read. The cause is raised by `receive`."""
        try:
            with self._sending:
                self._connection.send_bytes(msgspec.json.encode(message))
        except OSError:
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether there is something to receive within `timeout_s`: a message or the end of the connection."""
        return self._connection.poll(timeout_s)

    def receive(self) -> M:
        """The next message. Raises EOFError if the other side closed, OSError if the connection broke, ProtocolError."""
        data = self._connection.recv_bytes(_LONGEST_BYTES)
        try:
            message: M = self._decoder.decode(data)
        except INVALID_DATA as error:
            raise ProtocolError(f"it sent an invalid message: {error}") from error
        return message

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        with self._sending:
            self._connection.close()


def prove(connected: socket.socket, key: str, *, dialled: bool, bound_s: float) -> socket.socket:
    """Have both ends prove that they have the key, as for a `Channel`, within `bound_s`. Any bytes may follow.

    Takes the socket over and returns it. Raises EOFError or OSError if the other side breaks off, ProtocolError if it has
    another key.
    """
    connected.setblocking(True)
    _bound(connected, bound_s)
    connection = Connection(connected.detach())
    _prove(connection, key, dialled=dialled)
    proven = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    _bound(proven, 0)
    return proven


def _prove(connection: Connection, key: str, *, dialled: bool) -> None:
    """Closes the connection if the other side fails."""
    challenges = (answer_challenge, deliver_challenge) if dialled else (deliver_challenge, answer_challenge)
    try:
        for challenge in challenges:
            challenge(connection, key.encode())
    except (EOFError, ConnectionError):
        connection.close()
        raise
    except (AuthenticationError, AssertionError, OSError) as error:  # AssertionError: Python 3.11, for other protocols
        connection.close()
        raise ProtocolError(f"it does not have the key of this run ({error})") from error


def _bound(connected: socket.socket, seconds: float) -> None:
    """The longest time for one read or write; 0: any."""
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket. Port 0 chooses a free port (`getsockname()[1]`).

    Raises ValueError for a wildcard address, OSError if the address is not available.
    """
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused
        raise ValueError(f"a process listens at one address of this machine that the others can reach, not at {host!r}")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def dial(
    host: str, port: int, key: str, timeout_s: float, stop: Callable[[], bool], *, incoming: Any
) -> Channel[Any] | None:
    """Connect to the listener, which may accept later; `incoming` is as for `Channel`. None once `stop` returns True.

    Raises OSError if it can't be reached or does not answer within `timeout_s`, and the errors of `Channel`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not stop():
        left_s = max(0.01, deadline_s - time.monotonic())
        try:
            connected = socket.create_connection((host, port), timeout=left_s)
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() + POLL_S > deadline_s:
                raise
            time.sleep(POLL_S)
            continue
        while not wait([connected], POLL_S):  # for the challenge: until it starts, the system accepts for it
            if stop() or time.monotonic() > deadline_s:
                connected.close()
                if stop():
                    return None
                raise TimeoutError("it accepts connections, but does not answer")
        return Channel(connected, key, incoming, dialled=True)
    return None

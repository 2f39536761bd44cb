"""Authenticated connections between processes of a run, what listens for them, and addresses. Does not import torch.

Both ends prove by HMAC that they know the key of the run, as in `multiprocessing.connection`. Nothing is unpickled.
`rendezvous` uses these connections for groups of torch.distributed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from urllib.parse import urlsplit

POLL_S = 0.05
LOOPBACK = "127.0.0.1"


class ProtocolError(Exception):
    """The other side has another key."""


def prove(connected: socket.socket, key: str, *, dialled: bool, bound_s: float) -> socket.socket:
    """Have both ends prove that they have the key, within `bound_s`. Any bytes may follow.

    Takes the socket over and returns it. Raises EOFError or OSError if the other side breaks off, TimeoutError if it is
    silent, ProtocolError if it has another key.
    """
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _bound(connected, bound_s)
    challenges = (answer_challenge, deliver_challenge) if dialled else (deliver_challenge, answer_challenge)
    with Connection(connected.detach()) as connection:
        try:
            for challenge in challenges:
                challenge(connection, key.encode())
        except (EOFError, ConnectionError):
            raise
        except BlockingIOError as error:
            raise TimeoutError(f"it did not answer in {bound_s:g} s") from error
        except (AuthenticationError, AssertionError, OSError) as error:  # AssertionError: Python 3.11, for other protocols
            raise ProtocolError(f"it does not have the key of this run ({error})") from error
        proven = socket.socket(fileno=os.dup(connection.fileno()))
    _bound(proven, 0)
    return proven


def connect(address: tuple[str, int], key: str, bound_s: float) -> socket.socket:
    """A connection with a listener that has the key. Raises like `prove`, and OSError if it can't be reached."""
    return prove(socket.create_connection(address, timeout=bound_s), key, dialled=True, bound_s=bound_s)


def _bound(connected: socket.socket, seconds: float) -> None:
    """The longest time for one read or write; 0: any."""
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening socket. Port 0 chooses a free port (`getsockname()[1]`).

    Raises ValueError for a wildcard address, OSError if the address is not available.
    """
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused
        raise ValueError(f"a process listens at one address of this machine that the others can reach, not at {host!r}")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


class Acceptor:
    """Accepts connections at `address`, and has each that has proved within `bound_s` that it has the key handled in a
    thread of its own. Takes the listening socket over.
    """

    def __init__(
        self, listening: socket.socket, key: str | None, handle: Callable[[socket.socket], object], bound_s: float
    ) -> None:
        """`key`: None if nothing is proved here."""
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._listening, self._key, self._handle, self._bound_s = listening, key, handle, bound_s
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._admit, args=(connected,), name="connection", daemon=True).start()

    def _admit(self, connected: socket.socket) -> None:
        with suppress(OSError, EOFError, ProtocolError):  # a stranger, or a side that has ended
            if self._key is not None:
                connected = prove(connected, self._key, dialled=False, bound_s=self._bound_s)
            self._handle(connected)


# ---- addresses


def is_this_machine(address: str) -> bool:
    """Whether the host of an address (`HOST`, `HOST:PORT`, or a URL) is a name or address of the loopback interface."""
    try:
        host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(address: str = LOOPBACK) -> int:
    """A port of this address of the machine that is free now. Another process may take it before the server does."""
    with listen(address) as listener:
        port: int = listener.getsockname()[1]
    return port


def source_address(url: str) -> str:
    """This machine's address for packets to the host of a URL. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        found: str = probe.getsockname()[0]
    return LOOPBACK if found == "::1" else found

"""How the members of a torch.distributed group find each other, and prove to each other that they have the run's key.

PyTorch's rendezvous store, a `TCPStore`, answers every client. So it listens on the loopback address only. Members on
other machines reach it through forwarded connections, each of which begins with the proof of both ends (`channel.prove`).

    member's TCPStore client ──loopback──▶ member's forward ══proof══▶ server's forward ──loopback──▶ TCPStore

The store tells the members each other's addresses. Over gloo's own connections between them they then prove it again
(`prove_members`), before anything else is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from pipelinerl.channel import Acceptor, ProtocolError, connect, listen
from pipelinerl.errors import first_line

_CHUNK_BYTES = 1 << 16
_NONCE_BYTES = 32
_distributed: Any = distributed  # Its type declarations are incomplete.


class Rendezvous(NamedTuple):
    """A group's `store`, as one member uses it.

    host    its own address, as the others see it
    port    where the others reach the store, if it is served here
    close   stops forwarding: the store can't be used afterwards, and what was set just before may be lost
    """

    store: Any
    host: str
    port: int
    close: Callable[[], None]


def serve_store(listener: socket.socket, key: str, bound_s: float) -> Rendezvous:
    """A new store for members that have the key. They connect to `listener`, which it takes over."""
    inside = listen()
    address = inside.getsockname()[:2]
    store = _distributed.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=inside.detach())

    def inward() -> socket.socket:
        there = socket.create_connection(address, bound_s)
        there.settimeout(None)  # a member may wait for longer until a key is set
        return there

    forwarder = _Forwarder(listener, key, inward, bound_s)
    return Rendezvous(store, *forwarder.address, forwarder.close)


def join_store(host: str, port: int, key: str, bound_s: float) -> Rendezvous:
    """Connect to the store that another member serves.

    Raises OSError or EOFError if it can't be reached within `bound_s`, ProtocolError if it has another key.
    """
    ready = [connect((host, port), key, bound_s)]
    own_host = ready[0].getsockname()[0]
    forwarder = _Forwarder(listen(), None, lambda: ready.pop() if ready else connect((host, port), key, bound_s), bound_s)
    try:
        timeout = timedelta(seconds=bound_s)
        store = _distributed.TCPStore(*forwarder.address, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        forwarder.close()
        raise ConnectionError(first_line(error)) from error
    return Rendezvous(store, own_host, forwarder.address[1], forwarder.close)


def gloo_group(store: Any, rank: int, size: int, bound: timedelta, *, host: str, threads: int = 2) -> Any:
    """A group of gloo that listens at `host`. PyTorch's constructor listens at the address of the machine's name."""
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout, options._threads = [gloo.create_device(hostname=host)], bound, threads
    return gloo(store, rank, size, options)


def prove_members(group: Any, key: str, *, rank: int, size: int, bound_s: float) -> None:
    """Prove to each member of a gloo group that this one has the key, and have it prove the same, within `bound_s`.

    For each pair: both send random bytes, and answer the other's bytes with an HMAC of both and of the direction. Somebody
    without the key who took a member's place on a connection can't answer. Raises ProtocolError that names the member.
    """
    others = [other for other in range(size) if other != rank]
    bound = timedelta(seconds=bound_s)

    def exchange(sent: dict[int, bytes], length: int) -> dict[int, bytes]:
        tensors = {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in sent.items()}
        received = {other: torch.empty(length, dtype=torch.uint8) for other in others}
        sending = [group.send([tensors[other]], other, 0) for other in others]
        receiving = {other: group.recv([received[other]], other, 0) for other in others}
        for other, work in receiving.items():
            try:
                work.wait(bound)
            except RuntimeError as error:
                raise ProtocolError(f"member {other} of the group did not answer: {error}".partition("\n")[0]) from error
        for work in sending:
            work.wait(bound)
        return {other: bytes(tensor.tolist()) for other, tensor in received.items()}

    def answer(by: int, to: int, mine: bytes, theirs: bytes) -> bytes:
        return hmac.digest(key.encode(), b"%d to %d:" % (by, to) + mine + theirs, hashlib.sha256)

    mine = {other: secrets.token_bytes(_NONCE_BYTES) for other in others}
    theirs = exchange(mine, _NONCE_BYTES)
    answers = {other: answer(rank, other, mine[other], theirs[other]) for other in others}
    for other, found in exchange(answers, hashlib.sha256().digest_size).items():
        if not hmac.compare_digest(found, answer(other, rank, theirs[other], mine[other])):
            raise ProtocolError(f"member {other} of the group does not have the key of this run")


class _Forwarder(Acceptor):
    """Joins each connection that it accepts with another one, which `connect` makes."""

    def __init__(
        self, listener: socket.socket, key: str | None, connect: Callable[[], socket.socket], bound_s: float
    ) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._open: set[socket.socket] | None = set()  # None: closed
        super().__init__(listener, key, self._forward, bound_s)

    def close(self) -> None:
        with self._lock:
            ends, self._open = self._open or set(), None
        super().close()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def _forward(self, connected: socket.socket) -> None:
        with connected, self._connect() as other:
            ends = (connected, other)
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each key takes some 40 ms
            with self._lock:
                if self._open is None:
                    return
                self._open.update(ends)
            back = threading.Thread(target=_copy, args=(other, connected), name="rendezvous", daemon=True)
            back.start()
            _copy(connected, other)
            back.join()
            with self._lock:
                if self._open is not None:
                    self._open.difference_update(ends)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy all bytes until one side ends, and then end both."""
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

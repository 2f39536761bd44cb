"""Control messages between weight sender and receivers: small JSON messages over TCP. Does not import torch.

A message is its length (4 bytes, big endian) and then a tagged JSON object. The package's docstring gives their order.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Annotated, Generic, TypeVar

import msgspec

from pipelinerl.types import UpdateReceipt

PROTOCOL = "pipelinerl-weights-2"
BEATS_PER_BOUND = 10
LONGEST_ERROR = 500
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16
_CONNECT_RETRY_S = 0.05
_SEND_BOUND_S = 30

M = TypeVar("M")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A receiver's first message. `receivers`: how many receivers it expects (None: unknown).

    `index` None: the coordinator, which receives no weights; it decides when the others apply theirs and sends one receipt
    for all. `gpu`: a unique name of the GPU that it could receive on; "" if there is none.
    """

    protocol: str
    index: int | None
    engine: str = ""
    receivers: int | None = None
    gpu: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The receiver has memory for update `number` and is ready to receive it."""

    number: int


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """Update `number` was received completely, with the right checksum."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The engine's receipt for update `number`. The coordinator's receipt is for all engines."""

    number: int
    receipt: UpdateReceipt

    @staticmethod
    def of(number: int, receipt: UpdateReceipt) -> Answer:
        """The answer, with the receipt's error cut to `LONGEST_ERROR` characters."""
        error = receipt.error[:LONGEST_ERROR] if receipt.error is not None else None
        return Answer(number, msgspec.structs.replace(receipt, error=error))


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The receiver has failed."""

    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat: the receiver's process is running."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The receiver closes normally."""


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """All receivers have connected: form the group of `size` ranks. The sender is rank 0, receiver i is rank i + 1.

    `backend`: nccl between GPUs, gloo between CPUs.
    """

    backend: str
    size: int
    store_port: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    stall_s: Annotated[float, msgspec.Meta(ge=1)]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Prepare for update `number` (from 1). Only the first offer has a `layout` (JSON); it is valid for all updates."""

    number: int
    version: int
    checksum: str
    layout: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Every receiver is ready: the broadcast of update `number` begins."""

    number: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """To the coordinator: every receiver has the complete update `number`. The engines may apply it."""

    number: int
    version: int
    checksum: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The last message: the sender is done (`error` None) or the transfer failed."""

    error: str | None = None


FromReceiver = Hello | Ready | Staged | Answer | Trouble | Beat | Leave
FromSender = Form | Offer | Go | Arrived | Close


class ProtocolError(Exception):
    """The other side sent an invalid message."""


class Connection(Generic[M]):
    """Messages over a connected socket. One thread receives; any thread may send."""

    def __init__(self, connected: socket.socket, incoming: object, *, largest: int) -> None:
        """`incoming`: the union of the messages to receive. `largest`: the longest message that is accepted, in bytes."""
        self._socket = connected
        self._decoder = msgspec.json.Decoder(incoming)
        self._largest = largest
        self._unread = bytearray()
        self._sending = threading.Lock()
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A stopped peer reads nothing: when its buffer is full, `send` must fail rather than block forever.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_BOUND_S, 0))
        self.local_host: str = connected.getsockname()[0]
        self.peer_host: str = connected.getpeername()[0]

    def send(self, message: FromReceiver | FromSender) -> bool:
        """False if the connection is broken or the other side does not read. The cause is raised by `receive`."""
        payload = msgspec.json.encode(message)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float | None) -> M | None:
        """The next message, or None after `timeout_s` without one.

        Raises EOFError if the other side closed, OSError if the connection broke, ProtocolError for an invalid message.
        """
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
        while (message := self._next()) is None:
            left_s = max(0.0, deadline_s - time.monotonic()) if deadline_s is not None else None
            if not _readable(self._socket, left_s):
                return None
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError("the connection was closed")
            self._unread += data
        return message

    def close(self) -> None:
        """Close the connection. A `receive` in another thread ends."""
        with contextlib.suppress(OSError):  # It may be disconnected already.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next(self) -> M | None:
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > self._largest:
            raise ProtocolError(f"a message of {length} bytes, the longest allowed has {self._largest}")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        payload = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        try:
            message: M = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(str(error)) from error
        return message


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket for a sender. Port 0 chooses a free port (`getsockname()[1]`). Does not need torch.

    The connections are neither encrypted nor authenticated: use hosts in a trusted network only. Raises ValueError for a
    wildcard address, OSError if the address is not available.
    """
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused
        raise ValueError(f"weights are sent from one address of this machine that engines can reach, not from {host!r}")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect, retrying while nothing listens there yet. Raises the last OSError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.01, deadline_s - time.monotonic()))
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() + _CONNECT_RETRY_S > deadline_s:
                raise
            time.sleep(_CONNECT_RETRY_S)


def _readable(connected: socket.socket, timeout_s: float | None) -> bool:
    if connected.fileno() < 0:
        raise OSError("the connection was closed here")
    poll = select.poll()  # Unlike `select`, it accepts descriptors over 1023.
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))

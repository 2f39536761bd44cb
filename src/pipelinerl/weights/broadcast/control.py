"""What the two ends of a collective weight hand-over say to each other beside it: small JSON messages over TCP. No torch.

A message is its length (4 bytes, big endian) and then a tagged JSON object. `collective` says who says what when.
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
    """A receiver's first words. `receivers`: how many it believes there are (None: it does not know).

    `index` None: it receives nothing, but says when the others take what they have, and answers for all (`coordinator`).
    `gpu`: the GPU that it could receive on, by a name that no other has; "" if there is none.
    """

    protocol: str
    index: int | None
    engine: str = ""
    receivers: int | None = None
    gpu: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Update `number` may come: there is room for it."""

    number: int


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """Update `number` came, whole, with the right checksum."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The engine's receipt for update `number`; the coordinator's is for all engines."""

    number: int
    receipt: UpdateReceipt

    @staticmethod
    def of(number: int, receipt: UpdateReceipt) -> Answer:
        """With no more of its error than a message should have."""
        error = receipt.error[:LONGEST_ERROR] if receipt.error is not None else None
        return Answer(number, msgspec.structs.replace(receipt, error=error))


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The receiver can't go on."""

    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The receiver's process runs."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The receiver closes in good order."""


class Form(msgspec.Struct, frozen=True, kw_only=True, tag="form"):
    """All receivers are there: form the group of `size` ranks. The sender is rank 0, receiver i is rank i + 1.

    `backend` nccl is between GPUs, gloo between CPUs.
    """

    backend: str
    size: int
    store_port: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    stall_s: Annotated[float, msgspec.Meta(ge=1)]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Get ready for update `number` (from 1). `layout` (JSON) comes with the first one, and stays."""

    number: int
    version: int
    checksum: str
    layout: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Every receiver is ready: the buckets of update `number` come now."""

    number: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """For the coordinator: update `number` is with every receiver, whole. The engines may take it."""

    number: int
    version: int
    checksum: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Nothing comes any more: the sender is done (None), or something went wrong."""

    error: str | None = None


FromReceiver = Hello | Ready | Staged | Answer | Trouble | Beat | Leave
FromSender = Form | Offer | Go | Arrived | Close


class ProtocolError(Exception):
    """The other side says something that is not of this protocol."""


class Connection(Generic[M]):
    """Messages over a connected socket. One thread receives; any thread may send."""

    def __init__(self, connected: socket.socket, incoming: object, *, largest: int) -> None:
        """`incoming`: the union of messages that may come; `largest`: bytes of the longest one that is read."""
        self._socket = connected
        self._decoder = msgspec.json.Decoder(incoming)
        self._largest = largest
        self._unread = bytearray()
        self._sending = threading.Lock()
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A stopped peer reads nothing: a send that finds its buffer full ends with an error and not never.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_BOUND_S, 0))
        self.local_host: str = connected.getsockname()[0]
        self.peer_host: str = connected.getpeername()[0]

    def send(self, message: FromReceiver | FromSender) -> bool:
        """False if the connection is broken, or its other side reads nothing; whoever receives learns why."""
        payload = msgspec.json.encode(message)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float | None) -> M | None:
        """The next message, or None after `timeout_s` without one.

        Raises EOFError when the other side closed, OSError when the connection broke, and ProtocolError.
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
        """Also ends a `receive` of another thread."""
        with contextlib.suppress(OSError):  # It may not be connected any more.
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
    """A listening socket for a sender; port 0 chooses a free one (`getsockname()[1]`). Whoever makes it needs no torch.

    Nothing that is said over it is encrypted or authenticated: any other host must be in a network that is trusted.
    Raises ValueError for an address that means all of the machine's, OSError if the address can't be had.
    """
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - it is refused
        raise ValueError(f"weights are sent from one address of this machine that engines can reach, not from {host!r}")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect, trying again while nobody listens there yet. Raises OSError, the last one, after `timeout_s`."""
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
    poll = select.poll()  # Unlike `select`, it takes descriptors over 1023.
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))

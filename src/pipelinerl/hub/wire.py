"""What workers and the hub send each other, and the connection that carries it.

A message is four bytes of length and MessagePack. Nothing is executed, and neither side ever waits to send or to receive.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, StreamError
from pipelinerl.interfaces import Verdict
from pipelinerl.types import Group, StageStatus, UpdateReceipt

T = TypeVar("T")

# ---- from a worker


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message over a network: which process of the run this is, and on which machine."""

    role: str
    machine: str


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A generation process wants `total` groups of `rollouts` attempts, including the groups that it already has.

    Its engine has the weights of `version`; it has not begun the groups that it is `holding`.
    """

    version: int
    rollouts: int
    total: int
    holding: tuple[int, ...] = ()


class HandOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A finished group, as a line of JSON. `dropped`: its attempts that were dropped, by reason."""

    index: int
    rollouts: int
    skipped: bool
    line: bytes
    dropped: dict[str, int] = {}


def handed_over(group: Group, encoder: msgspec.json.Encoder) -> HandOver:
    return HandOver(group.index, len(group.rollouts), group.skipped is not None, encoder.encode(group), group.dropped)


class MayTake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A generation process would apply the weights of `version`; to workers: it may, and they are counted as applied."""

    version: int


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The evaluation before training is over: groups may be started."""


class Publish(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The status of a stage; to workers: of a stage that they decide by."""

    status: StageStatus


class Take(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A reader has read `taken` items, and has room for so many `ahead`."""

    taken: int
    ahead: int


class Commit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Everything before `offset` is processed."""

    offset: int


class PassOn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The group at `offset` is prepared."""

    offset: int
    item: bytes


class Line(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line for a file of records, whose `path` is relative to the run directory. `empty`: what it has is removed first."""

    path: str
    line: bytes
    empty: bool = False


class Sync(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Is sent back once everything before it has been taken or, after a failure of the hub, some of it `lost`."""

    lost: bool = False


# ---- of weights: between the trainer and the engines of generation processes, which the hub passes on

ASKS, DEAD = 0, -1
"""`number` of the answer of an engine that is ready for its first weights and, from the hub, of one whose process died."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Engines may take update `number` (from 1), which has this checksum. `device_checksum`, `path`: see `WeightUpdate`.

    `adapter`: the checksum of the tensors that are sent, if these are an adapter's. `engine`: number of the generation
    process that it is for; None: of all that have asked.
    """

    number: int
    version: int
    checksum: str
    device_checksum: str = ""
    path: str = ""
    adapter: str = ""
    engine: int | None = None


class Meeting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where the receivers of a broadcast of weights meet. For generation process `engine`, which has asked for weights."""

    host: str
    port: int
    engine: int


class EngineAnswer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine's receipt for update `number`, or see `ASKS`. The hub adds the number of the generation process."""

    number: int
    receipt: UpdateReceipt | None = None
    engine: int = 0


ToHub = (
    Hello | Ask | HandOver | MayTake | Open | Publish | Take | Commit | PassOn | Line | Sync | Offer | Meeting | EngineAnswer
)

# ---- from the hub


class Grant(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process may start group `index`."""

    index: int


class Denied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Why nothing is granted now."""

    verdict: Verdict


class Dropped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The stream has dropped so many rollouts for a group of this process."""

    rollouts: int


class Item(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An item of the stream that the worker reads."""

    offset: int
    json: bytes


ToWorker = Grant | Denied | MayTake | Open | Dropped | Item | Publish | Sync | Offer | Meeting | EngineAnswer


def decoded(decoder: msgspec.json.Decoder[T], offset: int, json: bytes) -> T:
    """An item of a stream. Raises StreamError if it is of another type."""
    try:
        return decoder.decode(json)
    except INVALID_DATA as error:
        raise StreamError(
            f"item {offset} of the stream is not a record of it ({error}). The stream's file was changed: restore it, or "
            "delete its directory to go on without what was in it"
        ) from error


_LENGTH = struct.Struct("!I")
LONGEST_BYTES = 1 << 30
_READ_BYTES = 1 << 18


class ClosedError(Exception):
    """The other side has closed the connection, or sent what is no message."""


class Wire:
    """One end of a connection."""

    def __init__(self, connected: socket.socket, incoming: Any) -> None:
        """`incoming`: the union of the messages to receive. Takes the socket over."""
        connected.setblocking(False)
        self._socket = connected
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(incoming)
        self._received = bytearray()
        self._backlog: deque[memoryview] = deque()
        self._sending = threading.RLock()
        self._received_all = False

    @property
    def backlog(self) -> bool:
        """Whether something waits until the other side reads."""
        return bool(self._backlog)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or keep it for `flush`. Any thread may call this."""
        with self._sending:
            payload = self._encoder.encode(message)
            self._backlog.append(memoryview(_LENGTH.pack(len(payload)) + payload))
            self.flush()

    def flush(self) -> None:
        """Send what the other side has room for. A connection that is closed is noticed by `receive`."""
        with self._sending:
            try:
                while self._backlog:
                    sent = self._socket.send(self._backlog[0])
                    if sent < len(self._backlog[0]):
                        self._backlog[0] = self._backlog[0][sent:]
                    else:
                        self._backlog.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self._backlog.clear()

    def drain(self, timeout_s: float) -> bool:
        """Send everything, waiting for the other side for at most `timeout_s`. Returns whether all was sent."""
        deadline_s = time.monotonic() + timeout_s
        self.flush()
        while self._backlog and (left_s := deadline_s - time.monotonic()) > 0:
            self.wait(left_s)
            self.flush()
        return not self._backlog

    def receive(self) -> list[Any]:
        """The messages that have arrived, perhaps none. Raises ClosedError after the last one of a closed connection."""
        while not self._received_all:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            self._received_all = not data
            if len(data) < _READ_BYTES:
                break
        messages = self._complete()
        if not messages and self._received_all:
            raise ClosedError("the connection was closed")
        return messages

    def wait(self, timeout_s: float) -> None:
        """Wait until something can be received or, if there is a backlog, sent."""
        select.select([self._socket], [self._socket] if self._backlog else [], [], max(0.0, timeout_s))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> list[Any]:
        messages, begin = [], 0
        while len(self._received) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, begin)
            end = begin + _LENGTH.size + length
            if length > LONGEST_BYTES:
                raise ClosedError(f"a message of {length} bytes")
            if len(self._received) < end:
                break
            with memoryview(self._received) as received:
                try:
                    messages.append(self._decoder.decode(received[begin + _LENGTH.size : end]))
                except INVALID_DATA as error:
                    raise ClosedError(f"an invalid message: {error}") from error
            begin = end
        del self._received[:begin]
        return messages

"""A worker's end of its connection with the hub.

It has no thread: each call first takes the messages that have arrived, and sends its own at once.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pipelinerl.errors import ReplacedError, RunDirectoryError, StageDiedError, StalledError
from pipelinerl.files import Lines
from pipelinerl.hub import wire
from pipelinerl.interfaces import Admitted, Verdict
from pipelinerl.schedule import Schedule
from pipelinerl.types import Group, Prepared, StageStatus

T = TypeVar("T")

ITEMS_AHEAD = 8
"""Items that a reader has at hand. A stream that drops the oldest can't drop them any more."""
CHECKPOINT_S = 120.0
DIAL_S = 30.0
DRAIN_S = 10.0
"""Time for the hub to take what is left, when a worker ends."""


class HubClient:
    """The status board as a worker sees it, and the connection that `Claims` and `HubReader` share."""

    def __init__(self, connected: socket.socket) -> None:
        self._wire = wire.Wire(connected, wire.ToWorker)
        self._statuses: dict[str, StageStatus] = {}
        self._unsynced = self._lost = False
        self._handlers: dict[type[Any], Any] = {}

    def handle(self, kind: type[Any], handler: Any) -> None:
        """Have `handler` called with every message of a kind."""
        self._handlers[kind] = handler

    def take(self) -> None:
        """Take the messages that have arrived. Raises ReplacedError if the hub has closed the connection."""
        try:
            messages = self._wire.receive()
        except wire.ClosedError as error:
            raise ReplacedError(f"the launcher has ended this session of the run, or has ended itself: {error}") from None
        for message in messages:
            match message:
                case wire.Publish(status):
                    self._statuses[status.stage] = status
                case wire.Sync(lost):
                    self._unsynced, self._lost = False, lost
                case _ if (handler := self._handlers.get(type(message))) is not None:
                    handler(message)
        if self._wire.backlog:
            self._wire.flush()

    def send(self, message: msgspec.Struct) -> None:
        self._wire.send(message)

    def publish(self, status: StageStatus) -> None:
        self._statuses[status.stage] = status
        self._wire.send(wire.Publish(status))

    def read(self, stage: str) -> StageStatus | None:
        self.take()
        return self._statuses.get(stage)

    def stages(self) -> Sequence[str]:
        return sorted(self._statuses)

    def require_sync(self) -> None:
        """`sync` before a checkpoint, which must not exist without the records that led to it.

        Raises StalledError if the hub does not answer, RunDirectoryError if it has failed to write some of them.
        """
        if not self.sync(CHECKPOINT_S):
            raise StalledError(f"the launcher has not answered for {CHECKPOINT_S:.0f} s: is it stopped?")
        if self._lost:
            raise RunDirectoryError("records of the last steps could not be written, so no checkpoint of them is")

    def sync(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until the hub has taken everything. Returns whether it has. Raises ReplacedError."""
        self._unsynced = True
        self.send(wire.Sync())
        deadline_s = time.monotonic() + timeout_s
        while self._unsynced and time.monotonic() < deadline_s:
            self._wire.wait(deadline_s - time.monotonic())
            self.take()
        return not self._unsynced

    def close(self) -> None:
        """Send what is left."""
        self._wire.drain(DRAIN_S)
        self._wire.close()


def dial(address: tuple[str, int], key: str, role: str, machine: str) -> HubClient:
    """The connection of the worker `role` on another machine. Raises StageDiedError if the hub can't be reached."""
    from pipelinerl.channel import ProtocolError, connect  # noqa: PLC0415 - only on another machine

    try:
        client = HubClient(connect(address, key, DIAL_S))
    except (OSError, EOFError, ProtocolError) as error:
        where = f"{address[0]}:{address[1]}"
        raise StageDiedError(f"the {role} process has no connection with the launcher at {where}: {error}") from error
    client.send(wire.Hello(role, machine))
    return client


class RecordLines(Lines):
    """A file of records in the run directory `root`, which the hub writes. See `files.OpenLines`."""

    def __init__(self, hub: HubClient, root: Path, path: Path, *, empty: bool = False) -> None:
        self._hub, self._path, self._encoder = hub, path.relative_to(root).as_posix(), msgspec.json.Encoder()
        if empty:
            hub.send(wire.Line(self._path, b"", empty=True))

    def write(self, record: Any) -> None:
        self._hub.send(wire.Line(self._path, self._encoder.encode(record)))

    def close(self) -> None:
        """The hub closes the file."""


class Claims:
    """The groups of a generation process. See `interfaces.Admission`.

    A group is asked for ahead, so that a free slot does not wait for the answer. It counts as in progress from then on.
    """

    def __init__(self, hub: HubClient, schedule: Schedule) -> None:
        self.in_rounds = schedule.in_rounds
        self._hub = hub
        self._granted: deque[int] = deque()
        self._received = self._dropped = 0
        self._asked = wire.Ask(-1, 0, 0)
        self._denial = Verdict(False, "the answer of the launcher")
        self._wanted = self._may_take = -1
        self._opened = False
        self._encoder = msgspec.json.Encoder()
        for kind in (wire.Grant, wire.Denied, wire.MayTake, wire.Open, wire.Dropped):
            hub.handle(kind, self._on_message)

    @property
    def opened(self) -> bool:
        if not self._opened:
            self._hub.take()
        return self._opened

    def open(self) -> None:
        self._opened = True
        self._hub.send(wire.Open())

    def claim(self, engine_version: int, rollouts: int, *, room: int = 0) -> Admitted:
        self._hub.take()
        index = self._granted.popleft() if self._granted else None
        free = -(-room // rollouts) - (index is not None)
        total = max(self._asked.total, self._received + max(1, free) - len(self._granted))
        if (total, engine_version) != (self._asked.total, self._asked.version):
            self._asked = wire.Ask(engine_version, rollouts, total, tuple(self._granted))
            self._hub.send(self._asked)
        return Admitted(index, self._denial if index is None else Verdict(True))

    def hand_over(self, group: Group) -> None:
        self._hub.send(wire.handed_over(group, self._encoder))

    def settle(self) -> None:
        self._hub.sync()

    def take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped

    def may_take(self, version: int) -> bool:
        if version > self._wanted:
            self._wanted = version
            self._hub.send(wire.MayTake(version))
        if not self.in_rounds:  # the pipeline takes them at once
            return True
        self._hub.take()
        return self._may_take >= version

    def _on_message(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Grant(index):
                self._granted.append(index)
                self._received += 1
            case wire.Denied(verdict):
                self._denial = verdict
            case wire.MayTake(version):
                self._may_take = version
            case wire.Open():
                self._opened = True
            case wire.Dropped(rollouts):
                self._dropped += rollouts


class HubReader(Generic[T]):
    """The reading end of a stream. Some items are at hand before they are read. The next reader gets those not committed."""

    def __init__(
        self, hub: HubClient, kind: Any, ahead: int = ITEMS_AHEAD, prepare: Callable[[Any], T] = lambda item: item
    ) -> None:
        """`kind` is the type of the items, and `prepare` what is made of each when it is read."""
        self._hub, self._ahead, self._prepare = hub, ahead, prepare
        self._decoder, self._encoder = msgspec.json.Decoder(kind), msgspec.json.Encoder()
        self._items: deque[wire.Item] = deque()
        self._taken = 0
        hub.handle(wire.Item, self._items.append)
        hub.send(wire.Take(0, ahead))

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """See `interfaces.StreamReader`. Raises StreamError for an item of another type, and what `prepare` raises."""
        if len(self._items) < limit:
            self._hub.take()
        items = [self._items.popleft() for _ in range(min(limit, len(self._items)))]
        self._taken += len(items)
        if items:
            self._hub.send(wire.Take(self._taken, self._ahead))
        return [(item.offset, self._prepare(wire.decoded(self._decoder, item.offset, item.json))) for item in items]

    def commit(self, offset: int) -> None:
        self._hub.send(wire.Commit(offset))

    def pass_on(self, offset: int, prepared: Prepared) -> None:
        """Hand over what was made of the group at `offset`, for the trainer."""
        self._hub.send(wire.PassOn(offset, self._encoder.encode(prepared)))

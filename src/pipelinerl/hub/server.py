"""The hub's end of the connections with workers: a thread of the launcher."""

from __future__ import annotations

import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pipelinerl.errors import PipelineRLError, StageDiedError
from pipelinerl.hub import wire
from pipelinerl.hub.hub import Hub
from pipelinerl.interfaces import Verdict
from pipelinerl.types import TRAINER, StageStatus

if TYPE_CHECKING:
    from pipelinerl.channel import Acceptor

PREPARED_AHEAD = 12
"""Groups that are prepared before the trainer takes them. Few, because fresher groups can no longer replace them."""
DENY_EVERY_S = 0.2
"""Interval at which a process that waits for a group learns why, while it waits for the same stages."""
ENDING_S = 5.0
"""Time for what workers sent before they ended to be read."""
PROOF_S = 10.0
"""Time for a worker to prove that it belongs to the run."""


class WorkerKind(NamedTuple):
    """What the hub does for a worker.

    process    number of a generation process, which may start groups; None for others
    reads      what it reads: `groups`, as the trainer does, `unprepared` ones to prepare them, or `prepared` ones
    follows    it is the trainer: it is sent the statuses of all stages, and what engines answer; others get its status
    """

    process: int | None = None
    reads: Literal["", "groups", "unprepared", "prepared"] = ""
    follows: bool = False


class Connection:
    """A connection with a worker, and what the worker has asked for."""

    def __init__(self, kind: WorkerKind, connected: socket.socket) -> None:
        self.machine = ""
        self.kind, self.wire = kind, wire.Wire(connected, wire.ToHub)
        self.ended = threading.Event()
        self.ask, self.granted = wire.Ask(0, 1, 0), 0
        self.want: int | None = None
        self.taken = self.room = self.sent = 0  # groups that it reads
        self.offsets: deque[int] = deque()  # of the items that were sent and not yet taken
        self.passed_on = 0
        self.writing = False  # it waits for room in the connection
        self.asks_for_weights = False
        self.unsent: set[str] = set()  # stages whose latest status it has not been sent
        self._denied: tuple[tuple[str, ...], float] = ((), 0.0)

    def deny(self, verdict: Verdict) -> None:
        now = time.monotonic()
        waits_for, sent_s = self._denied
        if not self.wire.backlog and (verdict.waits_for != waits_for or now - sent_s >= DENY_EVERY_S):
            self._denied = (verdict.waits_for, now)
            self.wire.send(wire.Denied(verdict))


class HubServer:
    """A context: serves workers inside. Its thread alone changes the hub, except under the lock."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.read, self.stages = hub.board.read, hub.board.stages
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._kinds: dict[str, WorkerKind] = {}
        self.failure: PipelineRLError | None = None

    def connect(self, kind: WorkerKind) -> socket.socket:
        """The worker's end of a new connection."""
        here, there = socket.socketpair()
        self._add(Connection(kind, here))
        return there

    def listen(self, host: str, key: str, kinds: Mapping[str, WorkerKind]) -> Acceptor:
        """Accept workers of these roles that have the key. Each says first which one it is (`client.dial`)."""
        from pipelinerl.channel import Acceptor, listen  # noqa: PLC0415 - only for workers on other machines

        self._kinds = dict(kinds)
        return Acceptor(listen(host), key, lambda connected: self._add(Connection(WorkerKind(), connected)), PROOF_S)

    def wait_ended(self, kind: WorkerKind | None = None) -> None:
        """Wait until all is read that processes of this kind (None: of any), which have ended, had sent.

        Their work in progress is returned then.
        """
        with self._lock:
            ending = [connection for connection in self._connections if kind in (None, connection.kind)]
        for connection in ending:
            if not connection.ended.wait(ENDING_S):
                with self._lock:
                    self._end(connection)

    # ---- the status board, as the launcher uses it

    def publish(self, status: StageStatus) -> None:
        with self._lock:
            self._publish(status)
        self._wake.send(b"\0")

    # ---- connections

    def _add(self, connection: Connection) -> None:
        with self._lock:
            self._know(connection)
            self._connections.append(connection)
            self._selector.register(connection.wire, selectors.EVENT_READ, connection)
        self._wake.send(b"\0")

    def _know(self, connection: Connection) -> None:
        """Have it sent the statuses that its kind of worker decides by, and whether groups may be started."""
        if connection.kind.process is not None and self._hub.admission.opened:
            connection.wire.send(wire.Open())
        follows = connection.kind.follows
        connection.unsent.update(stage for stage in self._hub.board.stages() if follows or stage == TRAINER)
        for other in self._connections if follows else ():
            if other.kind.process is not None and other.asks_for_weights:
                connection.wire.send(wire.EngineAnswer(wire.ASKS, engine=other.kind.process))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select()
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        with suppress(BlockingIOError):
                            self._woken.recv(4096)
                    elif not key.data.ended.is_set():
                        self._receive(key.data)
                self._serve()

    def _receive(self, connection: Connection) -> None:
        try:
            messages = connection.wire.receive()
        except wire.ClosedError:
            self._end(connection)
            return
        for message in messages:
            if self.failure is None or isinstance(message, wire.Publish | wire.Sync):
                with self._failing():
                    self._handle(connection, message)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error within it ends the run. The launcher says why."""
        try:
            yield
        except PipelineRLError as error:
            self.failure = self.failure or error
        except Exception as error:  # noqa: BLE001 - see above
            if self.failure is None:
                self.failure = StageDiedError(f"the hub failed: {type(error).__name__}: {error}")
                self.failure.add_note(traceback.format_exc())

    def _handle(self, connection: Connection, message: wire.ToHub) -> None:
        hub = self._hub
        match message:
            case wire.Hello(role, machine):
                connection.kind, connection.machine = self._kinds[role], machine
                self._know(connection)
            case wire.Publish(status):  # by the clock of this process: other machines have other clocks
                now = time.monotonic()
                since_s = now - (status.written_s - status.since_s)
                changes = {"machine": connection.machine, "since_s": since_s, "written_s": now}
                self._publish(msgspec.structs.replace(status, **changes))
            case wire.Line(path, line, empty):
                hub.append(path, line, empty=empty)
            case wire.Sync():
                connection.wire.send(wire.Sync(lost=self.failure is not None))
            case wire.Take(taken, ahead):
                for _ in range(taken - connection.taken):
                    connection.offsets.popleft()
                    if connection.kind.reads == "prepared":
                        hub.prepared.popleft()
                connection.taken, connection.room = taken, taken + ahead
            case wire.Commit(offset):
                hub.rollouts.commit(offset)
            case wire.PassOn(offset, item):
                hub.pass_on(offset, item)
                connection.passed_on += 1
            case wire.Offer() | wire.Meeting():
                self._tell_engines(message)
            case _ if connection.kind.process is not None:
                self._handle_generation(connection, connection.kind.process, message)

    def _handle_generation(self, connection: Connection, process: int, message: wire.ToHub) -> None:
        hub = self._hub
        match message:
            case wire.Ask():
                connection.ask = message
                hub.admission.holds(process, message.holding, message.version)
            case wire.HandOver():
                if replaced := hub.hand_over(message):
                    connection.wire.send(wire.Dropped(replaced))
            case wire.MayTake(version):
                connection.want = version
            case wire.EngineAnswer(number, receipt):
                connection.asks_for_weights = True
                self._tell_trainer(wire.EngineAnswer(number, receipt, process))
            case wire.Open():
                hub.admission.opened = True
                for other in self._connections:
                    if other.kind.process is not None:
                        other.wire.send(wire.Open())

    def _tell_engines(self, message: wire.Offer | wire.Meeting) -> None:
        """A process that has not asked for weights yet gets no offer of its predecessor."""
        for connection in self._connections:
            if connection.asks_for_weights and message.engine in (None, connection.kind.process):
                connection.wire.send(message)

    def _tell_trainer(self, answer: wire.EngineAnswer) -> None:
        for connection in self._connections:
            if connection.kind.follows:
                connection.wire.send(answer)

    def _publish(self, status: StageStatus) -> None:
        self._hub.board.publish(status)
        for connection in self._connections:
            if connection.kind.follows or status.stage == TRAINER:
                connection.unsent.add(status.stage)

    def _end(self, connection: Connection) -> None:
        """The connection is closed: what the worker had in progress is returned."""
        if connection.ended.is_set():
            return
        self._selector.unregister(connection.wire)
        connection.wire.close()
        self._connections.remove(connection)
        if connection.kind.process is not None:
            self._hub.admission.lose(connection.kind.process)
            self._tell_trainer(wire.EngineAnswer(wire.DEAD, engine=connection.kind.process))
        with self._failing():
            if connection.kind.reads == "unprepared":
                self._hub.rollouts.return_to(self._hub.passed_on)
            elif connection.kind.reads == "groups" and connection.offsets:
                self._hub.rollouts.return_to(connection.offsets[0])
        connection.ended.set()

    def _serve(self) -> None:
        """Send every worker what it has asked for, as far as it is there."""
        if self.failure is None:
            with self._failing():
                self._grant()
                for connection in self._connections:
                    if connection.kind.reads:
                        self._send_items(connection)
                    if connection.want is not None and self._hub.admission.may_take(connection.want).allowed:
                        connection.wire.send(wire.MayTake(connection.want))
                        connection.want = None
        for connection in self._connections:
            if connection.unsent or connection.wire.backlog or connection.writing:
                self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        """Send what there is room for. Of statuses that is the latest."""
        connection.wire.flush()
        for stage in () if connection.wire.backlog else tuple(connection.unsent):
            if (status := self._hub.board.read(stage)) is not None:
                connection.wire.send(wire.Publish(status))
            connection.unsent.discard(stage)
        if connection.writing != connection.wire.backlog:
            connection.writing = connection.wire.backlog
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writing else 0)
            self._selector.modify(connection.wire, events, connection)

    def _grant(self) -> None:
        """Grant groups, in turn. Processes with the same inputs get the same denial."""
        admission, denied = self._hub.admission, dict[tuple[int, int, int], Verdict]()
        for connection in tuple(self._connections):
            process, ask = connection.kind.process, connection.ask
            while process is not None and connection.granted < ask.total:
                key = (ask.version, ask.rollouts, admission.own(process))
                index, verdict = (
                    (None, denied[key]) if key in denied else self._hub.claim(process, ask.version, ask.rollouts)
                )
                if index is None:
                    denied[key] = verdict
                    connection.deny(verdict)
                    break
                denied.clear()
                connection.granted += 1
                connection.wire.send(wire.Grant(index))
                self._connections.remove(connection)
                self._connections.append(connection)

    def _send_items(self, connection: Connection) -> None:
        """Send what the worker has room for, and a preprocessor only as many as may be prepared ahead."""
        hub, room, unread = self._hub, connection.room - connection.sent, len(connection.offsets)
        if connection.kind.reads == "unprepared":
            room = min(room, connection.passed_on + PREPARED_AHEAD - len(hub.prepared) - connection.sent)
        if connection.kind.reads == "prepared":
            items = list(islice(hub.prepared, unread, unread + room))
        else:
            items = list(hub.rollouts.read(max(0, room)))
        for offset, json in items:
            connection.sent += 1
            connection.offsets.append(offset)
            connection.wire.send(wire.Item(offset, json))

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait_ended()
        self._closing = True
        self._wake.send(b"\0")
        self._thread.join()
        for end in (self._selector, self._wake, self._woken, self._hub):
            end.close()

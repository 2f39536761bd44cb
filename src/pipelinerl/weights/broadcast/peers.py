"""The sender's state of each receiver and of the coordinator: connected, ready, acknowledged, gone.

One thread per connection reads its messages.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipelinerl.errors import WeightUpdateError
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import (
    PROTOCOL,
    Answer,
    Arrived,
    Close,
    Connection,
    FromReceiver,
    FromSender,
    Hello,
    Leave,
    ProtocolError,
    Ready,
    Staged,
    Trouble,
)

CLOSED = "the weight sender has closed"
_LARGEST_BYTES = 1 << 16
_HELLO_BOUND_S = 10.0
_POLL_S = 0.02
# When a receiver dies, others may report broken connections before its death is noticed.
_GRACE_S = 1.0


@dataclass(eq=False)
class Peer:
    """State of one receiver, or of the coordinator (`index` None).

    `ready`, `staged` and `answered` are update numbers. For the coordinator, `staged` is the last update announced to it.
    """

    index: int | None
    connection: Connection[FromReceiver] | None = None
    engine: str = ""
    gpu: str = ""
    ready: int = 0
    staged: int = 0
    answered: int = 0
    receipts: list[UpdateReceipt] = field(default_factory=list)
    last_message_s: float = 0.0  # time.monotonic
    gone: str | None = None
    trouble: str | None = None
    trouble_s: float = 0.0

    @property
    def joined(self) -> bool:
        """True once it has connected, even if it is gone by now."""
        return self.connection is not None

    @property
    def label(self) -> str:
        who = "coordinator" if self.index is None else f"number {self.index}"
        return who + (f" ({self.engine})" if self.engine else "")


class Peers:
    """All receivers of a sender. The first failure ends the transfer and is reported to every receiver."""

    def __init__(self, listener: socket.socket, receivers: int, stall_s: float, *, coordinated: bool = False) -> None:
        """`stall_s`: a receiver that the sender waits for counts as failed after this long without a message.

        `coordinated`: a coordinator connects as well and answers for all receivers.
        """
        self._listener = listener
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self.receivers = [Peer(index) for index in range(receivers)]
        self.coordinator = Peer(None) if coordinated else None
        self.all = [*self.receivers, *([self.coordinator] if self.coordinator else [])]
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def send(self, message: FromSender, peers: Sequence[Peer] | None = None) -> None:
        """Send the message to `peers` (default: all)."""
        for peer in self.all if peers is None else peers:
            if peer.connection is not None:
                peer.connection.send(message)

    def notify_coordinator(self, update: Arrived) -> None:
        """Tell the coordinator, if there is one, that every receiver has the update."""
        if self.coordinator is not None:
            self.send(update, [self.coordinator])
            with self._changed:
                self.coordinator.staged = update.number
                self._changed.notify_all()

    def all_joined(self) -> bool:
        with self._changed:
            return all(peer.joined for peer in self.all)

    def wait(
        self,
        done: Callable[[Peer], bool],
        bound_s: float,
        verb: str,
        *,
        peers: Sequence[Peer] | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until `done(peer)` for each of `peers` (default: all). False if `give_up` returned True meanwhile.

        Raises WeightUpdateError, with the peer's name, if one that is not done is gone, stalls or has failed (which ends the
        transfer), or did not `verb` within `bound_s`.
        """
        started_s = time.monotonic()
        with self._changed:
            while missing := [peer for peer in (self.all if peers is None else peers) if not done(peer)]:
                if give_up() or self._closed:
                    return False
                self.require_alive(missing)
                if (waited_s := time.monotonic() - started_s) > bound_s:
                    raise WeightUpdateError(
                        f"engine {labels(missing)} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)"
                    )
                self._changed.wait(_POLL_S)
        return True

    def require_alive(self, peers: Sequence[Peer] | None = None) -> None:
        """Raises WeightUpdateError, and ends the transfer, if one of `peers` (default: all) is gone, stalls or failed."""
        with self._changed:
            self.require_no_failure()
            if self._closed:
                raise WeightUpdateError(CLOSED)
            if (cause := self._failure_cause(self.all if peers is None else peers)) is not None:
                self.fail(cause)
                raise WeightUpdateError(cause)

    def require_receiving_alive(self, number: int) -> None:
        """`require_alive` for the receivers that do not have update `number` yet. The others may leave."""
        with self._changed:
            self.require_alive([peer for peer in self.receivers if peer.staged < number])

    def require_no_failure(self) -> None:
        """Raises WeightUpdateError if the transfer has failed."""
        if self._failure is not None:
            raise WeightUpdateError(self._failure)

    def fail(self, error: str) -> None:
        """End the transfer for all. Only the first failure is kept."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self._changed.notify_all()
        self.send(Close(error))

    def has_answer(self, peer: Peer, number: int) -> bool:
        """Whether `peer`, or the coordinator on its behalf, has answered update `number`."""
        return (self.coordinator or peer).answered >= number

    @property
    def answering(self) -> Sequence[Peer]:
        """The peers whose answers count: the coordinator if there is one, since servers may answer later than it does."""
        return self.receivers if self.coordinator is None else [self.coordinator]

    def missing(self, number: int) -> Sequence[Peer]:
        """The peers that have yet to answer update `number`."""
        with self._changed:
            return [peer for peer in self.answering if peer.answered < number]

    def take_receipts(self) -> Sequence[UpdateReceipt]:
        """All receipts since the last call."""
        with self._changed:
            receipts = [receipt for peer in self.all for receipt in peer.receipts]
            for peer in self.all:
                peer.receipts = []
        return receipts

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self.send(Close())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Ends the accepting thread.
        self._listener.close()
        for peer in self.all:
            if peer.connection is not None:
                peer.connection.close()

    def _failure_cause(self, peers: Iterable[Peer]) -> str | None:
        """Why one of `peers` can't continue, or None. One death causes errors at other peers, so it is checked first."""
        joined = [peer for peer in peers if peer.joined]
        for peer in joined:
            if peer.gone is not None:
                return f"engine {peer.label} {peer.gone}"
        now_s = time.monotonic()
        if silent := [peer for peer in joined if now_s - peer.last_message_s > self._stall_s]:
            return (
                f"engine {labels(silent)} sent nothing for {self._stall_s:g} s: its process is stopped, or its machine "
                "can't be reached"
            )
        for peer in joined:
            if peer.trouble is not None and now_s - peer.trouble_s > _GRACE_S:
                return f"engine {peer.label} can't receive weights: {peer.trouble}"
        return None

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_POLL_S)  # For example, no descriptor is free.
                continue
            threading.Thread(target=self._serve, args=(connected,), name="weights-peer", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Process the messages of one connection until it ends."""
        try:
            connection = Connection[FromReceiver](connected, FromReceiver, largest=_LARGEST_BYTES)
        except OSError:
            connected.close()
            return
        peer = self._admit(connection)
        if peer is None:
            connection.close()
            return
        try:
            while not isinstance(message := connection.receive(None), Leave):
                self._record(peer, message)
            gone = "has left"
        except (EOFError, ConnectionResetError):
            gone = "is gone: its process exited unexpectedly"
        except (OSError, ProtocolError) as error:
            gone = f"is lost: {error}"
        with self._changed:
            peer.gone = gone
            self._changed.notify_all()
        connection.close()

    def _admit(self, connection: Connection[FromReceiver]) -> Peer | None:
        """Assign the connection to its peer. None if it is refused; the other side is told why."""
        try:
            hello = connection.receive(_HELLO_BOUND_S)
        except (OSError, EOFError, ProtocolError):
            return None
        if not isinstance(hello, Hello):
            return None
        with self._changed:
            if (refusal := self._refusal(hello)) is None:
                peer = self._peer_of(hello)
                peer.engine, peer.gpu = hello.engine[:100], hello.gpu
                peer.last_message_s, peer.connection = time.monotonic(), connection
                self._changed.notify_all()
                return peer
        connection.send(Close(refusal))
        return None

    def _refusal(self, hello: Hello) -> str | None:
        count = len(self.receivers)
        if hello.protocol != PROTOCOL:
            return f"the weight sender uses {PROTOCOL}, the receiver {hello.protocol[:100]!r}: install the same version"
        if hello.receivers is not None and hello.receivers != count:
            return f"the weight sender has {count} receivers, but {Peer(hello.index).label} expects {hello.receivers}"
        if hello.index is None and self.coordinator is None:
            return "the weight sender's receivers send their own receipts: it expects no coordinator"
        if hello.index is not None and not 0 <= hello.index < count:
            return f"the weight sender has receivers number 0 to {count - 1}, not {hello.index}"
        if self._peer_of(hello).joined:
            return f"there is a receiver {Peer(hello.index).label} already: each needs its own number"
        return self._failure or (CLOSED if self._closed else None)

    def _peer_of(self, hello: Hello) -> Peer:
        if hello.index is not None:
            return self.receivers[hello.index]
        assert self.coordinator is not None  # noqa: S101 - `_refusal` checked this
        return self.coordinator

    def _record(self, peer: Peer, message: FromReceiver | None) -> None:
        with self._changed:
            peer.last_message_s = time.monotonic()
            match message:
                case Ready(number):
                    peer.ready = number
                case Staged(number):
                    peer.staged = number
                case Answer(number, receipt) if number > peer.answered and peer in self.answering:
                    peer.answered, peer.engine = number, peer.engine or receipt.engine[:100]
                    peer.receipts.append(receipt)
                case Trouble(error):
                    peer.trouble, peer.trouble_s = peer.trouble or error, peer.trouble_s or time.monotonic()
                case _:
                    return
            self._changed.notify_all()


def labels(peers: Iterable[Peer]) -> str:
    return ", ".join(peer.label for peer in peers)

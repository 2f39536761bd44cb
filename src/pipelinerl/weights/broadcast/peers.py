"""The sender's view of its receivers, and of who coordinates them: who has come, who is ready, who answered, who is gone.

A thread reads each of them.
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
_LOOK_S = 0.02
# Whoever is cut off by a death may say so before the death itself is seen.
_GRACE_S = 1.0


@dataclass(eq=False)
class Peer:
    """What is known of one receiver, or of the coordinator (`index` None), for whom `staged` is what it was told of.

    `ready`, `staged` and `answered` are numbers of updates.
    """

    index: int | None
    connection: Connection[FromReceiver] | None = None
    engine: str = ""
    gpu: str = ""
    ready: int = 0
    staged: int = 0
    answered: int = 0
    receipts: list[UpdateReceipt] = field(default_factory=list)
    heard_s: float = 0.0  # time.monotonic
    gone: str | None = None
    trouble: str | None = None
    trouble_s: float = 0.0

    @property
    def here(self) -> bool:
        """Has come, though it may be gone by now."""
        return self.connection is not None

    @property
    def label(self) -> str:
        who = "coordinator" if self.index is None else f"number {self.index}"
        return who + (f" ({self.engine})" if self.engine else "")


class Peers:
    """All of a sender's receivers. Nothing goes on after the first failure, and every receiver is told of it."""

    def __init__(self, listener: socket.socket, receivers: int, stall_s: float, *, coordinated: bool = False) -> None:
        """`stall_s`: a receiver that is waited for, and was not heard of for so long, is given up.

        `coordinated`: one more comes, which answers for all of them.
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

    def tell(self, message: FromSender, peers: Sequence[Peer] | None = None) -> None:
        """Say it to these (all)."""
        for peer in self.all if peers is None else peers:
            if peer.connection is not None:
                peer.connection.send(message)

    def announce(self, update: Arrived) -> None:
        """Tell the coordinator, if there is one, that every receiver has the update."""
        if self.coordinator is not None:
            self.tell(update, [self.coordinator])
            with self._changed:
                self.coordinator.staged = update.number
                self._changed.notify_all()

    def all_here(self) -> bool:
        with self._changed:
            return all(peer.here for peer in self.all)

    def wait(
        self,
        done: Callable[[Peer], bool],
        bound_s: float,
        verb: str,
        *,
        peers: Sequence[Peer] | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until `done` for each of these (all); False if it was given up.

        Raises WeightUpdateError, with its name, if one that is missing is gone, stalls or has trouble (that ends the
        transfer), or did not `verb` in time.
        """
        begun_s = time.monotonic()
        with self._changed:
            while missing := [peer for peer in (self.all if peers is None else peers) if not done(peer)]:
                if give_up() or self._closed:
                    return False
                self.require_alive(missing)
                if (waited_s := time.monotonic() - begun_s) > bound_s:
                    raise WeightUpdateError(
                        f"engine {labels(missing)} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)"
                    )
                self._changed.wait(_LOOK_S)
        return True

    def require_alive(self, peers: Sequence[Peer] | None = None) -> None:
        """Raises WeightUpdateError, and ends the transfer, if one of these (all) is gone, stalls or has trouble."""
        with self._changed:
            self.require_no_failure()
            if self._closed:
                raise WeightUpdateError(CLOSED)
            if (cause := self._cause(self.all if peers is None else peers)) is not None:
                self.fail(cause)
                raise WeightUpdateError(cause)

    def require_on_its_way(self, number: int) -> None:
        """The same of those who do not have update `number` yet; the others may go."""
        with self._changed:
            self.require_alive([peer for peer in self.receivers if peer.staged < number])

    def require_no_failure(self) -> None:
        """Raises WeightUpdateError if the transfer has failed."""
        if self._failure is not None:
            raise WeightUpdateError(self._failure)

    def fail(self, error: str) -> None:
        """End the transfer for all. The first failure is the one that counts."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self._changed.notify_all()
        self.tell(Close(error))

    def has_answer(self, peer: Peer, number: int) -> bool:
        """Whether there is an answer to update `number` from this one, or from the coordinator for it."""
        return (self.coordinator or peer).answered >= number

    @property
    def answering(self) -> Sequence[Peer]:
        """Those whose answers count. What servers say for themselves may come after the coordinator's word for all."""
        return self.receivers if self.coordinator is None else [self.coordinator]

    def missing(self, number: int) -> Sequence[Peer]:
        """Those who are to answer update `number`, and have not."""
        with self._changed:
            return [peer for peer in self.answering if peer.answered < number]

    def take_receipts(self) -> Sequence[UpdateReceipt]:
        """All that came since the last call."""
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
        self.tell(Close())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Ends the accepting thread.
        self._listener.close()
        for peer in self.all:
            if peer.connection is not None:
                peer.connection.close()

    def _cause(self, peers: Iterable[Peer]) -> str | None:
        """What keeps one of these from going on. A death explains the trouble of those it cuts off, so it comes first."""
        here = [peer for peer in peers if peer.here]
        for peer in here:
            if peer.gone is not None:
                return f"engine {peer.label} {peer.gone}"
        now_s = time.monotonic()
        if silent := [peer for peer in here if now_s - peer.heard_s > self._stall_s]:
            return (
                f"engine {labels(silent)} was not heard of for {self._stall_s:g} s: its process is stopped, or its machine "
                "can't be reached"
            )
        for peer in here:
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
                time.sleep(_LOOK_S)  # No descriptor is free, say.
                continue
            threading.Thread(target=self._read, args=(connected,), name="weights-peer", daemon=True).start()

    def _read(self, connected: socket.socket) -> None:
        """Everything that one connection says, until it ends."""
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
                self._note(peer, message)
            gone = "has left"
        except (EOFError, ConnectionResetError):
            gone = "is gone: its process ended without a word"
        except (OSError, ProtocolError) as error:
            gone = f"is lost: {error}"
        with self._changed:
            peer.gone = gone
            self._changed.notify_all()
        connection.close()

    def _admit(self, connection: Connection[FromReceiver]) -> Peer | None:
        """The peer whose connection this is from now on. None, and it is told why, if it is not one that is waited for."""
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
                peer.heard_s, peer.connection = time.monotonic(), connection
                self._changed.notify_all()
                return peer
        connection.send(Close(refusal))
        return None

    def _refusal(self, hello: Hello) -> str | None:
        count = len(self.receivers)
        if hello.protocol != PROTOCOL:
            return f"the weight sender speaks {PROTOCOL}, the receiver {hello.protocol[:100]!r}: install the same version"
        if hello.receivers is not None and hello.receivers != count:
            return f"the weight sender has {count} receivers, not {hello.receivers} as {Peer(hello.index).label} believes"
        if hello.index is None and self.coordinator is None:
            return "the weight sender's receivers answer for themselves: nobody coordinates them"
        if hello.index is not None and not 0 <= hello.index < count:
            return f"the weight sender has receivers number 0 to {count - 1}, not {hello.index}"
        if self._peer_of(hello).here:
            return f"there is a receiver {Peer(hello.index).label} already: each needs its own number"
        return self._failure or (CLOSED if self._closed else None)

    def _peer_of(self, hello: Hello) -> Peer:
        if hello.index is not None:
            return self.receivers[hello.index]
        assert self.coordinator is not None  # noqa: S101 - `_refusal` was asked first
        return self.coordinator

    def _note(self, peer: Peer, message: FromReceiver | None) -> None:
        with self._changed:
            peer.heard_s = time.monotonic()
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

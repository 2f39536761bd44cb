"""The members of a weight broadcast, as the sender hears them.

One thread hears all members. Another one, for a moment, admits each new connection, so that a silent stranger delays nobody.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from pipelinerl.channel import POLL_S, Channel, ProtocolError
from pipelinerl.errors import BroadcastEndedError, PipelineRLError, WeightUpdateError
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import PROTOCOL, Close, FromMember, FromSender, Gpu, Hello, Report
from pipelinerl.weights.messages import Answer, Offer

_CLOSED = "the weight sender has closed"
_ENDING_S = 5.0
_GRACE_S = 1.0
"""When a receiver dies, others may report broken connections before its death is noticed."""


@dataclass(eq=False)
class Member:
    """The sender's view of a receiver, or of the coordinator (`index` None). `staged`, `answered`: numbers of updates."""

    index: int | None
    channel: Channel[FromMember] | None = None  # None: it has not connected yet
    engine: str = ""
    gpu: Gpu | None = None
    staged: int = 0
    answered: int = 0
    lost: str = ""  # why its connection has ended
    failure: str = ""  # what it has reported
    failed_s: float = math.inf  # time.monotonic
    heard_s: float = math.inf

    @property
    def label(self) -> str:
        who = "coordinator" if self.index is None else f"number {self.index}"
        return who + (f" ({self.engine})" if self.engine else "")


class Members:
    """All members. The first failure ends the transfer and is reported to all.

    answering   those whose answers count: the coordinator, if there is one, answers for all servers
    offer       the last update
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        receivers: int,
        *,
        stall_s: float,
        coordinated: bool,
        take: Callable[[UpdateReceipt], None],
        give_up: Callable[[], bool],
    ) -> None:
        """`stall_s`: a member that is not heard for longer is lost. `take` gets the receipts for the last update."""
        self._listener, self._key, self._stall_s = listener, key, stall_s
        self._take, self._give_up = take, give_up
        self.changed = threading.Condition()
        self.offer: Offer | None = None
        self.receivers = [Member(index) for index in range(receivers)]
        self.coordinator = Member(None) if coordinated else None
        self.answering = [self.coordinator] if self.coordinator else self.receivers
        self.all = [*self.receivers, *([self.coordinator] if self.coordinator else [])]
        self._closed = False
        self._failure: PipelineRLError | None = None
        self._thread = threading.Thread(target=self._hear_all, name="weights-control", daemon=True)
        self._thread.start()

    @property
    def unanswered(self) -> list[Member]:
        """Those that have not acknowledged the last update."""
        return [member for member in self.answering if self.offer is not None and member.answered < self.offer.number]

    def send(self, message: FromSender, members: Sequence[Member] | None = None) -> None:
        """Send the message to `members` (default: all)."""
        for member in self.all if members is None else members:
            if member.channel is not None:
                member.channel.send(message)

    def wait_until(
        self,
        missing: Callable[[], Sequence[Member]],
        bound_s: float,
        verb: str,
        late: type[WeightUpdateError] = BroadcastEndedError,
    ) -> bool:
        """Wait until nobody is `missing`. False if the run or the sender has ended.

        Raises `late`, with the names, if they did not `verb` within `bound_s`, and what `require_alive` raises.
        """
        started_s = time.monotonic()
        with self.changed:
            while members := missing():
                if self._give_up() or self._closed:
                    return False
                self.require_alive()
                if (waited_s := time.monotonic() - started_s) > bound_s:
                    names = ", ".join(member.label for member in members)
                    raise late(f"engine {names} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)")
                self.changed.wait(POLL_S)
        return True

    def require_alive(self) -> None:
        """Raises WeightUpdateError, and ends the transfer, if a member is lost (BroadcastEndedError) or has failed."""
        with self.changed:
            if not self._closed and self._failure is None and (cause := self._cause()) is not None:
                self.fail(cause)
            if self._failure is not None or self._closed:
                failure = self._failure or WeightUpdateError(_CLOSED)
                raise type(failure)(*failure.args)

    def require_no_failure(self) -> None:
        """Raises WeightUpdateError if the transfer has failed."""
        if self._failure is not None and not self._give_up():  # when the run ends, engines may leave during an update
            raise type(self._failure)(*self._failure.args)

    def fail(self, error: PipelineRLError) -> None:
        """End the transfer for all. Only the first failure is kept."""
        with self.changed:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self.changed.notify_all()
        self.send(Close(str(error)))

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.send(Close())
        self._thread.join(_ENDING_S)

    def _cause(self) -> WeightUpdateError | None:
        """Why a member can't continue, or None. A death causes failures at others, which count later."""
        now_s = time.monotonic()
        for member in self.all:
            silent = f"sent nothing for {self._stall_s:g} s" if now_s - member.heard_s > self._stall_s else ""
            if member.lost or silent:
                return BroadcastEndedError(f"engine {member.label} {member.lost or silent}")
        first = min(self.all, key=lambda member: member.failed_s)
        if now_s - first.failed_s < _GRACE_S:
            return None
        return WeightUpdateError(f"engine {first.label} can't receive weights: {first.failure}")

    # ---- hearing

    def _hear_all(self) -> None:
        """Accept connections and take messages until the sender closes."""
        while not self._closed:
            connected = [(member, member.channel) for member in self.all if not member.lost]
            heard = {channel.fileno(): (member, channel) for member, channel in connected if channel is not None}
            listening = self._listener.fileno()
            for ready in wait([listening, *heard], POLL_S):
                if ready == listening:
                    self._accept()
                elif isinstance(ready, int):
                    self._hear(*heard[ready])
        self._listener.close()
        for member in self.all:
            if member.channel is not None:
                member.channel.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            time.sleep(POLL_S)  # For example, no descriptor is free.
        else:
            threading.Thread(target=self._admit, args=(connected,), name="weights-admit", daemon=True).start()

    def _admit(self, connected: socket.socket) -> None:
        """Assign the connection to its member, or refuse it and tell the other side why."""
        with connected, contextlib.suppress(OSError, EOFError, ProtocolError):
            channel = Channel[FromMember](connected, self._key, FromMember, dialled=False)
            hello = channel.receive()
            if isinstance(hello, Hello):
                with self.changed:
                    if (refusal := self._refusal(hello)) is None:
                        member = next(member for member in self.all if member.index == hello.index)
                        member.engine, member.gpu, member.heard_s = hello.engine[:100], hello.gpu, time.monotonic()
                        member.channel = channel
                        self.changed.notify_all()
                        return
                channel.send(Close(refusal))
            channel.close()

    def _refusal(self, hello: Hello) -> str | None:
        count, label, theirs = len(self.receivers), Member(hello.index).label, hello.protocol[:100]
        joined = {member.index: member.channel is not None for member in self.all}
        reasons = {
            f"the weight sender uses {PROTOCOL}, the receiver {theirs!r}: install the same version": hello.protocol
            != PROTOCOL,
            f"the weight sender has {count} receivers, but {label} expects {hello.receivers}": (
                hello.receivers not in (None, count)
            ),
            "the weight sender's receivers send their own receipts: it expects no coordinator": (
                hello.index is None and self.coordinator is None
            ),
            f"the weight sender has receivers number 0 to {count - 1}, not {hello.index}": hello.index not in joined,
            f"there is a receiver {label} already: each needs its own number": joined.get(hello.index, False),
            str(self._failure or _CLOSED): self._failure is not None or self._closed,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _hear(self, member: Member, channel: Channel[FromMember]) -> None:
        """Take one message."""
        message: FromMember | None = None
        lost = ""
        try:
            message = channel.receive()
        except (EOFError, ConnectionResetError):
            lost = "is gone: its process exited unexpectedly"
        except (OSError, ProtocolError) as error:
            lost = f"is lost: {error}"
        with self.changed:
            number, member.heard_s = self.offer.number if self.offer else 0, time.monotonic()
            match message:
                case None:
                    member.lost = lost
                case Report("leaving"):
                    member.lost = "has left"
                case Report("staged") if message.number == number:
                    member.staged = number
                case Report("failed") if not member.failure:
                    member.failure, member.failed_s = message.error, time.monotonic()
                case Answer(receipt=UpdateReceipt() as receipt) if (
                    self.offer and message.number == number > member.answered and member in self.answering
                ):
                    member.answered, member.engine = number, member.engine or receipt.engine[:100]
                    self._take(receipt)
            self.changed.notify_all()

"""The members of a weight broadcast, as the sender hears them.

One thread hears all members. Another one, for a moment, admits each new connection, so that a silent stranger delays nobody.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from pipelinerl.channel import POLL_S, Channel, ProtocolError
from pipelinerl.errors import WeightUpdateError
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast import control
from pipelinerl.weights.broadcast.group import GroupBrokenError
from pipelinerl.weights.sending import complaint

_CLOSED = "the weight sender has closed"
_ENDING_S = 5.0
# When a receiver dies, others may report broken connections before its death is noticed.
_GRACE_S = 1.0


@dataclass(eq=False)
class Member:
    """The sender's view of a receiver, or of the coordinator (`index` None).

    `done`: the last update of each step. `version`: of the last update that it was told to apply; -1 if there was none.
    """

    index: int | None
    channel: Channel[control.FromMember] | None = None  # None: not connected
    engine: str = ""
    gpu: control.Gpu | None = None
    done: dict[str, int] = field(default_factory=lambda: {"ready": 0, "full": 0, "staged": 0, "answered": 0})
    version: int = -1
    heard_s: float = 0.0  # time.monotonic, as `failed_s`
    failure: str = ""
    failed_s: float = math.inf  # when the failure counts
    connected: bool = False

    @property
    def label(self) -> str:
        who = "coordinator" if self.index is None else f"number {self.index}"
        return who + (f" ({self.engine})" if self.engine else "")


class Members:
    """All members, as the sender hears them. The first failure ends the transfer and is reported to all.

    group      those that take part in the current group; all before the first
    formed     whether the group exists; True before the first
    regroups   the end of a member's connection is no failure: it leaves the group and may connect again for the next one
    broken     why the group can't be used any more; "" if it can
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        receivers: int,
        *,
        stall_s: float,
        coordinated: bool,
        give_up: Callable[[], bool],
    ) -> None:
        """`stall_s`: a member that the sender waits for is lost after this long without a message."""
        self._listener, self._key, self._stall_s, self._give_up = listener, key, stall_s, give_up
        self.changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._problem: str | None = None
        self._receipts: list[UpdateReceipt] = []
        self._unused: list[Channel[control.FromMember]] = []  # the hearing thread closes them
        self.offer: control.Offer | None = None  # the last update
        self.receivers = [Member(index) for index in range(receivers)]
        self.coordinator = Member(None) if coordinated else None
        self.all = [*self.receivers, *([self.coordinator] if self.coordinator else [])]
        self.group = list(self.all)
        self.formed, self.regroups = True, False
        self.broken = ""
        self._thread = threading.Thread(target=self._hear_all, name="weights-control", daemon=True)
        self._thread.start()

    @property
    def receiving(self) -> list[Member]:
        """The receivers of the group."""
        return [member for member in self.group if member.index is not None]

    @property
    def answering(self) -> Sequence[Member]:
        """The members of the group whose answers count: the coordinator, if there is one, answers for all servers."""
        return [member for member in self.group if (member.index is None) == (self.coordinator is not None)]

    @property
    def unanswered(self) -> list[Member]:
        """Those that have not acknowledged the last update. Nobody, while there is no group."""
        if not self.formed or self.offer is None:
            return []
        return [member for member in self.answering if member.done["answered"] < self.offer.number]

    @property
    def late(self) -> list[Member]:
        """Those that are waited for while somebody is `unanswered`: the coordinator waits for all servers."""
        unanswered = self.unanswered
        return list(self.group) if unanswered and self.coordinator is not None else unanswered

    @property
    def newcomers(self) -> list[Member]:
        """Members that are connected and not in the group."""
        return [member for member in self.all if member.channel is not None and member not in self.group]

    def send(self, message: control.FromSender, members: Sequence[Member] | None = None) -> None:
        """Send the message to `members` (default: all)."""
        for member in self.all if members is None else members:
            if (channel := member.channel) is not None:
                channel.send(message)

    def wait_until(self, missing: Callable[[], Sequence[Member]], bound_s: float, verb: str) -> bool:
        """Wait until nobody is `missing`. False if the run or the sender has ended.

        Raises WeightUpdateError, with the member's name, if one that is missing is gone, stalls or has failed (which ends
        the transfer), or did not `verb` within `bound_s`.
        """
        started_s = time.monotonic()
        with self.changed:
            while members := missing():
                if self._give_up() or self._closed:
                    return False
                self.require_alive(members)
                if (waited_s := time.monotonic() - started_s) > bound_s:
                    names = _labels(members)
                    raise WeightUpdateError(f"engine {names} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)")
                self.changed.wait(POLL_S)
        return True

    def require_alive(self, members: Sequence[Member]) -> None:
        """Raises WeightUpdateError, and ends the transfer, if one of `members` is gone, stalls or failed.

        One that stalls leaves the group instead, if groups are formed again.
        """
        with self.changed:
            if not self._closed and self._failure is None and (cause := self._failure_cause(members)) is not None:
                self.fail(cause)
            if self._failure is not None or self._closed:
                raise WeightUpdateError(self._failure or _CLOSED)

    def require_whole(self) -> None:
        """Raises GroupBrokenError if a member has left the group."""
        if self.broken:
            raise GroupBrokenError(self.broken)

    def require_no_problem(self) -> None:
        """Raises WeightUpdateError if a receipt does not match its update, or the transfer has failed."""
        # When the run ends, engines may leave during an update.
        if problem := self._problem or (None if self._give_up() else self._failure):
            raise WeightUpdateError(problem)

    def fail(self, error: str) -> None:
        """End the transfer for all. Only the first failure is kept."""
        with self.changed:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self.changed.notify_all()
        self.send(control.Close(error))

    def dismiss(self) -> list[Member]:
        """End the group: have its members connect again. Returns them."""
        with self.changed:
            members, self.group, self.formed = self.group, [], False
            channels = [member.channel for member in members if member.channel is not None]
            for member in members:
                self._part(member)
        for channel in channels:
            channel.send(control.Close("another group is formed", again=True))
        return members

    def gather(self, expected: Sequence[Member]) -> bool:
        """Wait for the members of the next group: until those `expected` have connected, at most `stall_s`, and then until
        there is a group. False if the run or the sender has ended. Raises WeightUpdateError if the transfer has failed.
        """
        started_s = time.monotonic()
        with self.changed:
            while not (self._give_up() or self._closed):
                self.require_alive([])
                here = [member for member in self.all if member.channel is not None]
                needed = {member.index is None for member in self.all}
                late = any(member.channel is None for member in expected) and time.monotonic() - started_s < self._stall_s
                if not late and {member.index is None for member in here} == needed:
                    self.group, self.broken = here, ""
                    return True
                self.changed.wait(POLL_S)
        return False

    def take_receipts(self) -> Sequence[UpdateReceipt]:
        """All receipts since the last call. None is missed: the next update waits for those of this one."""
        with self.changed:
            receipts, self._receipts = self._receipts, []
        return receipts

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.send(control.Close())
        self._thread.join(_ENDING_S)

    def _failure_cause(self, members: Sequence[Member]) -> str | None:
        """Why one of `members` can't continue, or None. One death causes errors at others, which count later."""
        now_s = time.monotonic()
        first = min(self.all if self.regroups else members, key=lambda member: member.failed_s, default=None)
        if first is not None and first.failed_s <= now_s:
            return f"engine {first.label} {first.failure}"
        silent = [member for member in members if member.connected and now_s - member.heard_s > self._stall_s]
        why = f"sent nothing for {self._stall_s:g} s: its process is stopped, or its machine can't be reached"
        if not self.regroups:
            return f"engine {_labels(silent)} {why}" if silent else None
        for member in silent:
            self._part(member, why)
        return None

    def _part(self, member: Member, why: str = "") -> None:
        """Forget the member's connection. If it was in the group, the group is broken because of that."""
        if member.channel is not None:
            self._unused.append(member.channel)
        member.channel, member.connected = None, False
        if member in self.group:
            self.group.remove(member)
            self.broken = self.broken or f"engine {member.label} {why}"
        self.changed.notify_all()

    # ---- Hearing

    def _hear_all(self) -> None:
        """Accept connections and take messages until the sender closes."""
        while not self._closed:
            with self.changed:
                heard = {
                    member.channel.fileno(): (member, member.channel)
                    for member in self.all
                    if member.channel is not None and member.connected
                }
                unused, self._unused = self._unused, []
            for channel in unused:
                channel.close()
            listening = self._listener.fileno()
            for ready in wait([listening, *heard], POLL_S):
                if ready == listening:
                    self._accept()
                elif isinstance(ready, int):
                    self._hear(*heard[ready])
        self._listener.close()
        for channel in [*self._unused, *(member.channel for member in self.all if member.channel is not None)]:
            channel.close()

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
            channel = Channel[control.FromMember](connected, self._key, control.FromMember, dialled=False)
            hello = channel.receive()
            if isinstance(hello, control.Hello):
                with self.changed:
                    if (refusal := self._refusal(hello)) is None:
                        member = next(member for member in self.all if member.index == hello.index)
                        if member.channel is not None:
                            self._part(member, "has connected again")
                        member.engine, member.gpu, member.heard_s = hello.engine[:100], hello.gpu, time.monotonic()
                        member.channel, member.connected, member.version = channel, True, -1
                        self.changed.notify_all()
                        return
                channel.send(control.Close(refusal))
            channel.close()

    def _refusal(self, hello: control.Hello) -> str | None:
        count, label, theirs = len(self.receivers), Member(hello.index).label, hello.protocol[:100]
        joined = {member.index: member.channel is not None for member in self.all}
        reasons = {
            f"the weight sender uses {control.PROTOCOL}, the receiver {theirs!r}: install the same version": (
                hello.protocol != control.PROTOCOL
            ),
            f"the weight sender has {count} receivers, but {label} expects {hello.receivers}": (
                hello.receivers not in (None, count)
            ),
            "the weight sender's receivers send their own receipts: it expects no coordinator": (
                hello.index is None and self.coordinator is None
            ),
            f"the weight sender has receivers number 0 to {count - 1}, not {hello.index}": hello.index not in joined,
            f"there is a receiver {label} already: each needs its own number": (
                joined.get(hello.index, False) and not self.regroups
            ),
            self._failure or _CLOSED: self._failure is not None or self._closed,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _hear(self, member: Member, channel: Channel[control.FromMember]) -> None:
        """Take one message."""
        message: control.FromMember | None = None
        try:
            message = channel.receive()
            lost = "has left" if message == control.Report("leaving") else ""
        except (EOFError, ConnectionResetError):
            lost = "is gone: its process exited unexpectedly"
        except (OSError, ProtocolError) as error:
            lost = f"is lost: {error}"
        with self.changed:
            if member.channel is not channel:  # it has connected again meanwhile
                return
            now_s = member.heard_s = time.monotonic()
            if lost and self.regroups:
                self._part(member, lost)
            elif lost:
                member.connected = False
                member.failure, member.failed_s = member.failure or lost, min(member.failed_s, now_s)
            match message:
                case control.Report("ready" | "full" | "staged" as step, number) if (
                    self.offer and number == self.offer.number
                ):
                    member.done[step] = number
                case control.Report("failed", error=reason) if not member.failure:
                    member.failure, member.failed_s = f"can't receive weights: {reason}", now_s + _GRACE_S
                case control.Answer(number, receipt) if self.offer and member in self.answering:
                    if number == self.offer.number > member.done["answered"]:
                        member.done["answered"], member.engine = number, member.engine or receipt.engine[:100]
                        self._receipts.append(receipt)
                        self._problem = self._problem or complaint(receipt, self.offer.version, self.offer.checksum)
            self.changed.notify_all()


def _labels(members: Iterable[Member]) -> str:
    return ", ".join(member.label for member in members)

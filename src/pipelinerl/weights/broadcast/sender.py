"""The trainer's end of a weight broadcast.

Two threads: one hears all members (`Members`), one broadcasts (`CollectiveWeightSender._run`). A third one, for a moment,
admits each new connection, so that a silent stranger delays nobody.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import POLL_S, Channel, ProtocolError
from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.models.state import checksum, digests_of, first_names
from pipelinerl.rendezvous import serve_store
from pipelinerl.types import MAX_RECEIVERS, Encoding, UpdateReceipt, WeightTransfer
from pipelinerl.weights.broadcast import control
from pipelinerl.weights.broadcast.group import (
    Backend,
    Group,
    choose_backend,
    gpu_of,
    staging_buffer,
    staging_device,
)
from pipelinerl.weights.delta import encode
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.sending import complaint, layout_of, require_same

BUCKET_BYTES = 64 << 20
_CLOSED = "the weight sender has closed"
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
# When a receiver dies, others may report broken connections before its death is noticed.
_GRACE_S = 1.0
_CPU = torch.device("cpu")


@dataclass(eq=False)
class Member:
    """The sender's view of a receiver, or of the coordinator (`index` None). `done`: the last update of each step."""

    index: int | None
    channel: Channel[control.FromMember] | None = None  # None: not connected yet
    engine: str = ""
    gpu: str = ""
    done: dict[str, int] = field(default_factory=lambda: {"ready": 0, "full": 0, "staged": 0, "answered": 0})
    heard_s: float = 0.0  # time.monotonic, as `failed_s`
    failure: str = ""
    failed_s: float = math.inf  # when the failure counts
    connected: bool = False

    @property
    def label(self) -> str:
        who = "coordinator" if self.index is None else f"number {self.index}"
        return who + (f" ({self.engine})" if self.engine else "")


class Members:
    """All members, as the sender hears them. The first failure ends the transfer and is reported to all."""

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
        """`stall_s`: a member that the sender waits for counts as failed after this long without a message."""
        self._listener, self._key, self._stall_s, self._give_up = listener, key, stall_s, give_up
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._problem: str | None = None
        self._receipts: list[UpdateReceipt] = []
        self.offer: control.Offer | None = None  # the last update
        self.receivers = [Member(index) for index in range(receivers)]
        self.coordinator = Member(None) if coordinated else None
        self.all = [*self.receivers, *([self.coordinator] if self.coordinator else [])]
        self._thread = threading.Thread(target=self._hear_all, name="weights-control", daemon=True)
        self._thread.start()

    @property
    def answering(self) -> Sequence[Member]:
        """The members whose answers count: the coordinator if there is one, since servers may answer later than it does."""
        return self.receivers if self.coordinator is None else [self.coordinator]

    def send(self, message: control.FromSender, members: Sequence[Member] | None = None) -> None:
        """Send the message to `members` (default: all)."""
        for member in self.all if members is None else members:
            if member.channel is not None:
                member.channel.send(message)

    def wait_until(
        self, done: Callable[[Member], bool], bound_s: float, verb: str, members: Sequence[Member] | None = None
    ) -> bool:
        """Wait until `done(member)` for each of `members` (default: all). False if the run or the sender has ended.

        Raises WeightUpdateError, with the member's name, if one that is not done is gone, stalls or has failed (which ends
        the transfer), or did not `verb` within `bound_s`.
        """
        started_s = time.monotonic()
        with self._changed:
            while missing := [member for member in (self.all if members is None else members) if not done(member)]:
                if self._give_up() or self._closed:
                    return False
                self.require_alive(missing)
                if (waited_s := time.monotonic() - started_s) > bound_s:
                    names = _labels(missing)
                    raise WeightUpdateError(f"engine {names} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)")
                self._changed.wait(POLL_S)
        return True

    def require_alive(self, members: Sequence[Member]) -> None:
        """Raises WeightUpdateError, and ends the transfer, if one of `members` is gone, stalls or failed."""
        with self._changed:
            if not self._closed and self._failure is None and (cause := self._failure_cause(members)) is not None:
                self.fail(cause)
            if self._failure is not None or self._closed:
                raise WeightUpdateError(self._failure or _CLOSED)

    def require_no_problem(self) -> None:
        """Raises WeightUpdateError if a receipt does not match its update, or the transfer has failed."""
        # When the run ends, engines may leave during an update.
        if problem := self._problem or (None if self._give_up() else self._failure):
            raise WeightUpdateError(problem)

    def fail(self, error: str) -> None:
        """End the transfer for all. Only the first failure is kept."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self._changed.notify_all()
        self.send(control.Close(error))

    def take_receipts(self) -> Sequence[UpdateReceipt]:
        """All receipts since the last call. None is missed: the next update waits for those of this one."""
        with self._changed:
            receipts, self._receipts = self._receipts, []
        return receipts

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.send(control.Close())
        self._thread.join(_ENDING_S)

    def _failure_cause(self, members: Sequence[Member]) -> str | None:
        """Why one of `members` can't continue, or None. One death causes errors at others, which count later."""
        now_s = time.monotonic()
        first = min(members, key=lambda member: member.failed_s, default=None)
        if first is not None and first.failed_s <= now_s:
            return f"engine {first.label} {first.failure}"
        if silent := [member for member in members if member.connected and now_s - member.heard_s > self._stall_s]:
            return (
                f"engine {_labels(silent)} sent nothing for {self._stall_s:g} s: its process is stopped, or its machine "
                "can't be reached"
            )
        return None

    # ---- Hearing

    def _hear_all(self) -> None:
        """Accept connections and take messages until the sender closes."""
        while not self._closed:
            channels = {member.channel.fileno(): member for member in self.all if member.channel and member.connected}
            listening = self._listener.fileno()
            for ready in wait([listening, *channels], POLL_S):
                if ready == listening:
                    self._accept()
                elif isinstance(ready, int):
                    self._hear(channels[ready])
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
            channel = Channel[control.FromMember](connected, self._key, control.FromMember, dialled=False)
            hello = channel.receive()
            if isinstance(hello, control.Hello):
                with self._changed:
                    if (refusal := self._refusal(hello)) is None:
                        member = next(member for member in self.all if member.index == hello.index)
                        member.engine, member.gpu, member.heard_s = hello.engine[:100], hello.gpu, time.monotonic()
                        member.channel, member.connected = channel, True
                        self._changed.notify_all()
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
            f"there is a receiver {label} already: each needs its own number": joined.get(hello.index, False),
            self._failure or _CLOSED: self._failure is not None or self._closed,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _hear(self, member: Member) -> None:
        """Take one message."""
        message: control.FromMember | None = None
        try:
            message = member.channel.receive() if member.channel is not None else None
            lost = "has left" if message == control.Report("leaving") else ""
        except (EOFError, ConnectionResetError):
            lost = "is gone: its process exited unexpectedly"
        except (OSError, ProtocolError) as error:
            lost = f"is lost: {error}"
        with self._changed:
            now_s = member.heard_s = time.monotonic()
            if lost:
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
            self._changed.notify_all()


class CollectiveWeightSender:
    """Sends to `receivers` engines that connect to `listener` and know `key`. The sender owns and closes `listener`.

    Uses nccl if this process and every receiver have a GPU of their own, else gloo (`choose_backend`).
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        receivers: int,
        *,
        timeout_s: float = 120.0,
        stall_s: float = 30.0,
        join_timeout_s: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        device: torch.device = _CPU,
        coordinated: bool = False,
        encoding: Encoding = "full",
        full_every: int = 100,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `stall_s`: how long a receiver may be silent; a transfer may make no
        progress for twice as long.

        `join_timeout_s`: how long to wait for all receivers to connect. `dtype`: the type of floating-point tensors as sent
        (None: unchanged). `device`: where this process computes; with nccl the copy to send is there. `coordinated`: the
        engines are servers; a coordinator connects as well, decides when they apply an update and answers for all of them.
        `encoding` delta: send what differs from the previous update, except in the first and every `full_every`-th update,
        if a receiver asks for all weights, or if that would not be fewer bytes. Needs a second copy of the weights.
        `give_up` returns True when the run is ending, and engines may be gone: the sender then neither waits nor sends.
        """
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        if bucket_bytes < 1:
            raise ValueError(f"a bucket has at least one byte, not {bucket_bytes}")
        if stall_s < 1:
            raise ValueError(f"stall_s must be at least a second, not {stall_s:g} s")
        self._timeout_s, self._stall_s, self._join_timeout_s = timeout_s, stall_s, join_timeout_s
        self._bucket_bytes, self._dtype, self._device = bucket_bytes, dtype, device
        self._gpu = gpu_of(device)
        self._give_up = give_up
        self.host, self.port = listener.getsockname()[:2]
        self._key = key
        self._members = Members(listener, key, receivers, stall_s=stall_s, coordinated=coordinated, give_up=give_up)
        self._layout: Layout | None = None
        self._encoding, self._full_every = encoding, full_every
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)  # the update, and with deltas the previous one
        self._base = ""  # checksum of the previous update
        self._begin_s = 0.0
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}
        self._released = 0  # the last update that may be applied
        self._closing = threading.Event()
        self._outbox: queue.SimpleQueue[control.Offer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors and return the checksum of the copy ("" if `give_up` said so). A thread then broadcasts the copy.

        Versions must rise, and names, types, shapes and tying must not change; otherwise raises WeightUpdateError. Also
        raises it if an engine is gone, stalls, did not acknowledge the previous update in time, or holds other weights.
        """
        last = self._members.offer
        if last is not None and version <= last.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {last.version}")
        layout, encoded = layout_of(tensors, self._dtype), ""
        if self._layout is not None:
            require_same(self._layout, layout)
        if not self._wait_for_answers():
            return ""
        if self._layout is None:
            if self._gpu and not self._wait_until_joined():  # The copy's device depends on the receivers.
                return ""
            device = staging_device(self._backend, self._device)
            self._staging_U8 = staging_buffer(layout.buffer_bytes, device)
            if self._encoding == "delta":
                self._base_U8 = staging_buffer(layout.buffer_bytes, device)
            self._layout, encoded = layout, msgspec.json.encode(layout).decode()
        elif self._encoding == "delta":
            self._staging_U8, self._base_U8 = self._base_U8, self._staging_U8
        self._begin_s = time.monotonic()
        staged = layout.views(self._staging_U8)
        with torch.no_grad():
            for name, owner in first_names(tensors).items():
                if name == owner:
                    staged[name].copy_(tensors[name])
        number = last.number + 1 if last else 1
        self.digests = digests_of(staged)
        whole = checksum(staged, self.digests)
        offer = control.Offer(number=number, version=version, checksum=whole, layout=encoded)
        self._members.offer = offer
        self._outbox.put(offer)
        return offer.checksum

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        members, number = self._members, self._members.offer.number if self._members.offer else 0
        return [member.label for member in members.answering if member.done["answered"] < number]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if one does not match the update or the transfer failed."""
        self._members.require_no_problem()
        return self._members.take_receipts()

    def close(self) -> None:
        """End the transfer. The last update is still delivered, unless there was a failure, and can be taken afterwards."""
        if (offer := self._members.offer) is not None and all(member.channel for member in self._members.all):
            with contextlib.suppress(WeightUpdateError):  # `receipts` reports failures; `close` does not.
                self._wait_until_released(offer)
        self._outbox.put(None)
        self._closing.set()
        self._members.close()
        self._thread.join(_ENDING_S)
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)

    def _wait_for_answers(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if the run is ending."""
        if self._give_up():
            return False
        members = self._members
        if (offer := members.offer) is not None:
            answered = self._wait_until_released(offer) and members.wait_until(
                lambda member: (members.coordinator or member).done["answered"] >= offer.number,
                self._timeout_s,
                f"answer weights of version {offer.version}",
            )
            if not answered:
                return False
        members.require_no_problem()
        members.require_alive(members.all)
        return True

    def _wait_until_released(self, offer: control.Offer) -> bool:
        """Wait until every receiver has the update and may apply it. False if the run is ending."""
        # The thread has tighter bounds; this one is for a backend that blocks it.
        buckets = -(-self._staging_U8.numel() // self._bucket_bytes)
        broadcasts = 1 if self._encoding == "full" else 2
        bound_s = self._join_timeout_s + 2 * self._stall_s * (1 + broadcasts * (1 + buckets))
        verb = f"receive weights of version {offer.version}"
        return self._members.wait_until(lambda _: self._released >= offer.number, bound_s, verb)

    # ---- The broadcasting thread

    def _run(self) -> None:
        """Any error here fails the whole transfer."""
        group: Group | None = None
        try:
            group = self._form_group()
            while group is not None and (offer := self._outbox.get()) is not None:
                self._broadcast(group, offer)
        except PipelineRLError as error:
            with contextlib.suppress(WeightUpdateError):
                self._members.require_alive(self._members.all)  # A dead member explains more.
            self._members.fail(str(error))
        except Exception as error:
            self._members.fail(f"the weight sender failed: {type(error).__name__}: {error}")
            raise
        # PyTorch can't destroy a group safely during interpreter shutdown, so `close` waits for this.
        self._closing.wait()
        if group is not None:
            group.end()

    @property
    def _backend(self) -> Backend:
        """Valid once all receivers have connected."""
        return choose_backend(self._gpu, [member.gpu for member in self._members.receivers])

    def _wait_until_joined(self) -> bool:
        """Wait until all members have connected. False if the run is ending."""
        verb = f"connect to {self.host}:{self.port}"
        return self._members.wait_until(lambda member: member.channel is not None, self._join_timeout_s, verb)

    def _form_group(self) -> Group | None:
        """The group, or None if the run ended before all members had connected."""
        if not self._wait_until_joined():
            return None
        backend, size = self._backend, len(self._members.receivers) + 1
        device, bound_s = staging_device(backend, self._device), 2 * self._stall_s
        rendezvous = serve_store(self.host, self._key, bound_s)
        form = control.Form(
            backend=backend,
            size=size,
            store_port=rendezvous.port,
            bucket_bytes=self._bucket_bytes,
            stall_s=self._stall_s,
            coordinated=self._members.coordinator is not None,
        )
        self._members.send(form)
        return Group(backend, rendezvous, self._key, rank=0, size=size, host=self.host, bound_s=bound_s, device=device)

    def _broadcast(self, group: Group, offer: control.Offer) -> None:
        """Offer the update, broadcast it once all receivers are ready, and release it once all have staged it.

        So no broadcast begins while a receiver is stopped or dead. One that stops later is detected by its silence. If any
        receiver can't use the delta, all receive all weights.
        """
        members, number, delta_U8 = self._members, offer.number, self._delta(offer)
        if delta_U8 is not None:
            offer = msgspec.structs.replace(offer, base=self._base, delta_bytes=delta_U8.numel())
        members.send(offer)
        if not self._wait_for_step(("ready",), offer, 2 * self._stall_s):
            return
        encoding: Encoding = "full"
        sent_bytes = 0
        if delta_U8 is not None and not self._full_wanted(number):
            encoding, sent_bytes = "delta", delta_U8.numel()
            if not self._transmit(group, offer, "delta", delta_U8):
                return
        if encoding == "full" or self._full_wanted(number):
            encoding, sent_bytes = "full", sent_bytes + self._staging_U8.numel()
            if not self._transmit(group, offer, "full", self._staging_U8):
                return
        time_s = time.monotonic() - self._begin_s
        self.transfer = WeightTransfer(version=offer.version, bytes=sent_bytes, time_s=time_s, encoding=encoding)
        self._base = offer.checksum
        members.send(control.Go("apply", number), members.answering)
        self._released = number

    def _delta(self, offer: control.Offer) -> Tensor | None:
        """The delta from the previous update; None if all weights are due or not longer."""
        if self._encoding == "full" or not self._base or (offer.number - 1) % self._full_every == 0:
            return None
        return encode(self._staging_U8, self._base_U8, below=self._staging_U8.numel())

    def _full_wanted(self, number: int) -> bool:
        return any(member.done["full"] >= number for member in self._members.receivers)

    def _transmit(self, group: Group, offer: control.Offer, encoding: Encoding, sent_U8: Tensor) -> bool:
        """One broadcast, until all receivers have staged the update or refused the delta. False if the run is ending."""
        members, number = self._members, offer.number
        for member in members.receivers:
            member.done["staged"] = number - 1  # Those that could use the delta stage the update again.
        members.send(control.Go("receive", number, encoding), members.receivers)
        ends = ("staged",) if encoding == "full" else ("staged", "full")
        try:
            group.broadcast(sent_U8, self._bucket_bytes, lambda: members.require_alive(self._behind(number)))
        except WeightUpdateError:
            self._wait_for_step(ends, offer, _EXPLANATION_S)  # Raises an error that names the failed receiver.
            raise
        return self._wait_for_step(ends, offer, 2 * self._stall_s)

    def _wait_for_step(self, steps: Sequence[str], offer: control.Offer, bound_s: float) -> bool:
        """Wait until all receivers have done one of the steps. False if the run is ending."""
        verb = f"{'get ready for' if 'ready' in steps else 'receive'} weights of version {offer.version}"
        return self._members.wait_until(
            lambda member: any(member.done[step] >= offer.number for step in steps),
            bound_s,
            verb,
            self._members.receivers,
        )

    def _behind(self, number: int) -> Sequence[Member]:
        """The receivers that have not staged update `number` yet. The others may leave."""
        return [member for member in self._members.receivers if member.done["staged"] < number]


def _labels(members: Iterable[Member]) -> str:
    return ", ".join(member.label for member in members)

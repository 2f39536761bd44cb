"""The trainer's end of a weight broadcast: a thread that broadcasts, beside the one that hears all members (`members`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import POLL_S
from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.models.state import checksum, digests_of, first_names
from pipelinerl.rendezvous import serve_store
from pipelinerl.types import MAX_RECEIVERS, Encoding, UpdateReceipt, WeightTransfer
from pipelinerl.weights.broadcast import control
from pipelinerl.weights.broadcast.group import (
    Group,
    GroupBrokenError,
    choose_backend,
    gpu_of,
    staging_buffer,
    staging_device,
)
from pipelinerl.weights.broadcast.members import Member, Members
from pipelinerl.weights.delta import encode
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.sending import layout_of, require_same, source_checksum

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
_MOST_BROKEN = 4
"""Groups in a row that break although no member has left, before the transfer fails."""
_CPU = torch.device("cpu")


class CollectiveWeightSender:
    """Sends to `receivers` engines that connect to `listener` and know `key`. The sender owns and closes `listener`.

    Uses nccl if it can be used between this process and every receiver, else gloo (`choose_backend`).
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
        regroups: bool = False,
        return_s: float = 60.0,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `stall_s`: how long a receiver may be silent; a transfer may make no
        progress for twice as long.

        `join_timeout_s`: how long to wait for all receivers to connect. `dtype`: the type of floating-point tensors as sent
        (None: unchanged). `device`: where this process computes; with nccl the copy to send is there. `coordinated`: the
        engines are servers; a coordinator connects as well, decides when they apply an update and answers for all of them.
        `encoding` delta: send what differs from the previous update, except in the first and every `full_every`-th update,
        if a receiver asks for all weights, or if that would not be fewer bytes. Needs a second copy of the weights.
        `regroups`: once the first group is formed, members may be lost and come back (see the package). `return_s`: how long
        `close` waits for one that is away.
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
        self._copies = threading.Lock()  # held while one of them is written or broadcast
        self._base = ""  # checksum of the previous update that this group has; "": none
        self._regroups, self._return_s = regroups, return_s
        self._broken = 0  # groups in a row
        self._begin_s = 0.0
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}
        self._released = 0  # the last update that may be applied
        self._closing = threading.Event()
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
        layout = layout_of(tensors, self._dtype)
        if self._layout is not None:
            require_same(self._layout, layout)
        with self._previous_answered() as answered:
            if not answered or not self._have_buffers(layout):
                return ""
            self._begin_s = time.monotonic()
            staged = layout.views(self._staging_U8)
            with torch.no_grad():
                for name, owner in first_names(tensors).items():
                    if name == owner:
                        staged[name].copy_(tensors[name])
            self.digests = digests_of(staged)
            self._offer(version, checksum(staged, self.digests), source_checksum(tensors, self._dtype))
        return self._members.offer.checksum if self._members.offer else ""

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        return [member.label for member in self._members.unanswered]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if one does not match the update or the transfer failed."""
        self._members.require_no_problem()
        return self._members.take_receipts()

    def close(self) -> None:
        """End the transfer. The last update is still delivered, unless there was a failure, and can be taken afterwards.

        A receiver that has left and does not have it is waited for, for at most `return_s`.
        """
        members = self._members
        with contextlib.suppress(WeightUpdateError):  # `receipts` reports failures; `close` does not.
            if members.regroups:
                members.wait_until(self._behind_the_last, self._return_s, "come back for the last weights")
            elif all(member.channel for member in members.all):
                self._wait_until_released()
        self._closing.set()
        members.close()
        self._thread.join(_ENDING_S)
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)

    def _behind_the_last(self) -> list[Member]:
        last = self._members.offer
        return [member for member in self._members.receivers if last is not None and member.version < last.version]

    def _offer(self, version: int, checksum: str, sums: str) -> None:
        """Have the thread broadcast what is in the buffer."""
        members = self._members
        with members.changed:
            number = members.offer.number + 1 if members.offer else 1
            members.offer = control.Offer(number=number, version=version, checksum=checksum, device_checksum=sums)
            members.changed.notify_all()

    def _have_buffers(self, layout: Layout) -> bool:
        """Make the buffers for the first update. For a delta, the previous update becomes the base. False: the run ends."""
        if self._layout is None:
            if self._gpu and not self._wait_until_joined():  # The copy's device depends on the receivers.
                return False
            device = staging_device(self._backend[0], self._device)
            self._staging_U8 = staging_buffer(layout.buffer_bytes, device)
            if self._encoding == "delta":
                self._base_U8 = staging_buffer(layout.buffer_bytes, device)
            self._layout = layout
        elif self._encoding == "delta":
            self._staging_U8, self._base_U8 = self._base_U8, self._staging_U8
        return True

    @contextmanager
    def _previous_answered(self) -> Iterator[bool]:
        """While inside, the buffers may be written: all engines of the group have acknowledged the previous update.

        Nobody is waited for while a group is formed again. False if the run is ending.
        """
        members = self._members
        while True:
            answered = self._wait_for_answers()
            with self._copies:
                if not answered or not members.unanswered:  # a new group gets the previous update too
                    yield answered
                    return

    def _wait_for_answers(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if the run is ending."""
        if self._give_up():
            return False
        members = self._members
        if (offer := members.offer) is not None:
            verb = f"answer weights of version {offer.version}"
            if not self._wait_until_released():
                return False
            if not members.wait_until(lambda: members.late, self._timeout_s, verb):
                return False
        members.require_no_problem()
        members.require_alive(members.group)
        return True

    def _wait_until_released(self) -> bool:
        """Wait until every receiver has the update and may apply it. False if the run is ending."""
        members = self._members
        if (offer := members.offer) is None:
            return True
        # The thread has tighter bounds; this one is for a backend that blocks it.
        buckets = -(-self._staging_U8.numel() // self._bucket_bytes)
        broadcasts = 1 if self._encoding == "full" else 2
        bound_s = self._join_timeout_s + 2 * self._stall_s * (1 + broadcasts * (1 + buckets))

        def waits() -> Sequence[Member]:
            return members.group if members.formed and members.offer and self._released < members.offer.number else []

        return members.wait_until(waits, bound_s, f"receive weights of version {offer.version}")

    # ---- The broadcasting thread

    def _run(self) -> None:
        """Any error here fails the whole transfer."""
        group: Group | None = None
        try:
            while True:
                try:
                    group = self._form_group()
                    if group is not None:
                        self._deliver(group)
                    break
                except GroupBrokenError as error:
                    members = self._members
                    self._broken += not (members.broken or members.newcomers)
                    if not members.regroups or self._broken > _MOST_BROKEN:
                        raise
                    logger.warning("the group of weight receivers is formed again: %s", error)
                    if group is not None:
                        group.end()
                    group = None
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
    def _backend(self) -> tuple[str, str]:
        """And why it is not nccl. Valid once all receivers of the group have connected."""
        return choose_backend(self._gpu, [member.gpu for member in self._members.receiving])

    def _wait_until_joined(self) -> bool:
        """Wait until all members have connected. False if the run is ending."""
        members, verb = self._members, f"connect to {self.host}:{self.port}"
        return members.wait_until(
            lambda: [member for member in members.all if member.channel is None], self._join_timeout_s, verb
        )

    def _form_group(self) -> Group | None:
        """A group of all members, or later of those that there are. None if the run ends before.

        A group that replaces another one begins with the last update.
        """
        members = self._members
        if not (members.gather(members.dismiss()) if members.regroups else self._wait_until_joined()):
            return None
        (backend, why), size = self._backend, len(members.receiving) + 1
        if why and self._gpu is not None:
            logger.warning("weights are broadcast by the hosts (gloo), not between the GPUs: %s", why)
        device, bound_s = staging_device(backend, self._device), 2 * self._stall_s
        rendezvous = serve_store(self.host, self._key, bound_s)
        form = control.Form(
            backend=backend,
            size=size,
            rank=0,
            store_port=rendezvous.port,
            bucket_bytes=self._bucket_bytes,
            stall_s=self._stall_s,
            coordinated=members.coordinator is not None,
            regroups=self._regroups,
        )
        if members.coordinator is not None:
            members.send(form, [members.coordinator])
        for rank, member in enumerate(members.receiving, start=1):
            members.send(msgspec.structs.replace(form, rank=rank), [member])
        group = Group(backend, rendezvous, self._key, rank=0, size=size, host=self.host, bound_s=bound_s, device=device)
        if not members.regroups:
            members.regroups = self._regroups
            return group
        with self._copies:
            self._base, members.formed = "", True
            self._staging_U8, self._base_U8 = self._staging_U8.to(device), self._base_U8.to(device)
            if members.offer is not None:
                self._offer(members.offer.version, members.offer.checksum, members.offer.device_checksum)
        return group

    def _deliver(self, group: Group) -> None:
        """Broadcast updates until the sender closes. Raises GroupBrokenError when another group must be formed."""
        members, number = self._members, 0
        while True:
            with members.changed:
                while not self._closing.is_set() and not (members.offer and members.offer.number > number):
                    if newcomers := members.newcomers:
                        raise GroupBrokenError(f"engine {newcomers[0].label} joins")
                    members.changed.wait(POLL_S)
            if self._closing.is_set():
                return
            with self._copies:
                assert members.offer is not None  # noqa: S101 - it is awaited above
                offer, first = members.offer, number == 0
                members.require_whole()
                self._broadcast(group, offer, first=first)
            number = offer.number

    def _broadcast(self, group: Group, offer: control.Offer, *, first: bool) -> None:
        """Offer the update, broadcast it once all receivers are ready, and release it once all have staged it.

        So no broadcast begins while a receiver is stopped or dead. One that stops later is detected by its silence. If any
        receiver can't use the delta, all receive all weights. `first`: of this group.
        """
        members, number, delta_U8 = self._members, offer.number, self._delta(offer)
        if first:
            offer = msgspec.structs.replace(offer, layout=msgspec.json.encode(self._layout).decode())
        if delta_U8 is not None:
            offer = msgspec.structs.replace(offer, base=self._base, delta_bytes=delta_U8.numel())
        members.send(offer, members.group)
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
        self._base, self._broken = offer.checksum, 0
        members.send(control.Go("apply", number), members.answering)
        with members.changed:
            for member in members.receiving:
                member.version = offer.version
            self._released = number
            members.changed.notify_all()

    def _delta(self, offer: control.Offer) -> Tensor | None:
        """The delta from the previous update; None if all weights are due or not longer."""
        if self._encoding == "full" or not self._base or (offer.number - 1) % self._full_every == 0:
            return None
        return encode(self._staging_U8, self._base_U8, below=self._staging_U8.numel())

    def _full_wanted(self, number: int) -> bool:
        return any(member.done["full"] >= number for member in self._members.receiving)

    def _transmit(self, group: Group, offer: control.Offer, encoding: Encoding, sent_U8: Tensor) -> bool:
        """One broadcast, until all receivers have staged the update or refused the delta. False if the run is ending."""
        members, number = self._members, offer.number
        for member in members.receiving:
            member.done["staged"] = number - 1  # Those that could use the delta stage the update again.
        members.send(control.Go("receive", number, encoding), members.receiving)
        ends = ("staged",) if encoding == "full" else ("staged", "full")

        def check() -> None:
            members.require_alive(self._without(("staged",), number))
            members.require_whole()

        try:
            group.broadcast(sent_U8, self._bucket_bytes, check)
        except WeightUpdateError:
            self._wait_for_step(ends, offer, _EXPLANATION_S)  # Raises an error that names the failed receiver.
            raise
        return self._wait_for_step(ends, offer, 2 * self._stall_s)

    def _wait_for_step(self, steps: Sequence[str], offer: control.Offer, bound_s: float) -> bool:
        """Wait until all receivers have done one of the steps. False if the run is ending.

        Raises GroupBrokenError if one has left the group.
        """
        verb = f"{'get ready for' if 'ready' in steps else 'receive'} weights of version {offer.version}"

        def missing() -> list[Member]:
            self._members.require_whole()
            return self._without(steps, offer.number)

        return self._members.wait_until(missing, bound_s, verb)

    def _without(self, steps: Sequence[str], number: int) -> list[Member]:
        """The receivers that have not done one of the steps of update `number`. The others may leave."""
        return [member for member in self._members.receiving if all(member.done[step] < number for step in steps)]

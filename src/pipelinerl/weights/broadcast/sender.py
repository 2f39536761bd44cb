"""The trainer's end of a weight broadcast: a thread that broadcasts, beside the one that hears all members (`members`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import POLL_S, listen
from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.rendezvous import serve_store
from pipelinerl.types import MAX_RECEIVERS, Encoding, UpdateReceipt, WeightTransfer
from pipelinerl.weights.broadcast.control import Apply, Form
from pipelinerl.weights.broadcast.group import Group, choose_backend, gpu_of, staging_buffer, staging_device
from pipelinerl.weights.broadcast.members import Members
from pipelinerl.weights.delta import encode
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.messages import Offer
from pipelinerl.weights.sending import Sender

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
"""Time for members to explain a broadcast that has failed: one may be gone."""
_CPU = torch.device("cpu")


class CollectiveWeightSender(Sender):
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
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `stall_s`: how long a receiver may be silent; a transfer may make no
        progress for twice as long.

        `join_timeout_s`: how long to wait for all receivers to connect. `dtype`: the type of floating-point tensors as sent
        (None: unchanged). `device`: where this process computes; with nccl the copy to send is there. `coordinated`: the
        engines are servers; a coordinator connects as well, decides when they apply an update and answers for all of them.
        `encoding` delta: send what differs from the previous update, except in the first and every `full_every`-th update,
        or if that would not be fewer bytes. Needs a second copy of the weights.
        `give_up` returns True when the run is ending, and engines may be gone: the sender then neither waits nor sends.
        """
        super().__init__(dtype)
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        if bucket_bytes < 1:
            raise ValueError(f"a bucket has at least one byte, not {bucket_bytes}")
        if stall_s < 1:
            raise ValueError(f"stall_s must be at least a second, not {stall_s:g} s")
        self._timeout_s, self._stall_s, self._join_timeout_s = timeout_s, stall_s, join_timeout_s
        self._bucket_bytes, self._device = bucket_bytes, device
        self._gpu, self._give_up = gpu_of(device), give_up
        self.host, self.port = listener.getsockname()[:2]
        self._key = key
        self._members = Members(
            listener, key, receivers, stall_s=stall_s, coordinated=coordinated, take=self._take, give_up=give_up
        )
        self._encoding, self._full_every = encoding, full_every
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)  # the update, and with deltas the previous one
        self._released = 0  # the last update that may be applied
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        return [member.label for member in self._members.unanswered]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """As of every sender. Raises WeightUpdateError also if the transfer has failed."""
        if self._problem is not None:
            self._members.require_alive()  # a server that has died, and was started again, refuses updates
        self._members.require_no_failure()
        with self._members.changed:
            return super().receipts()

    def close(self) -> None:
        """End the transfer. The last update is still delivered, unless there was a failure, and can be taken afterwards."""
        with contextlib.suppress(WeightUpdateError):  # `receipts` reports failures; `close` does not.
            if all(member.channel for member in self._members.all):
                self._wait_until_released()
        self._closing.set()
        self._members.close()
        self._thread.join(_ENDING_S)
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)

    def _buffer(self, layout: Layout) -> Mapping[str, Tensor] | None:
        """For a delta, the previous update becomes the base."""
        if not self._previous_answered():
            return None
        if self._layout is None:
            if self._gpu and not self._wait_until_joined():  # The copy's device depends on the receivers.
                return None
            device = staging_device(self._backend[0], self._device)
            self._staging_U8 = staging_buffer(layout.buffer_bytes, device)
            if self._encoding == "delta":
                self._base_U8 = staging_buffer(layout.buffer_bytes, device)
        elif self._encoding == "delta":
            self._staging_U8, self._base_U8 = self._base_U8, self._staging_U8
        return layout.views(self._staging_U8)

    def _publish(self, offer: Offer, _copies: Mapping[str, Tensor]) -> None:
        """A thread broadcasts the copies."""
        with self._members.changed:
            self._members.offer = offer
            self._members.changed.notify_all()

    def _previous_answered(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if the run is ending."""
        members, offer = self._members, self._members.offer
        if self._give_up() or not self._wait_until_released():
            return False
        if offer is not None:
            verb = f"answer weights of version {offer.version}"
            if not members.wait_until(lambda: members.unanswered, self._timeout_s, verb, WeightUpdateError):
                return False
        members.require_alive()
        self._raise_problem()
        return True

    def _wait_until_released(self) -> bool:
        """Wait until every receiver has the update and may apply it. False if the run is ending."""
        members = self._members
        if (offer := members.offer) is None:
            return True
        # The thread has tighter bounds; this one is for a backend that blocks it.
        buckets = -(-self._staging_U8.numel() // self._bucket_bytes)
        bound_s = self._join_timeout_s + 2 * self._stall_s * (2 + buckets)
        verb = f"receive weights of version {offer.version}"
        return members.wait_until(lambda: members.all if self._released < offer.number else [], bound_s, verb)

    def _wait_until_joined(self) -> bool:
        """Wait until all members have connected. False if the run is ending."""
        members, verb = self._members, f"connect to {self.host}:{self.port}"
        missing = lambda: [member for member in members.all if member.channel is None]  # noqa: E731
        return members.wait_until(missing, self._join_timeout_s, verb, WeightUpdateError)

    @property
    def _backend(self) -> tuple[str, str]:
        """And why it is not nccl. Valid once all receivers have connected."""
        return choose_backend(self._gpu, [member.gpu for member in self._members.receivers])

    # ---- the broadcasting thread

    def _run(self) -> None:
        """Any error here fails the whole transfer."""
        group: Group | None = None
        members = self._members
        try:
            if self._wait_until_joined():
                group = self._form_group()
                self._deliver(group)
        except PipelineRLError as error:
            with contextlib.suppress(WeightUpdateError):
                members.wait_until(lambda: members.all, _EXPLANATION_S, "explain it")  # a dead member explains more
            members.fail(error)
        except Exception as error:
            members.fail(WeightUpdateError(f"the weight sender failed: {type(error).__name__}: {error}"))
            raise
        # PyTorch can't destroy a group safely during interpreter shutdown, so `close` waits for this.
        self._closing.wait()
        if group is not None:
            group.end()

    def _form_group(self) -> Group:
        members = self._members
        (backend, why), size = self._backend, len(members.receivers) + 1
        if why and self._gpu is not None:
            logger.warning("weights are broadcast by the hosts (gloo), not between the GPUs: %s", why)
        device, bound_s = staging_device(backend, self._device), 2 * self._stall_s
        rendezvous = serve_store(listen(self.host), self._key, bound_s)
        for member in members.all:
            form = Form(
                backend=backend,
                size=size,
                rank=0 if member.index is None else member.index + 1,
                store_port=rendezvous.port,
                bucket_bytes=self._bucket_bytes,
                stall_s=self._stall_s,
                coordinated=members.coordinator is not None,
            )
            members.send(form, [member])
        return Group(backend, rendezvous, self._key, rank=0, size=size, host=self.host, bound_s=bound_s, device=device)

    def _deliver(self, group: Group) -> None:
        """Broadcast updates until the sender closes."""
        members, number = self._members, 0
        while not self._closing.is_set():
            with members.changed:
                offer = members.offer
                if offer is None or offer.number == number:
                    members.changed.wait(POLL_S)
                    continue
            self._broadcast(group, offer)
            number = offer.number

    def _broadcast(self, group: Group, offer: Offer) -> None:
        """Offer the update, broadcast it, and release it once all receivers have staged it."""
        members, number, delta_U8 = self._members, offer.number, self._delta(offer)
        sent_U8 = self._staging_U8 if delta_U8 is None else delta_U8
        layout = msgspec.json.encode(self._layout).decode() if number == 1 else ""
        delta_bytes = None if delta_U8 is None else delta_U8.numel()
        members.send(msgspec.structs.replace(offer, layout=layout, delta_bytes=delta_bytes))
        group.broadcast(sent_U8, self._bucket_bytes, members.require_alive)
        missing = lambda: [member for member in members.receivers if member.staged < number]  # noqa: E731
        if not members.wait_until(missing, 2 * self._stall_s, f"receive weights of version {offer.version}"):
            return
        time_s = time.monotonic() - self._begin_s
        encoding: Encoding = "full" if delta_U8 is None else "delta"
        self.transfer = WeightTransfer(version=offer.version, bytes=sent_U8.numel(), time_s=time_s, encoding=encoding)
        members.send(Apply(number), members.answering)
        with members.changed:
            self._released = number
            members.changed.notify_all()

    def _delta(self, offer: Offer) -> Tensor | None:
        """The delta from the previous update, which all receivers hold; None if all weights are due or not longer."""
        if self._encoding == "full" or (offer.number - 1) % self._full_every == 0:
            return None
        return encode(self._staging_U8, self._base_U8, below=self._staging_U8.numel())

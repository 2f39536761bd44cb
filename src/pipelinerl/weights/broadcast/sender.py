"""The trainer's end of a collective weight hand-over (see `collective`)."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.models.state import checksum, first_names
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import Arrived, Form, Go, Offer
from pipelinerl.weights.broadcast.group import (
    Backend,
    Group,
    choose_backend,
    form_group,
    gpu_of,
    serve_store,
    staging_device,
)
from pipelinerl.weights.broadcast.peers import Peer, Peers
from pipelinerl.weights.broadcast.receiver import staging_buffer
from pipelinerl.weights.layout import Layout, complaint, layout_of

MAX_RECEIVERS = 64
BUCKET_BYTES = 64 << 20
_ENDING_S = 5.0
_EXPLAINED_S = 3.0
_CPU = torch.device("cpu")


class _Sent(NamedTuple):
    number: int
    version: int
    checksum: str
    layout: str  # JSON, with the first update only


class CollectiveWeightSender:
    """Sends to `receivers` engines that connect to `listener`, which is the sender's from now on.

    By nccl if this process and every receiver have a GPU of their own, else by gloo (`choose_backend`).
    """

    def __init__(
        self,
        listener: socket.socket,
        receivers: int,
        *,
        timeout_s: float = 120.0,
        stall_s: float = 30.0,
        join_timeout_s: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        device: torch.device = _CPU,
        coordinated: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s`: how long to wait for answers. `stall_s`: how long a receiver may be silent; a transfer may
        stand still for twice as long.

        `join_timeout_s`: how long to wait for all receivers to connect. `dtype`: what floating-point tensors are sent as
        (None: unchanged). `device`: where this process computes; with nccl the copy that is sent lies there. `coordinated`:
        a `CollectiveWeightCoordinator` says when the engines, which are servers, take an update, and answers for them.
        `give_up` says that the run is ending, and with it perhaps the engines: nothing is waited for, or sent, any more.
        """
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        if bucket_bytes < 1:
            raise ValueError(f"a bucket has at least one byte, not {bucket_bytes}")
        if stall_s < 1:
            raise ValueError(f"a receiver is given at least a second to be heard of, not {stall_s:g} s")
        self._timeout_s, self._stall_s, self._join_timeout_s = timeout_s, stall_s, join_timeout_s
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device
        self._gpu = gpu_of(device)
        self._give_up = give_up
        self.host, self.port = listener.getsockname()[:2]
        self._peers = Peers(listener, receivers, stall_s, coordinated=coordinated)
        self._layout: Layout | None = None
        self._staging_U8 = torch.empty(0, dtype=torch.uint8)
        self._sent: _Sent | None = None
        self._problem: str | None = None
        self._inbox: list[UpdateReceipt] = []
        self._closing = threading.Event()
        self._outbox: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="weights-broadcast", daemon=True)
        self._thread.start()

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors, return the checksum of the copy ("" if it was given up); a thread broadcasts them meanwhile.

        Versions must rise, and names, types, shapes and tying stay. Raises WeightUpdateError if they do not, if an
        engine is gone or stalls, did not answer the update before in time, or answered that it holds anything else.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        layout = layout_of(tensors, self._dtype)
        if self._layout is not None:
            self._layout.require_same(layout)
        if not self._answers_came():
            return ""
        first = self._layout is None
        if first:
            if self._gpu and not self._gathered():  # Only then is it known where the copy has to be.
                return ""
            self._staging_U8 = staging_buffer(layout, staging_device(self._backend, self._device))
            self._layout = layout
        staged = layout.views(self._staging_U8)
        with torch.no_grad():
            for name, owner in first_names(tensors).items():
                if name == owner:
                    staged[name].copy_(tensors[name])
        digest = checksum(staged)
        number = self._sent.number + 1 if self._sent else 1
        encoded = msgspec.json.encode(layout).decode() if first else ""
        self._sent = _Sent(number, version, digest, encoded)
        self._outbox.put(self._sent)
        return digest

    def unanswered(self) -> Sequence[str]:
        """The engines that have not answered the last update yet. While there are any, `send` would wait."""
        return [peer.label for peer in self._peers.missing(self._sent.number if self._sent else 0)]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if an engine does not hold exactly what was sent, or the
        transfer to it failed."""
        self._collect()
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    def close(self) -> None:
        """End the transfer. What was sent last still arrives, unless something is wrong; it can be taken afterwards."""
        if self._sent is not None and self._peers.all_here():
            with contextlib.suppress(WeightUpdateError):  # Whoever is interested asked before.
                self._wait_until_staged(self._sent)
        self._outbox.put(None)
        self._closing.set()
        self._peers.close()
        self._thread.join(_ENDING_S)
        self._staging_U8 = torch.empty(0, dtype=torch.uint8)

    def _answers_came(self) -> bool:
        """Wait for all answers to the update before. False if it was given up."""
        if self._give_up():
            return False
        if (sent := self._sent) is not None:
            answered = self._wait_until_staged(sent) and self._peers.wait(
                lambda peer: self._peers.has_answer(peer, sent.number),
                self._timeout_s,
                f"answer weights of version {sent.version}",
                give_up=self._give_up,
            )
            if not answered:
                return False
        self._collect()
        self._raise_problem()
        self._peers.require_alive()
        return True

    def _wait_until_staged(self, sent: _Sent, bound_s: float | None = None, peers: Sequence[Peer] | None = None) -> bool:
        """Wait until every receiver has all of the update, and the coordinator knows. False if it was given up."""
        if bound_s is None:  # The thread has tighter bounds of its own; this one is for a backend that blocks it.
            buckets = -(-self._staging_U8.numel() // self._bucket_bytes)
            bound_s = self._join_timeout_s + 2 * self._stall_s * (2 + buckets)
        return self._peers.wait(
            lambda peer: peer.staged >= sent.number,
            bound_s,
            f"receive weights of version {sent.version}",
            peers=peers,
            give_up=self._give_up,
        )

    def _collect(self) -> None:
        """Move new answers into the inbox. Every answer is seen: the next update waits for those to this one."""
        for receipt in self._peers.take_receipts():
            assert self._sent is not None  # noqa: S101 - nobody can answer before the first update
            self._problem = self._problem or complaint(receipt, self._sent.version, self._sent.checksum)
            self._inbox.append(receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)
        if not self._give_up():  # Engines may leave in the middle of an update when the run ends.
            self._peers.require_no_failure()

    def _work(self) -> None:
        """The broadcasting thread. Any error of it is a failure of the whole transfer."""
        group: Group | None = None
        try:
            group = self._form()
            while group is not None and (sent := self._outbox.get()) is not None:
                self._broadcast(group, sent)
        except PipelineRLError as error:
            self._peers.fail(str(error))
        except Exception as error:
            self._peers.fail(f"the weight sender failed: {type(error).__name__}: {error}")
            raise
        # PyTorch destroys a group safely only while the interpreter is whole: `close` waits for this.
        self._closing.wait()
        if group is not None:
            group.end()

    @property
    def _backend(self) -> Backend:
        """Known once all receivers have come."""
        return choose_backend(self._gpu, [peer.gpu for peer in self._peers.receivers])

    def _gathered(self) -> bool:
        """Wait until all receivers have come. False if the run ended before."""
        where = f"connect to {self.host}:{self.port}"
        return self._peers.wait(lambda peer: peer.here, self._join_timeout_s, where, give_up=self._give_up)

    def _form(self) -> Group | None:
        """None if the run ended before all receivers had come."""
        if not self._gathered():
            return None
        count = len(self._peers.receivers)
        store, port = serve_store(self.host)
        self._peers.tell(
            Form(
                backend=self._backend,
                size=count + 1,
                store_port=port,
                bucket_bytes=self._bucket_bytes,
                stall_s=self._stall_s,
            )
        )
        device = staging_device(self._backend, self._device)
        return form_group(
            self._backend, store, rank=0, size=count + 1, host=self.host, bound_s=2 * self._stall_s, device=device
        )

    def _broadcast(self, group: Group, sent: _Sent) -> None:
        """Offer the update, wait until all are ready for it, broadcast it, see that it arrived, and tell the coordinator.

        So nothing is begun while a receiver is stopped or dead; one that stops in between is found by its silence.
        """
        number, receivers = sent.number, self._peers.receivers
        offer = Offer(number=number, version=sent.version, checksum=sent.checksum, layout=sent.layout)
        self._peers.tell(offer, receivers)
        verb = f"get ready for weights of version {sent.version}"
        bound_s = 2 * self._stall_s
        if not self._peers.wait(lambda peer: peer.ready >= number, bound_s, verb, peers=receivers, give_up=self._give_up):
            return
        self._peers.tell(Go(number), receivers)
        try:
            group.broadcast(self._staging_U8, self._bucket_bytes, lambda: self._peers.require_on_its_way(number))
        except WeightUpdateError:
            self._wait_until_staged(sent, _EXPLAINED_S, receivers)  # Whoever broke it is found, and named, by that.
            raise
        if self._wait_until_staged(sent, bound_s, receivers):
            self._peers.announce(Arrived(number, sent.version, sent.checksum))

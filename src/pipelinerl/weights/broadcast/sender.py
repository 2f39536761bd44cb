"""The trainer's end of a weight broadcast."""

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
from pipelinerl.types import MAX_RECEIVERS, UpdateReceipt
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

BUCKET_BYTES = 64 << 20
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
_CPU = torch.device("cpu")


class _Sent(NamedTuple):
    number: int
    version: int
    checksum: str
    layout: str  # JSON; empty after the first update


class CollectiveWeightSender:
    """Sends to `receivers` engines that connect to `listener`. The sender owns and closes `listener`.

    Uses nccl if this process and every receiver have a GPU of their own, else gloo (`choose_backend`).
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
        """`timeout_s`: how long to wait for answers. `stall_s`: how long a receiver may be silent; a transfer may make no
        progress for twice as long.

        `join_timeout_s`: how long to wait for all receivers to connect. `dtype`: the type of floating-point tensors as sent
        (None: unchanged). `device`: where this process computes; with nccl the copy to send is there. `coordinated`: the
        engines are servers, and a `CollectiveWeightCoordinator` decides when they apply an update and answers for them.
        `give_up` returns True when the run is ending, and engines may be gone: the sender then neither waits nor sends.
        """
        if not 1 <= receivers <= MAX_RECEIVERS:
            raise ValueError(f"1 to {MAX_RECEIVERS} receivers, not {receivers}")
        if bucket_bytes < 1:
            raise ValueError(f"a bucket has at least one byte, not {bucket_bytes}")
        if stall_s < 1:
            raise ValueError(f"stall_s must be at least a second, not {stall_s:g} s")
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
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy the tensors and return the checksum of the copy ("" if `give_up` said so). A thread then broadcasts the copy.

        Versions must rise, and names, types, shapes and tying must not change; otherwise raises WeightUpdateError. Also
        raises it if an engine is gone, stalls, did not acknowledge the previous update in time, or holds other weights.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        layout = layout_of(tensors, self._dtype)
        if self._layout is not None:
            self._layout.require_same(layout)
        if not self._wait_for_answers():
            return ""
        first = self._layout is None
        if first:
            if self._gpu and not self._wait_until_joined():  # The copy's device depends on the receivers.
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
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        return [peer.label for peer in self._peers.missing(self._sent.number if self._sent else 0)]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if one does not match the update or the transfer failed."""
        self._collect()
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    def close(self) -> None:
        """End the transfer. The last update is still delivered, unless there was a failure, and can be taken afterwards."""
        if self._sent is not None and self._peers.all_joined():
            with contextlib.suppress(WeightUpdateError):  # `receipts` reports failures; `close` does not.
                self._wait_until_staged(self._sent)
        self._outbox.put(None)
        self._closing.set()
        self._peers.close()
        self._thread.join(_ENDING_S)
        self._staging_U8 = torch.empty(0, dtype=torch.uint8)

    def _wait_for_answers(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if `give_up` returned True meanwhile."""
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
        """Wait until every receiver has the update and the coordinator was told. False if `give_up` returned True."""
        if bound_s is None:  # The thread has tighter bounds; this one is for a backend that blocks it.
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
        """Move new receipts into the inbox. None is missed, because the next update waits for the receipts of this one."""
        for receipt in self._peers.take_receipts():
            assert self._sent is not None  # noqa: S101 - there are no answers before the first update
            self._problem = self._problem or complaint(receipt, self._sent.version, self._sent.checksum)
            self._inbox.append(receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)
        if not self._give_up():  # When the run ends, engines may leave during an update.
            self._peers.require_no_failure()

    def _run(self) -> None:
        """The broadcasting thread. Any error in it fails the whole transfer."""
        group: Group | None = None
        try:
            group = self._form_group()
            while group is not None and (sent := self._outbox.get()) is not None:
                self._broadcast(group, sent)
        except PipelineRLError as error:
            self._peers.fail(str(error))
        except Exception as error:
            self._peers.fail(f"the weight sender failed: {type(error).__name__}: {error}")
            raise
        # PyTorch can't destroy a group safely during interpreter shutdown, so `close` waits for this.
        self._closing.wait()
        if group is not None:
            group.end()

    @property
    def _backend(self) -> Backend:
        """Valid once all receivers have connected."""
        return choose_backend(self._gpu, [peer.gpu for peer in self._peers.receivers])

    def _wait_until_joined(self) -> bool:
        """Wait until all receivers have connected. False if `give_up` returned True meanwhile."""
        verb = f"connect to {self.host}:{self.port}"
        return self._peers.wait(lambda peer: peer.joined, self._join_timeout_s, verb, give_up=self._give_up)

    def _form_group(self) -> Group | None:
        """The group, or None if the run ended before all receivers had connected."""
        if not self._wait_until_joined():
            return None
        count = len(self._peers.receivers)
        store, port = serve_store(self.host)
        self._peers.send(
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
        """Offer the update, wait until all are ready, broadcast it, wait until it arrived, and tell the coordinator.

        So no broadcast begins while a receiver is stopped or dead. One that stops later is detected by its silence.
        """
        number, receivers = sent.number, self._peers.receivers
        offer = Offer(number=number, version=sent.version, checksum=sent.checksum, layout=sent.layout)
        self._peers.send(offer, receivers)
        verb = f"get ready for weights of version {sent.version}"
        bound_s = 2 * self._stall_s
        if not self._peers.wait(lambda peer: peer.ready >= number, bound_s, verb, peers=receivers, give_up=self._give_up):
            return
        self._peers.send(Go(number), receivers)
        try:
            group.broadcast(self._staging_U8, self._bucket_bytes, lambda: self._peers.require_receiving_alive(number))
        except WeightUpdateError:
            self._wait_until_staged(sent, _EXPLANATION_S, receivers)  # Raises an error that names the failed receiver.
            raise
        if self._wait_until_staged(sent, bound_s, receivers):
            self._peers.notify_coordinator(Arrived(number, sent.version, sent.checksum))

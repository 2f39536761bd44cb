"""An engine's end of a weight broadcast."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import (
    LONGEST_ERROR,
    PROTOCOL,
    Answer,
    Form,
    FromSender,
    Go,
    Hello,
    Offer,
    Ready,
    Staged,
    Trouble,
)
from pipelinerl.weights.broadcast.group import Group, form_group, gpu_of, join_store, staging_device
from pipelinerl.weights.broadcast.link import SenderLink
from pipelinerl.weights.layout import Layout

# ---- Buffer of the incoming update


class Received(NamedTuple):
    """The complete update `number`. `error`: set if its checksum is wrong."""

    number: int
    update: WeightUpdate
    error: str | None


class Staging:
    """One buffer, reused for every update: the sender sends the next update only after this one is acknowledged."""

    def __init__(self, form: Form, *, index: int, sender_host: str, host: str, device: torch.device) -> None:
        """Join the group. `device`: where the engine computes; with nccl the buffer is on it, else on the CPU.

        Raises WeightUpdateError if joining fails or takes longer than twice `stall_s`, UserError for a wrong backend.
        """
        device = staging_device(form.backend, device)
        self._bucket_bytes = form.bucket_bytes
        self._device = device
        self._buffer_U8 = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] | None = None
        self._offer: Offer | None = None
        bound_s = 2 * form.stall_s
        store = join_store(sender_host, form.store_port, bound_s)
        self.group: Group = form_group(
            form.backend, store, rank=index + 1, size=form.size, host=host, bound_s=bound_s, device=device
        )

    def prepare(self, offer: Offer) -> None:
        """Allocate the buffer for the first update. Raises WeightUpdateError if the layout is invalid or memory is short."""
        if self._tensors is None:
            layout = decode_layout(offer.layout)
            self._buffer_U8 = staging_buffer(layout, self._device)
            self._tensors = layout.views(self._buffer_U8)
        self._offer = offer

    def receive(self, number: int, check: Callable[[], None]) -> Received:
        """Receive the broadcast of the offered update and verify it. `check` may end it by raising."""
        offer, tensors = self._offer, self._tensors
        if offer is None or tensors is None or offer.number != number:
            raise WeightUpdateError(f"the weight sender broadcasts update {number}, which it has not offered")
        self.group.broadcast(self._buffer_U8, self._bucket_bytes, check)
        found = checksum(tensors)
        error = None
        if found != offer.checksum:
            error = f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
        return Received(number, WeightUpdate(offer.version, offer.checksum, tensors), error)


def staging_buffer(layout: Layout, device: torch.device) -> Tensor:
    """Bytes, [buffer_bytes], for all tensors. Raises WeightUpdateError if memory is short."""
    try:
        # Zeros: the gaps between tensors are sent too and must not leak old memory.
        return torch.zeros(layout.buffer_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no room for a copy of the weights ({layout.buffer_bytes / 1e6:.0f} MB) on {device}. Free memory, or send a "
            "smaller type"
        ) from error


def decode_layout(text: str) -> Layout:
    """Decode the layout. Raises WeightUpdateError if it is invalid or a tensor is not within the buffer."""
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except msgspec.DecodeError as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % 8:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")
    return layout


_POLL_S = 0.02
_ENDING_S = 5.0
# How long to wait for the sender's own error message, which explains more than a broken broadcast.
_EXPLANATION_S = 3.0
_CPU = torch.device("cpu")


class CollectiveWeightReceiver:
    """Receiver number `index` of the sender at `host`:`port`.

    Its threads receive while the engine decodes. After a failure, including a wrong address or index, `offered` and `poll`
    raise, but a complete update can still be taken first.
    """

    def __init__(
        self,
        host: str,
        port: int,
        index: int,
        *,
        engine: str = "",
        receivers: int | None = None,
        join_timeout_s: float = 120.0,
        device: torch.device = _CPU,
    ) -> None:
        """`engine`: its name, for messages. `receivers`: their number, if the sender should check it.

        `join_timeout_s`: how long to wait for the sender, and then for the other receivers. `device`: where the engine
        computes. Updates are received there if the sender and every receiver have a GPU of their own, else on the CPU.
        """
        self._index, self._device = index, device
        self._formed = threading.Event()
        self._received: Received | None = None
        self._taken: Received | None = None
        self._messages: queue.SimpleQueue[FromSender | None] = queue.SimpleQueue()
        hello = Hello(protocol=PROTOCOL, index=index, engine=engine, receivers=receivers, gpu=gpu_of(device))
        self._link = SenderLink(host, port, hello, join_timeout_s=join_timeout_s, on_message=self._messages.put)
        self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
        self._link.start()
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the group is formed. Raises WeightUpdateError if that fails or takes longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._formed.wait(_POLL_S):
            self._link.raise_problem()
            if time.monotonic() > deadline_s:
                raise WeightUpdateError(f"{self._link.where} and its receivers formed no group in {timeout_s:g} s")

    def offered(self) -> int | None:
        """The version of the received update if it was not taken yet, or None. Costs under a microsecond."""
        if (received := self._received) is not None:
            return received.update.version
        self._link.raise_problem()
        return None

    def poll(self) -> WeightUpdate | None:
        """The received update if it was not taken yet, or None.

        The tensors are views of the receive buffer: do not write to them. They do not change until the update is
        acknowledged. Raises WeightUpdateError if the bytes do not match the sender's checksum.
        """
        received = self._received
        if received is None:
            self._link.raise_problem()
            return None
        self._received, self._taken = None, received
        if received.error is not None:
            raise WeightUpdateError(received.error)
        return received.update

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._link.send(Answer.of(self._taken.number, receipt))
        self._taken = None

    def close(self) -> None:
        """Leave the group. Views returned by `poll` stay valid."""
        self._link.close()
        self._messages.put(None)
        self._thread.join(_ENDING_S)

    # ---- The receiving thread

    def _run(self) -> None:
        staging: Staging | None = None
        try:
            while (message := self._messages.get()) is not None:
                staging = self._handle(message, staging)
        except PipelineRLError as error:
            self._report(str(error))
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")
            raise
        # PyTorch can't destroy a group safely during interpreter shutdown, so `close` waits for this.
        self._link.closed.wait()
        if staging is not None:
            staging.group.end()

    def _handle(self, message: FromSender, staging: Staging | None) -> Staging:
        connection = self._link.connection
        match message, staging:
            case Form(), None if connection is not None:
                sender, host = connection.peer_host, connection.local_host
                staging = Staging(message, index=self._index, sender_host=sender, host=host, device=self._device)
                self._formed.set()
            case Offer(), Staging():
                staging.prepare(message)
                self._link.send(Ready(message.number))
            case Go(number), Staging():
                received = staging.receive(number, self._require_sender)
                self._received = received
                self._link.send(Staged(number) if received.error is None else Trouble(received.error))
            case _:
                raise WeightUpdateError(f"the weight sender sent {type(message).__name__} out of order")
        return staging

    def _require_sender(self) -> None:
        if self._link.ended.is_set() or self._link.closed.is_set():
            raise WeightUpdateError(self._link.problem or "the weight sender closed in the middle of an update")

    def _report(self, error: str) -> None:
        self._link.send(Trouble(error[:LONGEST_ERROR]))
        self._link.ended.wait(_EXPLANATION_S)
        self._link.fail(error)

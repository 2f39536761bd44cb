"""An engine's end of a collective weight hand-over (see `collective`)."""

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

# ------------------------------------------------------------------------------------------------------------------------
# Where a receiver keeps the update that is coming in, until it is whole and verified.


class Received(NamedTuple):
    """Update `number`, whole. `error`: its bytes are not those that were sent."""

    number: int
    update: WeightUpdate
    error: str | None


class Staging:
    """One buffer, reused by every update: the sender sends none before the one before was answered."""

    def __init__(self, form: Form, *, index: int, sender_host: str, host: str, device: torch.device) -> None:
        """Joins the group, within a bound. `device` is the engine's: a GPU is where nccl receives.

        Raises WeightUpdateError if that fails, and UserError for a wrong backend.
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
        """Make room. Raises WeightUpdateError for a layout that makes no sense, or if there is no room."""
        if self._tensors is None:
            layout = decoded(offer.layout)
            self._buffer_U8 = staging_buffer(layout, self._device)
            self._tensors = layout.views(self._buffer_U8)
        self._offer = offer

    def receive(self, number: int, check: Callable[[], None]) -> Received:
        """Take part in the broadcast of the update that was offered, and verify it. `check` may end it by an error."""
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
    """Bytes, [buffer_bytes], for all of the tensors. Raises WeightUpdateError if there is no room."""
    try:
        # Zeros: what lies between two tensors is sent too, and should be nobody's memory.
        return torch.zeros(layout.buffer_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no room for a copy of the weights ({layout.buffer_bytes / 1e6:.0f} MB) on {device}. Free memory, or send a "
            "smaller type"
        ) from error


def decoded(text: str) -> Layout:
    """The layout, if every tensor of it lies within the buffer. Raises WeightUpdateError."""
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except msgspec.DecodeError as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % 8:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")
    return layout


_LOOK_S = 0.02
_ENDING_S = 5.0
# A sender that has failed says why; that explains more than a broken broadcast.
_EXPLAINED_S = 3.0
_CPU = torch.device("cpu")


class CollectiveWeightReceiver:
    """Receiver number `index` of those that the sender at `host`:`port` waits for.

    Everything is received by threads of its own, while the engine decodes. What goes wrong there, a wrong address or number
    included, is raised by `offered` and `poll` from then on, after any whole update has been taken.
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
        """`engine`: its name, for messages. `receivers`: how many there are, if the sender should check that.

        `join_timeout_s`: how long to wait for the sender, and then for the other receivers. `device`: where the engine
        computes. Updates are received there if it is a GPU and everybody has one of its own, else on the CPU.
        """
        self._index, self._device = index, device
        self._formed = threading.Event()
        self._received: Received | None = None
        self._taken: Received | None = None
        self._orders: queue.SimpleQueue[FromSender | None] = queue.SimpleQueue()
        hello = Hello(protocol=PROTOCOL, index=index, engine=engine, receivers=receivers, gpu=gpu_of(device))
        self._link = SenderLink(host, port, hello, join_timeout_s=join_timeout_s, on_order=self._orders.put)
        self._thread = threading.Thread(target=self._work, name="weights-receive", daemon=True)
        self._link.start()
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the sender and all receivers are a group. Raises WeightUpdateError if that fails, or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while not self._formed.wait(_LOOK_S):
            self._link.raise_problem()
            if time.monotonic() > deadline_s:
                raise WeightUpdateError(f"{self._link.where} and its receivers formed no group in {timeout_s:g} s")

    def offered(self) -> int | None:
        """The version of the update that came, if it was not taken yet. Less than a microsecond."""
        if (received := self._received) is not None:
            return received.update.version
        self._link.raise_problem()
        return None

    def poll(self) -> WeightUpdate | None:
        """The update that came, if it was not taken yet.

        The tensors are views of the buffer that it was received in: read them, do not write. They stay as they are until
        the update is acknowledged. Raises WeightUpdateError if the bytes are not those the sender took the checksum of.
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
        """Answer for the update that was taken last. Raises ValueError if there is none to answer for."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._link.say(Answer.of(self._taken.number, receipt))
        self._taken = None

    def close(self) -> None:
        """Leave. Views that were handed out stay valid."""
        self._link.close()
        self._orders.put(None)
        self._thread.join(_ENDING_S)

    # The receiving thread

    def _work(self) -> None:
        staging: Staging | None = None
        try:
            while (order := self._orders.get()) is not None:
                staging = self._obey(order, staging)
        except PipelineRLError as error:
            self._explain(str(error))
        except Exception as error:
            self._explain(f"{type(error).__name__}: {error}")
            raise
        # PyTorch destroys a group safely only while the interpreter is whole: `close` waits for this.
        self._link.closed.wait()
        if staging is not None:
            staging.group.end()

    def _obey(self, order: FromSender, staging: Staging | None) -> Staging:
        connection = self._link.connection
        match order, staging:
            case Form(), None if connection is not None:
                sender, host = connection.peer_host, connection.local_host
                staging = Staging(order, index=self._index, sender_host=sender, host=host, device=self._device)
                self._formed.set()
            case Offer(), Staging():
                staging.prepare(order)
                self._link.say(Ready(order.number))
            case Go(number), Staging():
                received = staging.receive(number, self._require_sender)
                self._received = received
                self._link.say(Staged(number) if received.error is None else Trouble(received.error))
            case _:
                raise WeightUpdateError(f"the weight sender said {type(order).__name__} out of turn")
        return staging

    def _require_sender(self) -> None:
        if self._link.ended.is_set() or self._link.closed.is_set():
            raise WeightUpdateError(self._link.problem or "the weight sender closed in the middle of an update")

    def _explain(self, error: str) -> None:
        self._link.say(Trouble(error[:LONGEST_ERROR]))
        self._link.ended.wait(_EXPLAINED_S)
        self._link.fail(error)

"""An engine's end of a collective weight hand-over (see `collective`)."""

from __future__ import annotations

import queue
import threading
import time

import torch

from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.collective_control import (
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
from pipelinerl.weights.collective_group import gpu_of
from pipelinerl.weights.collective_link import SenderLink
from pipelinerl.weights.collective_staging import Received, Staging

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

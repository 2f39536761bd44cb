"""An engine's end of a collective weight hand-over (see `collective`)."""

from __future__ import annotations

import queue
import threading
import time

import msgspec
import torch

from pipelinerl.errors import PipelineRLError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.collective_control import (
    BEATS_PER_BOUND,
    PROTOCOL,
    Answer,
    Beat,
    Close,
    Connection,
    Form,
    FromReceiver,
    FromSender,
    Go,
    Hello,
    Leave,
    Offer,
    ProtocolError,
    Ready,
    Staged,
    Trouble,
    connect,
)
from pipelinerl.weights.collective_staging import Arrived, Staging

_LARGEST_BYTES = 64 << 20  # a layout of half a million tensors
_LONGEST_ERROR = 500
_FIRST_BEAT_S = 0.2
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

        `join_timeout_s`: how long to wait for the sender, and then for the other receivers. `device`: where updates are
        received, the CPU for gloo, a GPU of this process's own for nccl.
        """
        self._host, self._port = host, port
        self._hello = Hello(protocol=PROTOCOL, index=index, engine=engine, receivers=receivers)
        self._join_timeout_s = join_timeout_s
        self._device = device
        self._connection: Connection[FromSender] | None = None
        self._problem: str | None = None
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._formed = threading.Event()
        self._arrived: Arrived | None = None
        self._taken: Arrived | None = None
        self._orders: queue.SimpleQueue[Form | Offer | Go | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._converse, name="weights-control", daemon=True),
            threading.Thread(target=self._work, name="weights-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the sender and all receivers are a group. Raises WeightUpdateError if that fails, or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while not self._formed.wait(_LOOK_S):
            self._raise_problem()
            if time.monotonic() > deadline_s:
                raise WeightUpdateError(
                    f"the weight sender at {self._host}:{self._port} and its receivers formed no group in {timeout_s:g} s"
                )

    def offered(self) -> int | None:
        """The version of the update that came, if it was not taken yet. Less than a microsecond."""
        if (arrived := self._arrived) is not None:
            return arrived.update.version
        self._raise_problem()
        return None

    def poll(self) -> WeightUpdate | None:
        """The update that came, if it was not taken yet.

        The tensors are views of the buffer that it was received in: read them, do not write. They stay as they are until
        the update is acknowledged. Raises WeightUpdateError if the bytes are not those the sender took the checksum of.
        """
        arrived = self._arrived
        if arrived is None:
            self._raise_problem()
            return None
        self._arrived, self._taken = None, arrived
        if arrived.error is not None:
            raise WeightUpdateError(arrived.error)
        return arrived.update

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Answer for the update that was taken last. Raises ValueError if there is none to answer for."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        if receipt.error is not None:
            receipt = msgspec.structs.replace(receipt, error=receipt.error[:_LONGEST_ERROR])
        self._say(Answer(self._taken.number, receipt))  # To a sender that has closed it means nothing any more.
        self._taken = None

    def close(self) -> None:
        """Leave. Views that were handed out stay valid."""
        self._say(Leave())
        self._closed.set()
        self._orders.put(None)
        if self._connection is not None:
            self._connection.close()
        for thread in self._threads:
            thread.join(_ENDING_S)

    def _say(self, message: FromReceiver) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)

    def _fail(self, error: str) -> None:
        """The first problem is the one that counts."""
        if not self._closed.is_set():
            self._problem = self._problem or error

    # The control thread

    def _converse(self) -> None:
        where = f"the weight sender at {self._host}:{self._port}"
        try:
            connected = connect(self._host, self._port, self._join_timeout_s)
            connection = Connection[FromSender](connected, FromSender, largest=_LARGEST_BYTES)
            self._connection = connection
            self._say(self._hello)
            self._follow(connection)
        except (EOFError, ConnectionResetError):
            self._fail(f"{where} is gone: its process ended without a word")
        except ProtocolError as error:
            self._fail(f"{where} is not one: it says something else ({error})")
        except OSError as error:
            what = "is lost" if self._connection is not None else f"can't be reached within {self._join_timeout_s:g} s"
            self._fail(f"{where} {what}: {error}")
        self._ended.set()
        self._orders.put(None)

    def _follow(self, connection: Connection[FromSender]) -> None:
        """Pass orders on, and say regularly that this process runs, until the sender closes."""
        beat_s = _FIRST_BEAT_S
        next_s = begun_s = time.monotonic()
        formed = False
        while not self._closed.is_set():
            message = connection.receive(max(0.0, next_s - time.monotonic()))
            match message:
                case Close(error):
                    if error is not None:
                        self._fail(error)
                    return
                case Form():
                    formed, beat_s = True, message.stall_s / BEATS_PER_BOUND
                    self._orders.put(message)
                case Offer() | Go():
                    self._orders.put(message)
            now_s = time.monotonic()
            if not formed and now_s - begun_s > self._join_timeout_s:
                raise TimeoutError(f"it gathered no group in {self._join_timeout_s:g} s; other receivers have not come")
            if now_s >= next_s:
                connection.send(Beat())
                next_s = now_s + beat_s

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
        self._closed.wait()
        if staging is not None:
            staging.group.end()

    def _obey(self, order: Form | Offer | Go, staging: Staging | None) -> Staging:
        connection = self._connection
        match order, staging:
            case Form(), None if connection is not None:
                index, sender = self._hello.index, connection.peer_host
                staging = Staging(order, index=index, sender_host=sender, host=connection.local_host, device=self._device)
                self._formed.set()
            case Offer(), Staging():
                staging.prepare(order)
                self._say(Ready(order.number))
            case Go(number), Staging():
                arrived = staging.receive(number, self._require_sender)
                self._arrived = arrived
                self._say(Staged(number) if arrived.error is None else Trouble(arrived.error))
            case _:
                raise WeightUpdateError(f"the weight sender said {type(order).__name__} out of turn")
        return staging

    def _require_sender(self) -> None:
        if self._ended.is_set() or self._closed.is_set():
            raise WeightUpdateError(self._problem or "the weight sender closed in the middle of an update")

    def _explain(self, error: str) -> None:
        self._say(Trouble(error[:_LONGEST_ERROR]))
        self._ended.wait(_EXPLAINED_S)
        self._fail(error)

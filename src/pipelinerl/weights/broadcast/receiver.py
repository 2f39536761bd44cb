"""A member of a weight broadcast: a receiver, or the coordinator. A thread follows the protocol while the engine decodes."""

from __future__ import annotations

import threading
import time

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import POLL_S, Channel, ProtocolError, dial
from pipelinerl.errors import BroadcastEndedError, PipelineRLError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.rendezvous import join_store
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import PROTOCOL, Apply, Close, Form, FromMember, FromSender, Hello, Report
from pipelinerl.weights.broadcast.group import Group, gpu_of, staging_buffer, staging_device
from pipelinerl.weights.delta import apply
from pipelinerl.weights.layout import decode_layout
from pipelinerl.weights.messages import Answer, Offer

_LONGEST_ERROR = 500
_FIRST_BEAT_S, _BEATS_PER_BOUND = 0.2, 10
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
"""Time for the sender's own error message, which explains more than a broken broadcast."""
_CPU = torch.device("cpu")


class _OverError(Exception):
    """The transfer has ended: because of `problem`, or normally (None)."""

    def __init__(self, problem: WeightUpdateError | None) -> None:
        super().__init__(problem)
        self.problem = problem


class CollectiveWeightReceiver:
    """Receiver number `index` of the sender at `host`:`port`.

    Index None makes it the coordinator: the `WeightReceiver` of a process whose engine consists of servers that are the
    receivers. Its updates have no tensors. It decides when the servers apply an update, and its receipt is for all of them.

    An update arrives once every receiver has staged it; at a server, once it is staged there. After a failure, including a
    wrong address, key or index, `offered` and `poll` raise, but an update that has arrived can still be taken first. They
    raise BroadcastEndedError if the failure is not this receiver's own.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: str,
        index: int | None,
        *,
        engine: str = "",
        receivers: int | None = None,
        join_timeout_s: float = 120.0,
        device: torch.device = _CPU,
        at_once: bool = True,
    ) -> None:
        """`key`: the broadcast's. `engine`: a name for messages. `receivers`: their number, if the sender should check it.

        `join_timeout_s`: how long to wait for the sender, and then for the other receivers. `device`: where the engine
        computes. Updates are received there if the sender and every receiver have a GPU of their own, else on the CPU.
        `at_once` False: join at the first `offered` or `poll`. Until then the sender does not wait for this receiver.
        """
        self._host, self._port, self._key, self._index = host, port, key, index
        self._hello = Hello(protocol=PROTOCOL, index=index, engine=engine, receivers=receivers, gpu=gpu_of(device))
        self._join_timeout_s, self._device = join_timeout_s, device
        self._beat_s = _FIRST_BEAT_S
        self._channel: Channel[FromSender] | None = None
        self._group: Group | None = None
        # One buffer for all updates: the sender offers the next update only after this one is acknowledged.
        self._buffer_U8 = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}
        self._arrived: Offer | None = None  # what every receiver has
        self._taken: Offer | None = None
        self._problem: WeightUpdateError | None = None
        self._joined, self._ended, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
        self._begun = False
        if at_once:
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the group is formed. Raises WeightUpdateError if that fails or takes longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._joined.wait(POLL_S):
            ended = self._ended.is_set()
            self.offered()
            if ended:
                raise WeightUpdateError(f"{self._where} or this receiver has closed")
            if time.monotonic() > deadline_s:
                raise self._no_group(timeout_s)

    def offered(self) -> int | None:
        """The version of the update that has arrived, if it was not taken yet, or None. Costs under a microsecond."""
        if not self._begun:
            self._begin()
        if (arrived := self._arrived) is not None:
            return arrived.version
        if (problem := self._problem) is not None:
            raise type(problem)(*problem.args)
        return None

    def poll(self) -> WeightUpdate | None:
        """The update that has arrived, if it was not taken yet, or None. Raises WeightUpdateError if the transfer failed.

        The tensors are views of the receive buffer: do not write to them. They do not change until the update is
        acknowledged.
        """
        if self.offered() is None:
            return None
        self._taken, self._arrived = self._arrived, None
        offer = self._taken
        if offer is None:
            return None
        return WeightUpdate(offer.version, offer.checksum, self._tensors, offer.device_checksum)

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        error = receipt.error and receipt.error[:_LONGEST_ERROR]
        self._send(Answer(self._taken.number, msgspec.structs.replace(receipt, error=error)))
        self._taken = None

    def close(self) -> None:
        """Leave the group. Views returned by `poll` stay valid."""
        self._closed.set()
        if self._begun:
            self._thread.join(_ENDING_S)

    # ---- the thread that follows the protocol

    def _run(self) -> None:
        try:
            self._follow()
        except _OverError as over:
            self._problem = over.problem
        except PipelineRLError as error:
            self._problem = self._explained(str(error))
        except Exception as error:
            self._problem = self._explained(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._ended.set()
        # PyTorch can't destroy a group safely during interpreter shutdown, so `close` waits for this.
        self._closed.wait()
        self._send(Report("leaving"))
        if self._group is not None:
            self._group.end()
        if self._channel is not None:
            self._channel.close()

    def _follow(self) -> None:
        """Join, then take updates. Ends with _OverError; raises PipelineRLError for a failure at this end."""
        form = self._join()
        staged: Offer | None = None
        while True:
            match self._next():
                case Offer() as staged if self._index is None:
                    pass  # the servers receive it
                case Offer() as staged:
                    self._stage(staged, form.bucket_bytes)
                    if form.coordinated:  # the engine is a server, and will be asked over HTTP to apply it
                        self._arrived = staged
                    self._send(Report("staged", staged.number))
                case Apply(number) if staged is not None and number == staged.number:
                    self._arrived, staged = staged, None
                case message:
                    raise WeightUpdateError(f"the weight sender sent {type(message).__name__} out of order")

    def _join(self) -> Form:
        """Connect to the sender, wait until all members have, and form the group."""
        deadline_s = time.monotonic() + self._join_timeout_s
        where = self._where
        try:
            self._channel = dial(
                self._host, self._port, self._key, self._join_timeout_s, self._closed.is_set, incoming=FromSender
            )
        except (EOFError, ConnectionResetError) as error:
            raise _OverError(self._gone()) from error
        except OSError as error:
            why = f"{where} can't be reached within {self._join_timeout_s:g} s: {error}"
            raise _OverError(WeightUpdateError(why)) from error
        except ProtocolError as error:
            raise _OverError(WeightUpdateError(f"{where} can't be used: {error}")) from error
        self._send(self._hello)
        threading.Thread(target=self._beat, name="weights-beat", daemon=True).start()
        form = self._next(deadline_s)
        if not isinstance(form, Form):
            raise WeightUpdateError(f"the weight sender sent {type(form).__name__} out of order")
        self._beat_s = form.stall_s / _BEATS_PER_BOUND
        if self._index is not None:
            self._group = self._form_group(form)
        self._joined.set()
        return form

    def _form_group(self, form: Form) -> Group:
        assert self._channel is not None  # noqa: S101 - called by `_join`
        self._device, host = staging_device(form.backend, self._device), self._channel.local_host
        store, bound_s = (self._channel.peer_host, form.store_port), 2 * form.stall_s
        try:
            rendezvous = join_store(*store, self._key, bound_s)
        except (OSError, EOFError, ProtocolError) as error:
            where = f"{store[0]}:{store[1]}"
            raise WeightUpdateError(f"no group of weight receivers can be formed at {where}: {error}") from error
        group = (form.backend, rendezvous, self._key)
        return Group(*group, rank=form.rank, size=form.size, host=host, bound_s=bound_s, device=self._device)

    def _stage(self, offer: Offer, bucket_bytes: int) -> None:
        """Receive the offered update, and verify its checksum.

        A delta is applied to the buffer itself, whose contents the engine has copied.
        """
        assert self._group is not None  # noqa: S101 - a receiver has one
        if offer.layout:
            layout = decode_layout(offer.layout)
            self._buffer_U8 = staging_buffer(layout.buffer_bytes, self._device)
            self._tensors = layout.views(self._buffer_U8)
        if offer.delta_bytes is None:
            self._group.broadcast(self._buffer_U8, bucket_bytes, self._require_sender)
        else:
            delta_U8 = staging_buffer(offer.delta_bytes, self._device)
            self._group.broadcast(delta_U8, bucket_bytes, self._require_sender)
            apply(delta_U8, self._buffer_U8)
        if (found := checksum(self._tensors)) != offer.checksum:
            raise WeightUpdateError(
                f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
            )

    def _next(self, deadline_s: float | None = None) -> FromSender:
        """The sender's next message. Raises _OverError if the transfer ends first, WeightUpdateError after the deadline."""
        while (message := self._receive(POLL_S)) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise self._no_group(self._join_timeout_s)
        return message

    def _receive(self, timeout_s: float) -> FromSender | None:
        """The sender's next message, or None if there is none. Raises _OverError if the transfer has ended."""
        try:
            message = self._channel.receive() if self._channel is not None and self._channel.poll(timeout_s) else None
        except (EOFError, ConnectionResetError) as error:
            raise _OverError(self._gone()) from error
        except (OSError, ProtocolError) as error:
            raise _OverError(BroadcastEndedError(f"{self._where} is lost: {error}")) from error
        if self._closed.is_set():
            raise _OverError(None)
        if isinstance(message, Close):
            raise _OverError(None if message.error is None else BroadcastEndedError(message.error))
        return message

    def _require_sender(self) -> None:
        """Raises _OverError if the transfer has ended in the middle of an update."""
        try:
            self._receive(0.0)
        except _OverError as over:
            closed = BroadcastEndedError("the weight sender closed in the middle of an update")
            raise _OverError(over.problem or closed) from over

    def _explained(self, error: str) -> WeightUpdateError:
        """Report the failure to the sender. Returns the sender's error if it has one, since it knows who failed first."""
        self._send(Report("failed", error=error[:_LONGEST_ERROR]))
        deadline_s = time.monotonic() + _EXPLANATION_S
        try:
            while self._channel is not None and time.monotonic() < deadline_s:
                self._receive(POLL_S)
        except _OverError as over:
            return over.problem or WeightUpdateError(error)
        return WeightUpdateError(error)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._send(Report("running"))

    def _send(self, message: FromMember) -> None:
        """Send a message. Without effect before the connection exists or after the sender has closed."""
        if self._channel is not None:
            self._channel.send(message)

    @property
    def _where(self) -> str:
        return f"the weight sender at {self._host}:{self._port}"

    def _gone(self) -> BroadcastEndedError:
        return BroadcastEndedError(f"{self._where} is gone: its process exited unexpectedly")

    def _no_group(self, waited_s: float) -> WeightUpdateError:
        return WeightUpdateError(f"{self._where} and its receivers formed no group in {waited_s:g} s")

"""A member of a weight broadcast: a receiver, or the coordinator.

One thread follows the protocol step by step while the engine decodes (`_follow`), another sends heartbeats.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import POLL_S, Channel, ProtocolError
from pipelinerl.errors import INVALID_DATA, BroadcastEndedError, PipelineRLError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.rendezvous import join_store
from pipelinerl.types import Encoding, UpdateReceipt
from pipelinerl.weights.broadcast import control
from pipelinerl.weights.broadcast.group import Group, GroupBrokenError, gpu_of, staging_buffer, staging_device
from pipelinerl.weights.delta import apply
from pipelinerl.weights.layout import Layout

_LONGEST_ERROR = 500
_FIRST_BEAT_S, _BEATS_PER_BOUND = 0.2, 10
_ENDING_S = 5.0
# How long to wait for the sender's own error message, which explains more than a broken broadcast.
_EXPLANATION_S = 3.0
_CPU = torch.device("cpu")


class _OverError(Exception):
    """The transfer has ended: because of `problem`, or normally (None).

    `again`: only the connection has ended, and the sender may take this member back.
    """

    def __init__(self, problem: WeightUpdateError | None, *, again: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.again = problem, again


class _Arrived(NamedTuple):
    """Update `number`, which every receiver has."""

    number: int
    update: WeightUpdate


class CollectiveWeightReceiver:
    """Receiver number `index` of the sender at `host`:`port`.

    Index None makes it the coordinator: the `WeightReceiver` of a process whose engine consists of servers that are the
    receivers. Its updates have no tensors. It decides when the servers apply an update, and its receipt is for all of them.

    An update arrives once every receiver has staged it; at a server, once it is staged there. After a failure, including a
    wrong address, key or index, `offered` and `poll` raise, but an update that has arrived can still be taken first. They
    raise BroadcastEndedError if the failure is not this receiver's own.

    If the sender takes members back, the end of a connection or a group is no failure: this member connects again. An update
    that it gets a second time is acknowledged again, without the engine.
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
        self._hello = control.Hello(
            protocol=control.PROTOCOL, index=index, engine=engine, receivers=receivers, gpu=gpu_of(device)
        )
        self._join_timeout_s = join_timeout_s
        self._device = self._staging_device = device
        self._beat_s = _FIRST_BEAT_S
        self._channel: Channel[control.FromSender] | None = None
        self._group: Group | None = None
        # One buffer for all updates: the sender offers the next update only after this one is acknowledged.
        self._buffer_U8 = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}
        self._held = ""  # checksum of the update in the buffer, which is the base of a delta; "": none
        self._delta_U8 = torch.empty(0, dtype=torch.uint8)
        self._arrived: _Arrived | None = None
        self._taken: _Arrived | None = None
        self._receipt: UpdateReceipt | None = None  # of the last update that was acknowledged
        self._regroups = False  # whether the sender takes members back, once it has said so
        self._join_by_s = 0.0
        self._beating: threading.Thread | None = None
        self._problem: WeightUpdateError | None = None
        self._joined, self._ended, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
        self._begun = False
        if at_once:
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._join_by_s = time.monotonic() + self._join_timeout_s
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
                raise WeightUpdateError(self._no_group(timeout_s))

    def offered(self) -> int | None:
        """The version of the update that has arrived, if it was not taken yet, or None. Costs under a microsecond."""
        if not self._begun:
            self._begin()
        if (arrived := self._arrived) is not None:
            if (receipt := self._receipt) is None or not self._is_repeated(arrived.update, receipt):
                return arrived.update.version
            self._arrived = None
            self._send(control.Answer(arrived.number, receipt))
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
        arrived, self._arrived = self._arrived, None
        self._taken = arrived
        return arrived.update if arrived is not None else None

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        error = receipt.error and receipt.error[:_LONGEST_ERROR]
        self._receipt = msgspec.structs.replace(receipt, error=error)
        self._send(control.Answer(self._taken.number, self._receipt))
        self._taken = None

    def close(self) -> None:
        """Leave the group. Views returned by `poll` stay valid."""
        self._send(control.Report("leaving"))
        self._closed.set()
        if self._begun:
            self._thread.join(_ENDING_S)

    def _is_repeated(self, update: WeightUpdate, receipt: UpdateReceipt) -> bool:
        """Whether the engine has acknowledged this update in an earlier group. Of several servers, some may need it."""
        holds = (receipt.version, receipt.checksum) == (update.version, update.checksum)
        return self._index is not None and receipt.error is None and holds

    # ---- The thread that follows the protocol

    def _run(self) -> None:
        try:
            self._follow_all()
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
        if self._group is not None:
            self._group.end()
        if self._channel is not None:
            self._channel.close()

    def _follow_all(self) -> None:
        """Follow the protocol in one group, and in others for as long as the sender takes this member back."""
        while True:
            try:
                self._follow()
            except GroupBrokenError:
                if not self._regroups:
                    raise
            except _OverError as over:
                if not over.again or self._closed.is_set() or not self._may_come_back:
                    raise
            self._leave()

    @property
    def _may_come_back(self) -> bool:
        """What the sender said, if it has said anything; before, a connection may break while all join."""
        return self._regroups or (not self._joined.is_set() and time.monotonic() < self._join_by_s)

    def _leave(self) -> None:
        """Leave the group and the connection. What has arrived can still be taken."""
        if self._group is not None:
            self._group.end()
        if self._channel is not None:
            self._channel.close()
        self._group, self._channel, self._held = None, None, ""

    def _follow(self) -> None:
        """Join, then take updates. Ends with _OverError; raises PipelineRLError for a failure at this end."""
        channel, form = self._join()
        self._regroups = form.regroups
        if self._index is not None:
            self._group = self._form_group(channel, form)
        self._joined.set()
        message = self._next()
        while isinstance(message, control.Offer):
            message = self._take(message, form)
        raise _out_of_order(message)

    def _take(self, offer: control.Offer, form: control.Form) -> control.FromSender:
        """Take the offered update, up to the first message that is not about it, which is returned."""
        group, staged, released = self._group, self._group is None, False  # The coordinator has nothing to stage.
        if group is not None:
            self._get_ready(offer)
        update = WeightUpdate(offer.version, offer.checksum, self._tensors, offer.device_checksum)
        arrived = _Arrived(offer.number, update)
        while True:
            match self._next():
                case control.Go("receive", offer.number, encoding) if group is not None and not released:
                    staged = self._stage(group, offer, encoding, form.bucket_bytes)
                    if staged and form.coordinated:
                        # The engine is a server, which is told over HTTP when to apply the update: `poll` must return it by
                        # then. No server is told before all have staged it.
                        self._arrived = arrived
                    self._send(control.Report("staged" if staged else "full", offer.number))
                case control.Go("apply", offer.number) if staged and not released:
                    released, self._arrived = True, arrived
                case message:
                    return message

    def _join(self) -> tuple[Channel[control.FromSender], control.Form]:
        """Connect to the sender and wait until all members have."""
        again = self._regroups
        deadline_s = time.monotonic() + self._join_timeout_s if again else self._join_by_s
        self._channel = channel = self._connect(deadline_s)
        self._send(self._hello)
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="weights-beat", daemon=True)
            self._beating.start()
        form = self._next(None if again else deadline_s)  # the other members may be away for long
        if not isinstance(form, control.Form):
            raise _out_of_order(form)
        self._beat_s = form.stall_s / _BEATS_PER_BOUND
        return channel, form

    def _connect(self, deadline_s: float) -> Channel[control.FromSender]:
        """Connect to the sender. Raises _OverError."""
        where, kind = self._where, BroadcastEndedError if self._regroups else WeightUpdateError
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                channel = control.dial(self._host, self._port, self._key, left_s, self._closed.is_set)
            except (EOFError, ConnectionResetError) as error:
                if left_s == 0 or not self._may_come_back:
                    raise _OverError(self._gone()) from error
                time.sleep(POLL_S)
                continue
            except OSError as error:
                why = f"{where} can't be reached within {self._join_timeout_s:g} s: {error}"
                raise _OverError(kind(why)) from error
            except ProtocolError as error:
                raise _OverError(kind(f"{where} can't be used: {error}")) from error
            if channel is None:
                raise _OverError(None)
            return channel

    def _form_group(self, channel: Channel[control.FromSender], form: control.Form) -> Group:
        self._staging_device = device = staging_device(form.backend, self._device)
        bound_s, host = 2 * form.stall_s, channel.local_host
        try:
            rendezvous = join_store(channel.peer_host, form.store_port, self._key, bound_s)
        except (OSError, EOFError, ProtocolError) as error:
            where = f"{channel.peer_host}:{form.store_port}"
            raise GroupBrokenError(f"no group of weight receivers can be formed at {where}: {error}") from error
        rank, size = form.rank, form.size
        return Group(form.backend, rendezvous, self._key, rank=rank, size=size, host=host, bound_s=bound_s, device=device)

    def _get_ready(self, offer: control.Offer) -> None:
        """Have memory for the offered update. Asks for all weights if they are not here to apply its delta to."""
        if offer.layout:
            layout = decode_layout(offer.layout)
            self._buffer_U8 = staging_buffer(layout.buffer_bytes, self._staging_device)
            self._tensors = layout.views(self._buffer_U8)
        if offer.base and offer.base == self._held:
            self._delta_U8 = staging_buffer(offer.delta_bytes, self._staging_device)
        elif offer.base:
            self._send(control.Report("full", offer.number))
        self._send(control.Report("ready", offer.number))

    def _stage(self, group: Group, offer: control.Offer, encoding: Encoding, bucket_bytes: int) -> bool:
        """Receive the offered update and verify its checksum. False if a delta did not give the offered weights.

        The delta is applied to the buffer itself, which the engine has copied. So the base is lost if this fails.
        """
        self._held, delta_U8, self._delta_U8 = "", self._delta_U8, torch.empty(0, dtype=torch.uint8)
        received_U8 = delta_U8 if encoding == "delta" else self._buffer_U8
        group.broadcast(received_U8, bucket_bytes, self._require_sender)
        if encoding == "delta":
            try:
                apply(delta_U8, self._buffer_U8)
            except WeightUpdateError:
                return False
        found = checksum(self._tensors)
        if found == offer.checksum:
            self._held = found
        elif encoding == "full":
            raise WeightUpdateError(
                f"weights of version {offer.version} arrived damaged: checksum {found}, sent {offer.checksum}"
            )
        return found == offer.checksum

    def _next(self, deadline_s: float | None = None) -> control.FromSender:
        """The sender's next message. Raises _OverError if the transfer ends first, WeightUpdateError after the deadline."""
        while (message := self._receive(POLL_S)) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise WeightUpdateError(self._no_group(self._join_timeout_s))
        return message

    def _receive(self, timeout_s: float) -> control.FromSender | None:
        """The sender's next message, or None if there is none. Raises _OverError if the transfer has ended."""
        try:
            message = self._channel.receive() if self._channel is not None and self._channel.poll(timeout_s) else None
        except (EOFError, ConnectionResetError) as error:
            raise _OverError(self._gone(), again=True) from error
        except (OSError, ProtocolError) as error:
            raise _OverError(BroadcastEndedError(f"{self._where} is lost: {error}"), again=True) from error
        if isinstance(message, control.Close):
            problem = None if message.error is None else BroadcastEndedError(message.error)
            raise _OverError(problem, again=message.again)
        if self._closed.is_set():
            raise _OverError(None)
        return message

    def _require_sender(self) -> None:
        """Raises _OverError if the transfer has ended in the middle of an update."""
        try:
            self._receive(0.0)
        except _OverError as over:
            closed = BroadcastEndedError("the weight sender closed in the middle of an update")
            raise _OverError(over.problem or closed, again=over.again) from over

    def _explained(self, error: str) -> WeightUpdateError:
        """Report the failure to the sender. Returns the sender's error if it has one, since it knows who failed first."""
        self._send(control.Report("failed", error=error[:_LONGEST_ERROR]))
        deadline_s = time.monotonic() + _EXPLANATION_S
        try:
            while self._channel is not None and time.monotonic() < deadline_s:
                self._receive(POLL_S)
        except _OverError as over:
            return over.problem or WeightUpdateError(error)
        return WeightUpdateError(error)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._send(control.Report("running"))

    def _send(self, message: control.FromMember) -> None:
        """Send a message. Without effect before the connection exists or after the sender has closed."""
        if self._channel is not None:
            self._channel.send(message)

    @property
    def _where(self) -> str:
        return f"the weight sender at {self._host}:{self._port}"

    def _gone(self) -> BroadcastEndedError:
        return BroadcastEndedError(f"{self._where} is gone: its process exited unexpectedly")

    def _no_group(self, waited_s: float) -> str:
        return f"{self._where} and its receivers formed no group in {waited_s:g} s"


def _out_of_order(message: control.FromSender) -> WeightUpdateError:
    return WeightUpdateError(f"the weight sender sent {type(message).__name__} out of order")


def decode_layout(text: str) -> Layout:
    """Decode the layout. Raises WeightUpdateError if it is invalid or a tensor is not within the buffer."""
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except INVALID_DATA as error:
        raise WeightUpdateError(f"the weight sender's description of its tensors can't be read: {error}") from error
    for place in layout.places:
        inside = place.start >= 0 and min(place.shape, default=0) >= 0 and place.start + place.size <= layout.buffer_bytes
        if not inside or place.start % 8:
            raise WeightUpdateError(f"the weight sender's description of its tensors is wrong: {place}")
    return layout

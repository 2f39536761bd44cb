"""The trainer's end of a weight broadcast: a thread forms the group and broadcasts, while the trainer goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipelinerl.channel import listen
from pipelinerl.channel.rendezvous import Rendezvous, serve_store
from pipelinerl.errors import INVALID_DATA, BroadcastEndedError, PipelineRLError, WeightUpdateError
from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages
from pipelinerl.types import Encoding, WeightTransfer
from pipelinerl.weights.broadcast.group import (
    FAILED,
    PROTOCOL,
    VERSION,
    Backend,
    BroadcastGroup,
    Form,
    Incoming,
    Member,
    choose_backend,
    gpu_of,
    staging_buffer,
    staging_device,
    store_key,
)
from pipelinerl.weights.delta import encode
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.sending import Sender

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
_ENDING_S = 5.0
_EXPLANATION_S = 3.0
"""Time for receivers to say that they have noticed that a broadcast has failed, after the bound that they have for that."""
_GOODBYE_S = 1.0
_POLL_S = 0.001
_CPU = torch.device("cpu")


class _ClosingError(Exception):
    """The sender closes."""


class CollectiveWeightSender(Sender):
    """Sends to `receivers`: the engines, or the servers that they consist of.

    Uses nccl if it can be used between this process and every receiver, else gloo (`choose_backend`).
    """

    def __init__(
        self,
        host: str,
        key: str,
        receivers: int,
        hub: Messages,
        *,
        engines: int | None = None,
        stall_s: float = 30.0,
        join_timeout_s: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device = _CPU,
        **options: Any,
    ) -> None:
        """`host`: the address of this machine at which the receivers meet. They prove that they have `key`.

        `engines`: how many answer, if not each receiver. `stall_s`: a transfer may make no progress for twice as long.
        `join_timeout_s`: how long to wait for all receivers to connect. `device`: where this process computes; with nccl the
        copy to send is there. `options`: see `Sender`; the encoding delta needs a second copy of the weights.
        """
        super().__init__(hub, receivers if engines is None else engines, **options)
        self._receivers, self._bound_s, self._join_timeout_s = receivers, 2 * stall_s, join_timeout_s
        self._bucket_bytes, self._device, self._gpu = bucket_bytes, device, gpu_of(device)
        self._key, self._listener = key, listen(host)
        self.host, self.port = self._listener.getsockname()[:2]
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)  # the update, and with deltas the previous one
        self._backend: Backend | None = None if self._gpu else "gloo"  # None: it depends on the receivers
        self._labels = [f"number {index}" for index in range(receivers)]
        self._formed = False
        self._failure: PipelineRLError | None = None
        self._due: SimpleQueue[wire.Offer | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the transfer. The last update is still delivered, unless there was a failure."""
        with contextlib.suppress(WeightUpdateError):  # `receipts` reports failures; `close` does not.
            if self._formed:
                self._wait_while(self._is_due)
        self._closing.set()
        self._due.put(None)
        self._thread.join(_ENDING_S)
        self._staging_U8 = self._base_U8 = torch.empty(0, dtype=torch.uint8)

    def _is_due(self) -> bool:
        """Whether the thread has not broadcast the update yet. Its steps have bounds."""
        return self._sent is not None and self._offered < self._sent.number

    def _buffer(self, layout: Layout, source: torch.device | None) -> Mapping[str, Tensor] | None:
        """For a delta, the previous update becomes the base."""
        del source
        if self._layout is None:
            self._wait_while(lambda: self._backend is None)
            if self._backend is None:  # the run is ending
                return None
            device = staging_device(self._backend, self._device)
            self._staging_U8 = staging_buffer(layout.buffer_bytes, device)
            if self._encoding == "delta":
                self._base_U8 = staging_buffer(layout.buffer_bytes, device)
        elif self._encoding == "delta":
            self._staging_U8, self._base_U8 = self._base_U8, self._staging_U8
        return layout.views(self._staging_U8)

    def _publish(self, offer: wire.Offer) -> None:
        """The thread broadcasts the copies, and then offers them."""
        self._due.put(offer)

    def _wait_for_answers(self) -> bool:
        return not self._give_up() and self._wait_while(self._is_due) and super()._wait_for_answers()

    def _on_answer(self, answer: wire.EngineAnswer) -> None:
        if answer.number == wire.ASKS:
            self._hub.send(wire.Meeting(self.host, self.port, answer.engine))
        super()._on_answer(answer)

    def _raise_problem(self) -> None:
        super()._raise_problem()
        if self._failure is not None and not self._give_up():  # when the run ends, engines may leave during an update
            raise type(self._failure)(*self._failure.args)

    # ---- the broadcasting thread

    def _run(self) -> None:
        """Any error here fails the whole transfer."""
        group: BroadcastGroup | None = None
        rendezvous = serve_store(self._listener, self._key, self._bound_s)
        self._store = rendezvous.store
        self._store.set(VERSION, PROTOCOL)
        try:
            group = self._form_group(rendezvous)
            while (offer := self._due.get()) is not None:
                self._broadcast(group, offer)
        except _ClosingError:
            pass
        except PipelineRLError as error:
            self._failure = error
        except Exception as error:
            self._failure = WeightUpdateError(f"the weight sender failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._closing.wait()  # PyTorch can't destroy a group safely during interpreter shutdown
            self._say_goodbye()
            if group is not None:
                group.end()
            rendezvous.close()

    def _form_group(self, rendezvous: Rendezvous) -> BroadcastGroup:
        keys = [store_key("member", index) for index in range(self._receivers)]
        self._await(keys, self._join_timeout_s, f"connect to {self.host}:{self.port}", WeightUpdateError)
        try:
            members = [msgspec.json.decode(self._store.get(key), type=Member) for key in keys]
        except INVALID_DATA as error:
            raise WeightUpdateError(f"a receiver of weights can't be used: {error}") from error
        self._labels = [f"number {index} ({member.engine})" for index, member in enumerate(members)]
        if len(self._answered) == self._receivers:
            self._names = dict(enumerate(self._labels))
        backend, why = choose_backend(self._gpu, [member.gpu for member in members])
        if why and self._gpu is not None:
            logger.warning("weights are broadcast by the hosts (gloo), not between the GPUs: %s", why)
        size, bucket_bytes = self._receivers + 1, self._bucket_bytes
        form = Form(backend=backend, size=size, bucket_bytes=bucket_bytes, bound_s=self._bound_s)
        self._tell(0, form)
        group = BroadcastGroup(form, rendezvous, self._key, 0, staging_device(backend, self._device))
        self._backend, self._formed = backend, True
        return group

    def _broadcast(self, group: BroadcastGroup, offer: wire.Offer) -> None:
        """Broadcast the update, and offer it to the engines once all receivers have staged it.

        A delta is from the previous update, which all receivers hold.
        """
        number, delta_U8 = offer.number, None
        if self._encoding == "delta" and number > 1:
            delta_U8 = encode(self._staging_U8, self._base_U8, below=self._staging_U8.numel())
        sent_U8 = self._staging_U8 if delta_U8 is None else delta_U8
        layout, delta_bytes = self._layout if number == 1 else None, None if delta_U8 is None else delta_U8.numel()
        self._tell(number, Incoming(offer=offer, layout=layout, delta_bytes=delta_bytes))
        staged = [store_key("staged", index, number) for index in range(self._receivers)]
        try:
            group.broadcast(sent_U8, self._check)
            self._await(staged, self._bound_s, f"receive weights of version {offer.version}")
        except BroadcastEndedError as error:
            raise self._explained(error, staged) from error
        time_s = time.monotonic() - self._begin_s
        encoding: Encoding = "adapter" if offer.adapter else "full" if delta_U8 is None else "delta"
        self._offer(offer, WeightTransfer(version=offer.version, bytes=sent_U8.numel(), time_s=time_s, encoding=encoding))

    def _explained(self, error: BroadcastEndedError, staged: Sequence[str]) -> BroadcastEndedError:
        """The error of a broadcast, with the names of lost receivers, which don't notice it."""
        deadline_s = time.monotonic() + self._bound_s + _EXPLANATION_S
        lost = dict(enumerate(staged))
        while lost and not self._closing.is_set() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            noticed = [i for i, key in lost.items() if self._store.check([key]) or self._store.check([store_key("left", i)])]
            lost = {index: key for index, key in lost.items() if index not in noticed}
        names = ", ".join(self._labels[index] for index in lost)
        return BroadcastEndedError(f"engine {names} is gone, or stopped: {error}") if names else error

    def _tell(self, number: int, message: Form | Incoming | None) -> None:
        """What every receiver waits for before update `number`; None: nothing more comes."""
        for index in range(self._receivers):
            self._store.set(store_key("update", index, number), msgspec.json.encode(message) if message else "")

    def _say_goodbye(self) -> None:
        """Have the receivers that wait for the next update end before the store does."""
        keys = [store_key("left", index) for index in range(self._receivers)]
        self._tell(1 + (self._sent.number if self._sent else 0), None)
        deadline_s = time.monotonic() + _GOODBYE_S
        while self._formed and not self._store.check(keys) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _await(
        self, keys: Sequence[str], bound_s: float, verb: str, late: type[WeightUpdateError] = BroadcastEndedError
    ) -> None:
        """Wait until each receiver has set its key. Raises `late`, with the names, and what `_check` raises."""
        begin_s = time.monotonic()
        while missing := [label for label, key in zip(self._labels, keys, strict=True) if not self._store.check([key])]:
            self._check()
            if (waited_s := time.monotonic() - begin_s) > bound_s:
                raise late(f"engine {', '.join(missing)} did not {verb} in {waited_s:.1f} s (bound: {bound_s:g} s)")
            time.sleep(_POLL_S)

    def _check(self) -> None:
        """Raises WeightUpdateError if a receiver has failed, _ClosingError if the sender closes."""
        if self._closing.is_set():
            raise _ClosingError
        if self._store.check([FAILED]):
            raise WeightUpdateError(f"engine {self._store.get(FAILED).decode(errors='replace')}")

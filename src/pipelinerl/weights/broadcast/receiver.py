"""The receivers of a weight broadcast. A thread receives and verifies updates while the engine decodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed

from pipelinerl.channel import ProtocolError
from pipelinerl.channel.rendezvous import Rendezvous, join_store
from pipelinerl.errors import INVALID_DATA, BroadcastEndedError, PipelineRLError, WeightUpdateError
from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages, WeightUpdate
from pipelinerl.serving.wire import ProcessGroupRequest
from pipelinerl.weights.broadcast.group import (
    FAILED,
    PROTOCOL,
    VERSION,
    BroadcastGroup,
    Form,
    Incoming,
    Member,
    gpu_of,
    staging_buffer,
    staging_device,
    store_key,
)
from pipelinerl.weights.delta import apply
from pipelinerl.weights.receiving import Receiver, require_intact

_LONGEST_ERROR = 500
_ENDING_S = 5.0
_ANY_TIME = timedelta(days=1000)
_CPU = torch.device("cpu")


class BroadcastReceiver:
    """A receiver of the trainer's broadcast. `problem`: why it receives nothing any more."""

    def __init__(self, request: ProcessGroupRequest, device: torch.device = _CPU, name: str = "") -> None:
        """`device`: where the engine computes. Updates are received there if the sender and every receiver have a GPU of
        their own, else on the CPU. `name`: for messages, if the request has none.
        """
        self.problem: WeightUpdateError | None = None
        self._request, self._device, self._index = request, device, request.index
        self._name, self._where = request.name or name, f"the weight sender at {request.host}:{request.port}"
        self._rendezvous: Rendezvous | None = None
        self._store: Any = None
        self._awaited = ""  # the key that the sender sets next
        # One buffer for all updates: the next one is sent only after this one was applied.
        self._buffer_U8 = torch.empty(0, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}
        self._staged: WeightUpdate | None = None
        self._joined, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receive", daemon=True)
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the group is formed. Raises WeightUpdateError if that fails or takes longer than `timeout_s`."""
        if not self._joined.wait(timeout_s):
            raise self._no_group(timeout_s)
        if self.problem is not None:
            raise self.problem

    def newest(self) -> WeightUpdate | None:
        """The update that was staged last, with views of the receive buffer; None while another one is received.

        Raises WeightUpdateError if there will be none.
        """
        if (staged := self._staged) is None and (problem := self.problem) is not None:
            raise type(problem)(*problem.args)
        return staged

    def close(self) -> None:
        """Leave the group. Views stay valid."""
        self._closed.set()
        if self.problem is None and self._rendezvous is not None and self._awaited:
            with suppress(RuntimeError):
                self._rendezvous.store.set(self._awaited, "")  # wakes the thread
        self._thread.join(_ENDING_S)

    # ---- the thread

    def _run(self) -> None:
        group: BroadcastGroup | None = None
        number = 1
        try:
            group = self._join()
            self._joined.set()
            while True:
                self._receive(group, number)
                number += 1
        except (BroadcastEndedError, distributed.DistError) as error:
            with suppress(RuntimeError):
                if self._store is not None:
                    self._store.set(store_key("left", self._index), "")
            own = isinstance(error, BroadcastEndedError)
            self.problem = BroadcastEndedError(str(error) if own else f"{self._where} is gone")
        except PipelineRLError as error:
            self._fail(error)
        except Exception as error:
            self._fail(WeightUpdateError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._joined.set()  # or never
            self._closed.wait()  # PyTorch can't destroy a group safely during interpreter shutdown
            if group is not None:
                group.end()
            elif self._rendezvous is not None:
                self._rendezvous.close()

    def _join(self) -> BroadcastGroup:
        """Connect to the sender, wait until all receivers have, and form the group."""
        request, bound_s = self._request, self._request.timeout_s
        try:
            self._rendezvous = rendezvous = join_store(request.host, request.port, request.key, bound_s)
        except (OSError, EOFError, ProtocolError) as error:
            raise WeightUpdateError(f"{self._where} can't be reached: {error}") from error
        self._store = rendezvous.store.clone()  # the group may use the other connection while this one waits
        self._store.set_timeout(timedelta(seconds=bound_s))
        if (version := self._store.get(VERSION).decode()) != PROTOCOL:
            raise WeightUpdateError(f"it uses {PROTOCOL}, the weight sender {version}: install the same version")
        member = Member(engine=self._name, gpu=gpu_of(self._device))
        self._store.set(store_key("member", self._index), msgspec.json.encode(member))
        form: Form = self._wait_for(0, Form, timedelta(seconds=bound_s))
        self._device = staging_device(form.backend, self._device)
        return BroadcastGroup(form, rendezvous, request.key, self._index + 1, self._device)

    def _receive(self, group: BroadcastGroup, number: int) -> None:
        """Receive update `number`, and verify its checksum.

        A delta is applied to the buffer itself, whose contents the engine has copied.
        """
        incoming: Incoming = self._wait_for(number, Incoming)
        self._staged = None
        if (layout := incoming.layout) is not None:
            self._buffer_U8 = staging_buffer(layout.buffer_bytes, self._device)
            self._tensors = layout.views(self._buffer_U8)
        if incoming.delta_bytes is None:
            group.broadcast(self._buffer_U8, self._require_open)
        else:
            delta_U8 = staging_buffer(incoming.delta_bytes, self._device)[: incoming.delta_bytes]
            group.broadcast(delta_U8, self._require_open)
            apply(delta_U8, self._buffer_U8)
        offer = incoming.offer
        require_intact(self._tensors, offer.version, offer.adapter or offer.checksum)
        self._staged = WeightUpdate(offer.version, offer.checksum, self._tensors, offer.device_checksum)
        self._store.set(store_key("staged", self._index, number), "")

    def _wait_for(self, number: int, kind: Any, bound: timedelta = _ANY_TIME) -> Any:
        """The sender's message before update `number`. Raises BroadcastEndedError if a side ends, WeightUpdateError."""
        self._awaited = store_key("update", self._index, number)
        self._require_open()
        self._store.set_timeout(bound)
        try:
            if not (found := self._store.get(self._awaited)):
                self._require_open()
                raise BroadcastEndedError(f"{self._where} has closed")
            return msgspec.json.decode(found, type=kind)
        except INVALID_DATA as error:
            raise WeightUpdateError(f"the weight sender sent an invalid message: {error}") from error
        except distributed.DistStoreError as error:  # it is late
            raise self._no_group(bound.total_seconds()) from error
        except RuntimeError as error:
            raise BroadcastEndedError(f"{self._where} is gone") from error

    def _fail(self, error: PipelineRLError) -> None:
        """Tell the sender why this receiver can't go on."""
        self.problem = error if isinstance(error, WeightUpdateError) else WeightUpdateError(str(error))
        with suppress(RuntimeError):
            if self._store is not None:
                name = f"number {self._index} ({self._name})"
                self._store.set(FAILED, f"{name} can't receive weights: {error}"[:_LONGEST_ERROR])

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise BroadcastEndedError("this receiver of weights has closed")

    def _no_group(self, waited_s: float) -> WeightUpdateError:
        return WeightUpdateError(f"{self._where} and its receivers formed no group in {waited_s:g} s")


class CollectiveWeightReceiver(Receiver):
    """Generation process number `index`, whose engine receives the broadcast itself. It joins when it knows where."""

    def __init__(self, hub: Messages, key: str, index: int, device: torch.device = _CPU, **options: Any) -> None:
        """`options`: see `ProcessGroupRequest`."""
        super().__init__(hub, self._received)
        self._device, self._options = device, {"key": key, "index": index, **options}
        self._group: BroadcastReceiver | None = None

    def offered(self) -> int | None:
        """See `Receiver`. Raises WeightUpdateError if nothing can be received here, which is not the sender's end."""
        offered = super().offered()
        if self._group is None and self.meeting is not None:
            request = ProcessGroupRequest(host=self.meeting.host, port=self.meeting.port, **self._options)
            self._group = BroadcastReceiver(request, self._device)
        problem = self._group.problem if self._group is not None else None
        if problem is not None and not isinstance(problem, BroadcastEndedError):
            raise problem
        return offered

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _received(self, offer: wire.Offer) -> Mapping[str, Tensor]:
        update = self._group.newest() if self._group is not None else None
        if update is None or update.version != offer.version:
            raise WeightUpdateError(f"weights of version {offer.version} were offered before they were received")
        return update.tensors

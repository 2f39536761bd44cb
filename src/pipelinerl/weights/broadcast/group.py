"""A `torch.distributed` group of one weight sender (rank 0) and its receivers, and the broadcast of a buffer in buckets.

The group is not the default group, so a process may be in several. Gloo can't be interrupted: if the other side stops, a
broadcast ends only at its timeout, and destroying the group waits for that. So a daemon thread holds an abandoned
group (`end`), and the process can exit at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor, distributed

from pipelinerl.channel import ProtocolError
from pipelinerl.channel.rendezvous import Rendezvous, gloo_group, prove_members
from pipelinerl.errors import BroadcastEndedError, WeightUpdateError, first_line
from pipelinerl.hub import wire
from pipelinerl.weights.layout import Layout

PROTOCOL = "pipelinerl-weights-10"
WORD_BYTES = 8
VERSION, FAILED = "version", "failed"
"""Keys of the group's store: the sender's `PROTOCOL`, and why the first receiver that failed can't go on."""

Backend = Literal["gloo", "nccl"]
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0002, 0.005
_NCCL_BOUND = timedelta(days=1)
_distributed: Any = distributed  # Its type declarations are incomplete.


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that nccl can be used on: a globally unique name, and the version of NCCL there."""

    name: str
    nccl: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver says of itself before the group is formed. `gpu`: on which it could receive."""

    engine: str = ""
    gpu: Gpu | None = None


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """All receivers are there: form the group of `size` members.

    `backend`: nccl between GPUs, gloo between CPUs. `bound_s`: how long one step of a broadcast may take.
    """

    backend: Backend
    size: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]
    bound_s: Annotated[float, msgspec.Meta(gt=0)]


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """An update that is broadcast next, and offered once all have it. `layout`: the same for all, and only in the first one.

    `delta_bytes`: what is broadcast is the delta from the previous update; None: all weights.
    """

    offer: wire.Offer
    layout: Layout | None = None
    delta_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


def store_key(kind: Literal["member", "update", "staged", "left"], index: int, number: int = 0) -> str:
    """The key in the group's store for receiver `index` of what `kind` says.

    member   its `Member`
    update   the `Incoming` of update `number`; 0: the `Form`. Empty if the sender closes instead
    staged   it has all of update `number`, with the right checksum
    left     it has noticed that the sender closes, or that a broadcast has failed
    """
    return f"{kind} {number} {index}"


class BroadcastGroup:
    """One member's end of the group."""

    def __init__(self, form: Form, rendezvous: Rendezvous, key: str, rank: int, device: torch.device) -> None:
        """Form the group with the other members, which reach this one at `rendezvous.host`. Takes `rendezvous` over.

        `device`: of the member's buffers (`staging_device`). Raises BroadcastEndedError if the others do not join within the
        bound, or one does not have `key`.
        """
        self._rendezvous, self._form = rendezvous, form
        self._works: list[Any] = []
        bound = timedelta(seconds=form.bound_s)
        try:
            rendezvous.store.set_timeout(bound)
            if form.backend == "gloo":
                # One thread: one broadcast at a time, in order.
                self._group = gloo_group(rendezvous.store, rank, form.size, bound, host=rendezvous.host, threads=1)
                prove_members(self._group, key, rank=rank, size=form.size, bound_s=form.bound_s)
            else:
                torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())  # of this thread
                options = _distributed.ProcessGroupNCCL.Options()
                options._timeout = _NCCL_BOUND  # NCCL's watchdog would end the process; our bounds are far shorter.
                self._group = _distributed.ProcessGroupNCCL(rendezvous.store, rank, form.size, options)
        except (RuntimeError, ProtocolError) as error:
            rendezvous.close()
            raise BroadcastEndedError(
                f"the group of weight sender and receivers was not formed: {first_line(error)}"
            ) from error

    def broadcast(self, flat_U8: Tensor, check: Callable[[], None]) -> None:
        """Copy `flat_U8` (bytes, [n]) from rank 0 to every member, in buckets.

        `check` is called repeatedly meanwhile. If it raises, the broadcast is abandoned and the caller gets the exception.
        Raises BroadcastEndedError if the group breaks, or a bucket takes longer than the bound.
        """
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        if isinstance(self._group, _distributed.ProcessGroupGloo):
            options.timeout = timedelta(seconds=self._form.bound_s)
        try:
            # All buckets are queued at once and sent one after the other.
            buckets = torch.split(flat_U8, self._form.bucket_bytes) if flat_U8.numel() else ()
            self._works = [self._group.broadcast([bucket_U8], options) for bucket_U8 in buckets]
            for work in self._works:
                deadline_s, poll_s = time.monotonic() + self._form.bound_s, _FIRST_POLL_S
                while not work.is_completed():
                    check()
                    if time.monotonic() > deadline_s:
                        raise BroadcastEndedError(f"the broadcast of weights made no progress for {self._form.bound_s:g} s")
                    time.sleep(poll_s)
                    poll_s = min(2 * poll_s, _LONGEST_POLL_S)
                work.wait()  # Completed; this raises its error, if any.
        except RuntimeError as error:  # PyTorch's, of either backend
            raise BroadcastEndedError(f"the broadcast of weights failed: {first_line(error)}") from error
        self._works = []

    def end(self) -> None:
        """Release the group without waiting. It can't be used afterwards."""
        self._rendezvous.close()
        if not isinstance(self._group, _distributed.ProcessGroupGloo):
            self._group.abort()
        elif not all(work.is_completed() for work in self._works):
            held = (self._group, self._works)
            threading.Thread(target=lambda _: threading.Event().wait(), args=(held,), daemon=True).start()


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU `device`; None if nccl can't be used there."""
    if device.type != "cuda" or not distributed.is_available() or not distributed.is_nccl_available():
        return None
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Gpu(str(torch.cuda.get_device_properties(device).uuid), version)


def choose_backend(sender: Gpu | None, receivers: Sequence[Gpu | None]) -> tuple[Backend, str]:
    """nccl if sender and receivers each have a GPU of their own and the same NCCL, else gloo, and why."""
    gpus = [gpu for gpu in (sender, *receivers) if gpu is not None]
    if len(gpus) <= len(receivers):
        return "gloo", "an engine or the trainer has no GPU for nccl"
    if len({gpu.name for gpu in gpus}) < len(gpus):
        return "gloo", "some of them share a GPU"
    versions = sorted({gpu.nccl for gpu in gpus})
    return ("nccl", "") if len(versions) == 1 else ("gloo", f"their versions of NCCL differ ({', '.join(versions)})")


def staging_device(backend: Backend, device: torch.device) -> torch.device:
    """The device of the broadcast buffer, for a member that computes on `device`."""
    return device if backend == "nccl" else torch.device("cpu")


def staging_buffer(size: int, device: torch.device) -> Tensor:
    """At least `size` bytes, rounded up to whole words, as a delta needs. Raises WeightUpdateError if memory is short."""
    try:
        return torch.zeros(-(-size // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no room for a copy of the weights ({size / 1e6:.0f} MB) on {device}. Free memory, or send a smaller type"
        ) from error

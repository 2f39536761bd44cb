"""A `torch.distributed` group of one weight sender (rank 0) and its receivers, and the broadcast of a buffer in buckets.

The group is not the default group, so a process may be in several. Gloo can't be interrupted: if the other side stops, a
broadcast ends only at its timeout, and destroying the group waits for that. So an abandoned group is kept alive by a daemon
thread (`end`), and the process can exit at any time.
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
from pipelinerl.errors import BroadcastEndedError, UserError, WeightUpdateError
from pipelinerl.rendezvous import Rendezvous, prove_members
from pipelinerl.weights.layout import Layout

PROTOCOL = "pipelinerl-weights-8"
WORD_BYTES = 8
FAILED = "failed"
"""The key of the group's store that says why the first receiver that failed can't go on."""

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

    protocol: str = PROTOCOL
    engine: str = ""
    gpu: Gpu | None = None


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """All receivers are there: form the group of `size` members, or `refusal` says why not.

    `backend`: nccl between GPUs, gloo between CPUs. `bound_s`: how long one step of a broadcast may take.
    """

    backend: str
    size: int
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1
    bound_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    refusal: str = ""


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """An update that is broadcast next. Only the first one has a `layout`, which is valid for all.

    `delta_bytes`: what is broadcast is the delta from the previous update; None: all weights.
    """

    version: int
    checksum: str
    device_checksum: str
    layout: Layout | None = None
    delta_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None


def member_key(index: int) -> str:
    """The key of a receiver's `Member`."""
    return f"member {index}"


def update_key(number: int, index: int) -> str:
    """The key of the `Incoming` of update `number` for a receiver; 0: of the `Form`. Empty if the sender closes instead."""
    return f"update {number} {index}"


def staged_key(number: int, index: int) -> str:
    """The key that a receiver sets when it has all of update `number`, with the right checksum."""
    return f"staged {number} {index}"


def left_key(index: int) -> str:
    """The key that a receiver sets when it has noticed that the sender closes, or that a broadcast has failed."""
    return f"left {index}"


class Group:
    """One member's end of the group."""

    def __init__(
        self,
        backend: str,
        rendezvous: Rendezvous,
        key: str,
        *,
        rank: int,
        size: int,
        host: str,
        bound_s: float,
        device: torch.device,
    ) -> None:
        """Form the group with the other members. `host`: the address at which they reach this member.

        Takes `rendezvous` over. Raises BroadcastEndedError if they do not join within `bound_s` or one does not have `key`,
        UserError if this PyTorch lacks the backend.
        """
        self._rendezvous, self._bound_s = rendezvous, bound_s
        self._works: list[Any] = []
        try:
            require_backend(backend, device)
            rendezvous.store.set_timeout(timedelta(seconds=bound_s))
            kind, options = _gloo(host, bound_s) if backend == "gloo" else _nccl(device)
            self._group = kind(rendezvous.store, rank, size, options)
            if backend == "gloo":
                prove_members(self._group, key, rank=rank, size=size, bound_s=bound_s)
        except (RuntimeError, ProtocolError) as error:
            rendezvous.close()
            raise BroadcastEndedError(
                f"the group of weight sender and receivers was not formed: {first_line(error)}"
            ) from error
        except UserError:
            rendezvous.close()
            raise

    def broadcast(self, flat_U8: Tensor, bucket_bytes: int, check: Callable[[], None]) -> None:
        """Copy `flat_U8` (bytes, [n]) from rank 0 to every member.

        `check` is called repeatedly meanwhile. If it raises, the broadcast is abandoned and the caller gets the exception.
        Raises BroadcastEndedError if the group breaks, or a bucket takes longer than the bound.
        """
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        if isinstance(self._group, _distributed.ProcessGroupGloo):
            options.timeout = timedelta(seconds=self._bound_s)
        try:
            # All buckets are queued at once and sent one after the other.
            self._works = [
                self._group.broadcast([flat_U8[start : start + bucket_bytes]], options)
                for start in range(0, flat_U8.numel(), bucket_bytes)
            ]
            for work in self._works:
                self._wait_for(work, check)
        except RuntimeError as error:  # PyTorch's, of either backend
            raise BroadcastEndedError(f"the broadcast of weights failed: {first_line(error)}") from error
        self._works = []

    def end(self) -> None:
        """Release the group without waiting. It can't be used afterwards."""
        self._rendezvous.close()
        if not isinstance(self._group, _distributed.ProcessGroupGloo):
            self._group.abort()
        elif not all(work.is_completed() for work in self._works):
            kept = (self._group, self._works)
            threading.Thread(target=_hold_forever, args=kept, name="weights-stuck", daemon=True).start()

    def _wait_for(self, work: Any, check: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + self._bound_s
        poll_s = _FIRST_POLL_S
        while not work.is_completed():
            check()
            if time.monotonic() > deadline_s:
                raise BroadcastEndedError(f"the broadcast of weights made no progress for {self._bound_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        work.wait()  # Completed; this raises its error, if any.


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


def staging_device(backend: str, device: torch.device) -> torch.device:
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


def require_backend(backend: str, device: torch.device) -> None:
    """Raises UserError unless this PyTorch has the backend and the backend can use the device."""
    if backend not in ("gloo", "nccl"):
        raise UserError(f"weights are broadcast with gloo or nccl, not {backend!r}")
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        raise UserError(f"this PyTorch ({torch.__version__}) has no {backend}: choose another transport of weights")
    needed = "cuda" if backend == "nccl" else "cpu"
    if device.type != needed:
        raise UserError(f"{backend} broadcasts weights between {needed} devices, not {device}")


def _gloo(host: str, bound_s: float) -> tuple[Any, Any]:
    gloo = _distributed.ProcessGroupGloo
    # The public constructor takes no address: it listens at the address of the machine's name, not at `host`.
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=bound_s)
    options._threads = 1  # one broadcast at a time, in order
    return gloo, options


def _nccl(device: torch.device) -> tuple[Any, Any]:
    torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())  # of this thread
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_BOUND  # NCCL's watchdog would end the process; our bounds are far shorter.
    return _distributed.ProcessGroupNCCL, options


def _hold_forever(*_: object) -> None:
    """Hold the arguments until the process ends."""
    threading.Event().wait()


def first_line(error: Exception) -> str:
    """The message without the C++ stack trace that PyTorch appends."""
    return str(error).partition("\n")[0]

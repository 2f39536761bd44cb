"""The processes of a sharded trainer: how they form a group, and what they call together.

    rank 0   trainer ──calls──▶ learner ─┐ the call, encoded, by a broadcast
    others               follow ◀────────┘ ──the same call──▶ learner

All ranks call the same methods of their learners, with the same arguments, so they make the same collective operations in
the same order. A rank that dies or stops breaks the operation that the others are in. They end, and the launcher names it.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.channel import POLL_S, ProtocolError
from pipelinerl.channel.rendezvous import Rendezvous, gloo_group, join_store, prove_members, serve_store
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RankLostError, UserError
from pipelinerl.types import Segment, TrainingSample

_ANY_TIME = timedelta(days=1000)
_GLOO = "gloo_at_one_address"
_distributed: Any = distributed  # Its type declarations are incomplete.


class RankCall(msgspec.Struct, frozen=True):
    """A method that all ranks call on their learners, with its arguments. `end`: training has ended."""

    method: Literal["step", "logits", "gather", "save_optimizer", "reset_optimizer", "fill_optimizer", "end"]
    samples: tuple[TrainingSample, ...] = ()
    segments: tuple[Segment, ...] = ()
    version: int = 0
    names: tuple[str, ...] = ()


class Team(msgspec.Struct, frozen=True):
    """One rank's place among all of them. `device`: where it computes. `start_s`: how long the others may take to load."""

    rank: int
    size: int
    mesh: DeviceMesh
    device: torch.device
    start_s: float

    def call(self, method: Any, **arguments: Any) -> None:
        """Have the other ranks make this `RankCall`. Does nothing on them: they make it because rank 0 does."""
        if self.rank == 0:
            self._share(msgspec.msgpack.encode(RankCall(method, **arguments)))

    def next_call(self) -> RankCall:
        """Wait for any time until rank 0 calls: it may have to wait for rollouts."""
        return msgspec.msgpack.decode(self._share(), type=RankCall)

    def meet(self) -> None:
        """Wait until all ranks have loaded what they load."""
        options = _distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self.start_s)
        _distributed.group.WORLD.allreduce([torch.zeros(1)], options).wait()

    def _share(self, data: bytes = b"") -> bytes:
        """The bytes of rank 0, on all ranks."""
        size = torch.tensor([len(data)])
        options = _distributed.BroadcastOptions()
        if self.rank > 0:
            options.timeout = _ANY_TIME
        _distributed.group.WORLD.broadcast([size], options).wait()
        data_U8 = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        distributed.broadcast(data_U8, 0)
        return data_U8.numpy().tobytes()


# ---- The group


@contextmanager
def join(
    config: TrainerConfig,
    rank: int,
    meeting: socket.socket | tuple[str, int],
    key: str,
    *,
    start_s: float,
    stall_s: float,
) -> Iterator[Team]:
    """Be one rank of a sharded trainer while inside. `meeting`: where rank 0 listens; for the others, its address.

    An operation of all ranks fails after `stall_s` without one of them.

    Raises UserError if this PyTorch lacks the backend, and RankLostError: if the others do not start within `start_s`, if
    one does not have `key`, and in place of the errors of operations that a rank has left.
    """
    # Without a number in the run file, each rank sees only its own GPU: see `placement.visible_gpus`.
    device = torch.device(config.rank_device(rank if ":" in config.device else 0))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        raise UserError(f"trainer.ranks: this PyTorch ({torch.__version__}) has no {backend}")
    with _broken_operations_explained(), closing(_meet(config, rank, meeting, key, start_s)) as rendezvous:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # otherwise the mesh chooses another GPU
            torch.cuda.set_device(device)
        gloo: Any = partial(gloo_group, host=rendezvous.host)
        distributed.Backend.register_backend(_GLOO, gloo, devices=["cpu", "cuda"])
        distributed.init_process_group(
            _GLOO if backend == "gloo" else f"cpu:{_GLOO},cuda:{backend}",
            store=rendezvous.store,
            rank=rank,
            world_size=config.ranks,
            timeout=timedelta(seconds=stall_s),
        )
        try:
            prove_members(distributed.group.WORLD, key, rank=rank, size=config.ranks, bound_s=start_s)
        except ProtocolError as error:
            raise RankLostError(f"the ranks of the trainer can't exchange tensors: {error}") from error
        yield Team(rank, config.ranks, init_device_mesh(device.type, (config.ranks,)), device, start_s)
        distributed.destroy_process_group()  # not after an error: it would wait for operations that never end


def _meet(
    config: TrainerConfig, rank: int, meeting: socket.socket | tuple[str, int], key: str, start_s: float
) -> Rendezvous:
    """The store of the group, once all ranks use it."""
    try:
        if isinstance(meeting, socket.socket):
            rendezvous = serve_store(meeting, key, start_s)
        else:
            rendezvous = join_store(*meeting, key, start_s)
    except (OSError, EOFError, ProtocolError) as error:
        raise RankLostError(f"rank 0 of the trainer can't be reached: {error}") from error
    names = [f"rank {other}" for other in range(config.ranks)]
    rendezvous.store.set(names[rank], "")
    deadline_s = time.monotonic() + start_s
    while missing := [name for name in names if not rendezvous.store.check([name])]:
        if time.monotonic() > deadline_s:
            rendezvous.close()
            raise RankLostError(f"{', '.join(missing)} of the trainer did not start within {start_s:g} s")
        time.sleep(POLL_S)
    return rendezvous


@contextmanager
def _broken_operations_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, _distributed.DistError) and "gloo" not in str(error):
            raise
        why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        raise RankLostError(f"the ranks of the trainer can't exchange tensors any more: {why}") from error

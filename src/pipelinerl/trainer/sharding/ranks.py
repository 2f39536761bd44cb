"""The processes of a sharded trainer: how they find each other, give orders, and notice that one of them is lost.

    rank 0  ◀──orders, heartbeats──▶  rank 1, 2, ...     a channel for each (`Peers`)
    all     ◀──tensors─────────────▶  all                torch.distributed: gloo between CPUs, nccl between GPUs

A collective operation can't be interrupted, and its own timeout names nobody. So a thread of each rank sends a heartbeat
every second and listens to those of the others. A rank that is gone or silent is named in the error that ends the rest. If
the main thread is inside a collective operation then, and does not return from it, the process is ended from the thread.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.channel import POLL_S, Channel, ProtocolError, dial
from pipelinerl.checkpoint_folders import FileRecord
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RankLostError, UserError
from pipelinerl.rendezvous import join_store, prove_members, serve_store
from pipelinerl.types import Segment, TrainingSample

BEAT_S = 1.0
GRACE_S = 3.0
"""How long the main thread has to end by itself once a rank is lost."""
COLLECTIVE_BOUND = timedelta(minutes=30)
"""The last resort: lost ranks are noticed by their heartbeats, ranks that hang by the run's watchdog."""
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

# ---- Messages. Rank 0 gives orders; all ranks carry them out at the same time, with the same collective operations.


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a rank above 0."""

    rank: int
    pid: int


class Form(msgspec.Struct, frozen=True, tag="form"):
    """All ranks have connected. `store_port`: of the group's rendezvous store."""

    store_port: int


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat."""


class Differentiate(msgspec.Struct, frozen=True, tag="differentiate"):
    """Compute the gradient of a step from `version`. A `Place` follows for each of `rows`; send back the sums as tensors."""

    version: int
    normalizer: int
    rows: int


class Place(msgspec.Struct, frozen=True, tag="place"):
    """A rank's samples in one row; none for an empty place."""

    samples: tuple[TrainingSample, ...]


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Change the weights by the gradient."""

    learning_rate: float


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute the logits of these segments. Only rank 0 uses them."""

    segments: tuple[Segment, ...]


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Compute log-probabilities under the reference model. `Unscored` follows for each of `rows`; send back a tensor."""

    rows: int


class Unscored(msgspec.Struct, frozen=True, tag="unscored"):
    """A rank's segments in one row; none for an empty place."""

    segments: tuple[Segment, ...]


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Gather all weights on rank 0."""


class SaveOptimizer(msgspec.Struct, frozen=True, tag="save"):
    """Write this rank's part of the optimizer's state to `folder` (see `Folders.mine`), and answer with `Saved`."""

    folder: str


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """`error`: why the file could not be written; "" if it was. Then `name` is that of the file, and `record` is its.

    Before, any number with only `sent_bytes`: how much of it is on the launcher's machine.
    """

    error: str = ""
    name: str = ""
    record: FileRecord | None = None
    sent_bytes: int = 0


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The last message. `error`: why this rank ends; "" at the end of training."""

    error: str = ""


Order = Differentiate | Update | Forward | Score | Gather | SaveOptimizer | Close
Message = Order | Hello | Form | Beat | Place | Unscored | Saved
Line = Channel[Any]


class Peers:
    """The ranks that this one talks to: all others for rank 0, rank 0 for the others. Losing one ends this process.

    `pids`: their process ids, for messages. `stall_s`: a rank counts as lost after this long without a message.
    `end(message)` ends this process at once. It is called in a thread if the main thread does not notice a lost rank.
    """

    def __init__(
        self, lines: Mapping[int, Line], pids: Mapping[int, int], *, stall_s: float, end: Callable[[str], None]
    ) -> None:
        self._lines, self._pids, self._stall_s, self._end = lines, pids, stall_s, end
        now_s = time.monotonic()
        self._heard_s = dict.fromkeys(lines, now_s)
        self._inbox: dict[int, queue.SimpleQueue[Message | None]] = {rank: queue.SimpleQueue() for rank in lines}
        self._lost = ""
        self._lost_s = 0.0
        self._noticed = False
        self._finished: set[int] = set()
        self._deaf: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    def send(self, message: Message, rank: int | None = None) -> None:
        """Send to one rank, or to all. Raises RankLostError if a rank is lost."""
        self.require_all()
        for to in self._lines if rank is None else [rank]:
            self._send(message, to)

    def receive(self, kind: type[MessageT], rank: int = 0) -> MessageT:
        """Wait for the next message of `rank`, which must be of this kind. Raises RankLostError if a rank is lost."""
        message = self.next(rank)
        if not isinstance(message, kind):
            raise RankLostError(f"{self._name(rank)} sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def next(self, rank: int = 0) -> Message:
        """Wait for the next message of `rank`, of any kind. Raises RankLostError if a rank is lost."""
        message = self._inbox[rank].get()
        if message is None:
            self.require_all()
        assert message is not None  # noqa: S101 - None is put only when a rank is lost
        return message

    def require_all(self) -> None:
        """Raise RankLostError if a rank is lost."""
        if self._lost:
            self._noticed = True
            raise RankLostError(self._lost)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Replace the error of a collective operation that fails because a rank is lost."""
        try:
            yield
        except RuntimeError as error:  # of torch.distributed
            deadline_s = time.monotonic() + GRACE_S
            while not self._lost and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            self._noticed = True
            if self._lost:
                raise RankLostError(self._lost) from error
            raise

    def close(self, error: str = "") -> None:
        """Tell the others that this rank ends, and stop listening."""
        self._noticed = True
        for line in self._lines.values():
            line.send(Close(error))
        self._closed.set()
        self._thread.join(2 * BEAT_S)
        for line in self._lines.values():
            line.close()

    # ---- The thread

    def _listen(self) -> None:
        beat_s = 0.0
        open_ranks = set(self._lines)
        while not self._closed.is_set():
            by_number = {self._lines[rank].fileno(): rank for rank in open_ranks}
            deaf = set(self._deaf)
            for ready in wait(list(by_number), POLL_S if by_number else 0):
                if isinstance(ready, int):
                    deaf.discard(by_number[ready])  # what it sent last says more
                    if not self._hear(by_number[ready]):
                        open_ranks.discard(by_number[ready])
            now_s = time.monotonic()
            if now_s - beat_s >= BEAT_S:
                beat_s = now_s
                for rank in open_ranks:
                    self._send(Beat(), rank)
            for rank in (open_ranks & deaf) - self._finished:
                self._lose(f"{self._name(rank)} takes no messages")
            for rank in open_ranks - self._finished:
                if now_s - self._heard_s[rank] > self._stall_s:
                    why = "its process is stopped, or its machine can't be reached"
                    self._lose(f"{self._name(rank)} sent nothing for {self._stall_s:g} s: {why}")
            if self._lost and not self._noticed and now_s - self._lost_s > GRACE_S:
                self._noticed = True
                self._end(self._lost)
            if not open_ranks:
                time.sleep(POLL_S)

    def _send(self, message: Message, rank: int) -> None:
        """If this fails, the thread finds out why: mostly, the rank is gone."""
        if not self._lines[rank].send(message):
            self._deaf.add(rank)

    def _hear(self, rank: int) -> bool:
        """Take one message. False if there are no more."""
        try:
            message: Message = self._lines[rank].receive()
        except (EOFError, OSError, ProtocolError) as error:
            if rank not in self._finished:
                gone = isinstance(error, EOFError | ConnectionResetError)
                self._lose(f"{self._name(rank)} is gone: {'its process has ended' if gone else error}")
            return False
        self._heard_s[rank] = time.monotonic()
        if isinstance(message, Close):
            self._finished.add(rank)
            if message.error:
                self._lose(message.error if rank == 0 else f"{self._name(rank)} ended: {message.error}")
        if not isinstance(message, Beat):
            self._inbox[rank].put(message)
        return True

    def _lose(self, why: str) -> None:
        """The first loss counts: it may cause others."""
        if not self._lost and not self._closed.is_set():
            self._lost, self._lost_s = why, time.monotonic()
            for inbox in self._inbox.values():
                inbox.put(None)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of the trainer (pid {self._pids[rank]})"


# ---- Finding each other


class Team(msgspec.Struct, frozen=True):
    """One rank's place among all of them. `device`: where it computes."""

    rank: int
    size: int
    peers: Peers
    mesh: DeviceMesh
    device: torch.device


@contextmanager
def lead(
    listener: socket.socket,
    key: str,
    config: TrainerConfig,
    *,
    bound_s: float,
    stall_s: float,
    end: Callable[[str], None],
    one_gpu: bool = False,
) -> Iterator[Team]:
    """Be rank 0: wait at most `bound_s` until all ranks have connected to `listener`, and form the group with them.

    The group, too, uses the address of `listener`. `one_gpu`: each rank sees only its own GPU.

    At the end the others are told that training has ended, or with which error. Raises RankLostError that names the ranks
    that did not connect in time.
    """
    lines, pids = _accept_all(listener, key, config.ranks, bound_s)
    peers = Peers(lines, pids, stall_s=stall_s, end=end)
    with _closing(peers), peers.naming_the_lost():
        host = listener.getsockname()[0]
        with closing(serve_store(host, key, bound_s)) as rendezvous:
            peers.send(Form(rendezvous.port))
            parts = (config, rendezvous.store, 0, peers)
            with _group(*parts, host=host, key=key, bound_s=bound_s, one_gpu=one_gpu) as team:
                yield team


@contextmanager
def follow(
    address: tuple[str, int],
    key: str,
    config: TrainerConfig,
    rank: int,
    *,
    bound_s: float,
    stall_s: float,
    end: Callable[[str], None],
    one_gpu: bool = False,
) -> Iterator[Team]:
    """Be another rank: connect to rank 0, which may start later, and form the group with it.

    Raises RankLostError if rank 0 can't be reached within `bound_s`.
    """
    try:
        line = dial(*address, key, bound_s, lambda: False, incoming=Message)
    except (OSError, EOFError, ProtocolError) as error:
        raise RankLostError(f"rank 0 of the trainer can't be reached: {error}") from error
    assert line is not None  # noqa: S101 - it never stops
    line.send(Hello(rank, os.getpid()))
    pid = _first_message(line, Hello, bound_s).pid
    peers = Peers({0: line}, {0: pid}, stall_s=stall_s, end=end)
    with _closing(peers), peers.naming_the_lost():
        try:
            rendezvous = join_store(address[0], peers.receive(Form).store_port, key, bound_s)
        except (OSError, EOFError, ProtocolError) as error:
            raise RankLostError(f"the store of rank 0 of the trainer can't be used: {error}") from error
        with closing(rendezvous):
            parts = (config, rendezvous.store, rank, peers)
            with _group(*parts, host=line.local_host, key=key, bound_s=bound_s, one_gpu=one_gpu) as team:
                yield team


def _accept_all(listener: socket.socket, key: str, size: int, bound_s: float) -> tuple[dict[int, Line], dict[int, int]]:
    """The channels and process ids of ranks 1 to `size` - 1."""
    lines: dict[int, Line] = {}
    pids: dict[int, int] = {}
    deadline_s = time.monotonic() + bound_s
    while missing := [rank for rank in range(1, size) if rank not in lines]:
        listener.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            connected, _ = listener.accept()
            line: Line = Channel(connected, key, Message, dialled=False)
            hello = _first_message(line, Hello, bound_s)
        except TimeoutError as error:
            names = ", ".join(map(str, missing))
            raise RankLostError(f"rank {names} of the trainer did not start within {bound_s:g} s") from error
        except (OSError, EOFError, ProtocolError):  # a stranger, or a rank that has ended: it stays missing
            continue
        if hello.rank not in missing:
            line.close()
            continue
        lines[hello.rank], pids[hello.rank] = line, hello.pid
        line.send(Hello(0, os.getpid()))
    return lines, pids


def _first_message(line: Line, kind: type[MessageT], bound_s: float) -> MessageT:
    if not line.poll(bound_s):
        raise TimeoutError(f"no answer within {bound_s:g} s")
    message = line.receive()
    if not isinstance(message, kind):
        raise ProtocolError(f"it sent {type(message).__name__} first")
    return message


@contextmanager
def _closing(peers: Peers) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        peers.close(str(error) or type(error).__name__)
        raise
    peers.close()


def backend_of(config: TrainerConfig) -> Literal["gloo", "nccl"]:
    if config.backend != "auto":
        return config.backend
    return "nccl" if config.device.startswith("cuda") else "gloo"


def device_of(config: TrainerConfig, rank: int) -> torch.device:
    """GPUs are counted from the configured one on."""
    device = torch.device(config.device)
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device


@contextmanager
def _group(
    config: TrainerConfig, store: Any, rank: int, peers: Peers, *, host: str, key: str, bound_s: float, one_gpu: bool
) -> Iterator[Team]:
    """Form the default group of torch.distributed, whose members reach this one at `host`, and prove that they have `key`.

    Raises UserError if this PyTorch lacks the backend, RankLostError if a member does not have the key.
    """
    backend, device = backend_of(config), device_of(config, 0 if one_gpu else rank)
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        raise UserError(f"trainer.backend: this PyTorch ({torch.__version__}) has no {backend}")
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # otherwise the mesh chooses another GPU
        torch.cuda.set_device(device)
    with _at_interface_of(host):
        distributed.init_process_group(
            "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=config.ranks,
            timeout=COLLECTIVE_BOUND,
        )
        mesh = init_device_mesh(device.type, (config.ranks,))
        try:
            prove_members(distributed.group.WORLD, key, rank=rank, size=config.ranks, bound_s=bound_s)
        except ProtocolError as error:
            raise RankLostError(f"the ranks of the trainer can't exchange tensors: {error}") from error
    yield Team(rank, config.ranks, peers, mesh, device)
    distributed.destroy_process_group()  # not after an error: it would wait for operations that never end


@contextmanager
def _at_interface_of(host: str) -> Iterator[None]:
    """Have gloo and nccl listen at the network interface with the address `host`, unless their variables name another.

    Otherwise gloo listens at the address of the machine's name. nccl reads its variable later. On the loopback interface it
    gets none, since the process may also send weights by nccl to other machines.
    """
    name, interface = "GLOO_SOCKET_IFNAME", _interface_of(host)
    if interface is not None and not host.startswith("127."):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if name in os.environ or interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def _interface_of(host: str) -> str | None:
    """The name of the network interface with this IPv4 address; None if there is none, or if this system can't say."""
    for _, name in socket.if_nameindex():
        if host == "127.0.0.1" and name in {"lo", "lo0"}:
            return name
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # not all have an address
            answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None

"""A Ray cluster as host of a run. Needs the extra `ray`.

Ray places and watches, and does nothing else: one actor per machine (`agent.Agent`) starts the processes of that machine.
What they share goes through Redis and the run directory. Calls carry the bytes of checkpoints for machines without the run
directory. Actors belong to the launcher, and Ray ends them with it.

What Ray says about an actor is taken as follows. Died: the machine is lost. Unavailable: not known yet. In the end only
heartbeats count: a machine that has not sent one for `launch.lost_s` is lost, whatever Ray says.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import msgspec

import pipelinerl.errors
from pipelinerl._version import __version__
from pipelinerl.checkpoint_folders import files_in
from pipelinerl.config.schema import LaunchConfig, RunConfig
from pipelinerl.errors import PipelineRLError, RankLostError, RunDirectoryError, StageDiedError, StreamError, UserError
from pipelinerl.extras import require
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import Board
from pipelinerl.launch.away import ReadyFiles
from pipelinerl.launch.fence import Fence
from pipelinerl.launch.hosts.agent import AWAY, BEAT_EVERY_S, LAUNCHER, LONGEST_PIECE, Agent, Ended, Look, Order, Setup, has
from pipelinerl.launch.hosts.head import Head, RunningHead
from pipelinerl.launch.hosts.placement import Machine, Place, place, roles_of, shares_on
from pipelinerl.launch.machine import Memory
from pipelinerl.launch.memory import check_memory, judge_machine
from pipelinerl.launch.roles import TRAINING, rank_roles, stages_of
from pipelinerl.launch.run_directory import ORPHAN_PATIENCE_S
from pipelinerl.launch.session import Here, Session
from pipelinerl.launch.share import Share
from pipelinerl.launch.stages.streams import name_in_redis, redis_of
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.status.mirror import Heartbeats, RedisBoard
from pipelinerl.types import StageStatus

require("ray", "launch.kind ray")  # before the import, which fails without
import ray  # noqa: E402
from ray import exceptions  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

if TYPE_CHECKING:
    from pipelinerl.launch.hosts.host import Worker

NAMESPACE = "pipelinerl"
CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""For calls that only start something. An agent that does not answer in this time is lost."""
CLOSE_TIMEOUT_S = 15.0
PIECES_AHEAD = 4
"""Pieces of a file that are on their way at the same time."""
POLL_S = 0.02
TRY_S = 1.0
"""How long the launcher tries to reach Redis at a time."""
CLOCK_CALLS = 5
CAUSE_PATIENCE_S = 3.0
"""After a failure: the time in which a lost machine, which may be its cause, stops answering."""
QUIET_S = 1.5
"""An agent that has been silent for longer (it beats every half second) may be lost."""


class Cluster(NamedTuple):
    """The machines of the cluster, with Ray's ids of them, and the address of this one."""

    machines: tuple[Machine, ...]
    ids: dict[str, str]
    address: str


class RayAgent(Agent):
    """The agent as a Ray actor: its GPUs are those that Ray gave the actor."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus = [str(gpu) for gpu in ray.get_gpu_ids()]

    def authenticated(self) -> bool:
        return _authenticated()


@contextmanager
def connected(config: LaunchConfig) -> Iterator[Cluster]:
    """Connected with the cluster inside. Raises UserError if there is none."""
    if ray.is_initialized():
        yield _cluster()
        return
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray tries for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:
        where = "of this machine" if address == "auto" else address
        raise UserError(
            f"launch.ray_address: no connection with the Ray cluster {where} ({_first_line(error)}); start one with "
            "`ray start --head`, and this command on one of its machines"
        ) from error
    try:
        cluster = _cluster()
        if len(cluster.machines) > 1 and not _authenticated() and not config.ray_without_token:
            raise UserError(
                "launch.kind: this Ray cluster has no token authentication, so whoever reaches its ports can run code on "
                "its machines; start it with RAY_AUTH_MODE=token (docs/cluster.md), or set launch.ray_without_token to true"
            )
        yield cluster
    finally:
        ray.shutdown()


def wait_until_unused(root: Path) -> None:
    """Wait until no agent of another launcher has this run directory: Ray needs seconds to end those of one that was killed.

    Raises RunDirectoryError if they do not end, because that launcher still runs. The lock of a run directory excludes only
    launchers on the same machine.
    """
    deadline_s = time.monotonic() + ORPHAN_PATIENCE_S
    own = f":{_launcher()}"
    while any(name.startswith(f"{root}:") and not name.endswith(own) for name in ray.util.list_named_actors()):
        if time.monotonic() > deadline_s:
            raise RunDirectoryError(
                f"{root} is in use by another run on this cluster; wait for it or choose another --run_dir"
            )
        time.sleep(0.5)


def _launcher() -> str:
    """Ray's id of this process and its connection with the cluster."""
    return str(ray.get_runtime_context().get_job_id())


def placement_of(config: RunConfig, cluster: Cluster) -> list[Place]:
    """Where the run's processes go. Raises UserError if that is impossible."""
    return place(roles_of(config), cluster.machines, config.launch.place)


def machines_away(config: RunConfig, cluster: Cluster, places: Sequence[Place]) -> list[str]:
    """What a run says about its machines that do not have its run directory. Writes a file beside it, and removes it."""
    folder = Path(config.run_dir or "runs").absolute()
    while not folder.is_dir():
        folder = folder.parent
    note, contents = folder / f".pipelinerl-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        note.write_text(contents)
    except OSError:
        return []  # the run itself will say so
    try:
        asked = {}
        for name in dict.fromkeys(place.machine for place in places):
            where = NodeAffinitySchedulingStrategy(cluster.ids[name], soft=False)
            look = ray.remote(num_cpus=0)(has).options(scheduling_strategy=where)
            asked[name] = look.remote(str(note), contents)
        away = [name for name, answer in asked.items() if not ray.get(answer, timeout=CALL_TIMEOUT_S)]
    except exceptions.RayError as error:
        raise UserError(f"the machines of the Ray cluster do not answer ({_first_line(error)})") from error
    finally:
        note.unlink()
    trains = {place.machine for place in places if place.role == TRAINING}
    return [_is_away(f"machine {name}", trains=name in trains) for name in away]


def _is_away(name: str, *, trains: bool) -> str:
    sends = "records, logs and checkpoints" if trains else "records and logs"
    return f"{name} does not have the run directory: its {sends} are sent to this machine (see docs/cluster.md for the cost)"


class RemoteWorker:
    """A process on another machine, as its agent reported it last."""

    def __init__(self, role: str, pid: int, log: Path, seat: Seat, look: Callable[[], None]) -> None:
        self.role, self.machine, self.pid, self.log = role, seat.machine.name, pid, log
        self.asked_to_stop = False
        self._seat, self._look = seat, look

    @property
    def _ended(self) -> Ended | None:
        """How this process ended, and not one before it."""
        ended = self._seat.ended.get(self.role)
        return ended if ended is not None and ended.pid == self.pid else None

    @property
    def running(self) -> bool:
        self._look()
        return self._ended is None and self._seat.lost is None

    def failure(self) -> PipelineRLError | None:
        ended = self._ended
        if ended is None or ended.kind is None:
            return None
        kind = getattr(pipelinerl.errors, ended.kind, StageDiedError)
        error: PipelineRLError = kind(ended.message)
        for note in ended.notes:
            error.add_note(note)
        return error

    @property
    def died(self) -> bool:
        return self._ended is not None and self._ended.died and not self.asked_to_stop

    def peak_memory_bytes(self) -> int | None:
        return None if self._ended is None else self._ended.peak_memory_bytes

    def dump_stacks(self) -> None:
        self._seat.tell(self.role, "stacks")

    def ask_to_stop(self) -> None:
        if self.running:
            self.asked_to_stop = True
            self._seat.tell(self.role, "stop")

    def kill(self) -> None:
        self._seat.tell(self.role, "kill")

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return not self.running


class Seat:
    """An agent, as the launcher sees it. `lost` says why its machine is lost, if it is. `away`: see `launch.away`."""

    def __init__(self, machine: Machine, actor: Any, roles: Sequence[str]) -> None:
        self.machine, self.actor, self.roles = machine, actor, roles
        self.ended: dict[str, Ended] = {}
        self.away = False
        self.lost: str | None = None
        self.unavailable = False
        self._looking: Any = None

    def call(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call the agent. Raises StageDiedError if it does not answer."""
        return self.result(getattr(self.actor, method).remote(*arguments), timeout_s)

    def result(self, called: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """What a call returned. Raises StageDiedError."""
        try:
            return ray.get(called, timeout=timeout_s)
        except exceptions.RayTaskError as error:
            raise StageDiedError(f"{self.name}: {type(error.cause).__name__}: {error.cause}") from error
        except exceptions.RayError as error:
            raise StageDiedError(f"{self.name} does not answer ({_first_line(error)})") from error

    def tell(self, role: str, what: str) -> None:
        """Send a signal to a process, without waiting for it."""
        if self.lost is None:
            self.actor.signal.remote(role, what)

    def look(self) -> None:
        """Take the answer to the last question, if it is there, and ask again. Never waits."""
        if self.lost is not None:
            return
        if self._looking is None:
            self._looking = self.actor.look.remote()
        if not ray.wait([self._looking], timeout=0)[0]:
            return
        answered, self._looking = self._looking, None
        try:
            look = msgspec.json.decode(ray.get(answered), type=Look)
        except exceptions.ActorDiedError as error:
            self.lost = f"its agent died: {_reason(error)}"
            return
        except exceptions.RayError:
            self.unavailable = True
            return
        self.unavailable = False
        self.ended |= {ended.role: ended for ended in look.ended}
        if look.problem is not None:
            self.lost = look.problem

    @property
    def name(self) -> str:
        """The machine as messages name it."""
        return f"machine {self.machine.name}" + (
            f" ({self.machine.address})" if self.machine.address != self.machine.name else ""
        )


class _LastBoard(RedisBoard):
    """While Redis is not there, it returns the statuses of the last look. `problem`: Redis has been away for too long.

    What is published waits for Redis, over the connection `patient`.
    """

    def __init__(self, connection: RedisConnection, patient: RedisConnection, prefix: str, patience_s: float) -> None:
        super().__init__(connection, prefix)
        self._patience_s = patience_s
        self._patient = RedisBoard(patient, prefix)
        self._seen_s = time.monotonic()
        self.problem: StreamError | None = None

    def publish_all(self, statuses: Sequence[StageStatus]) -> None:
        self._patient.publish_all(statuses)

    def stages(self) -> Sequence[str]:
        try:
            found = super().stages()
        except StreamError as error:
            if time.monotonic() - self._seen_s > self._patience_s:
                self.problem = error
            return sorted(self._payloads)
        self._seen_s = time.monotonic()
        return found


class RayHost:
    """The machines of a cluster. Each that has a process of the run gets an agent."""

    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        places: Sequence[Place],
        say: Callable[[str], object],
    ) -> None:
        """`say` shows a line to the user."""
        self._session, self._cluster, self._say = session, cluster, say
        self._places = {place.role: place for place in places}
        self._shares: dict[str, Share] = shares_on(session.config, session.schedule, places, cluster.machines)
        self._seats: dict[str, Seat] = {}
        self._stack = ExitStack()
        url, prefix, patience_s = redis_of(session.config, session.run, session.plan.redis_url)
        # The thread of heartbeats must not wait for anything else, nor the launcher for long while it only looks.
        connections = [RedisConnection(url, "launcher", bound_s) for bound_s in (TRY_S, TRY_S, patience_s)]
        here, beating, patient = (self._stack.enter_context(closing(connection)) for connection in connections)
        self._board = _LastBoard(here, patient, prefix, patience_s)
        self.board: Board = self._board
        self._heartbeats = Heartbeats(beating, prefix, LAUNCHER)
        self._looked_s = 0.0
        self._head: RunningHead | None = None

    def __enter__(self) -> Self:
        try:
            self._heartbeats.clear()
            self._heartbeats.beat()
            stop = threading.Event()
            beating = threading.Thread(target=self._beat, args=(stop,), name="heartbeats", daemon=True)
            beating.start()
            self._stack.callback(beating.join)
            self._stack.callback(stop.set)
            self._stack.callback(self._close_head)  # what agents send at their end is taken
            self._stack.callback(lambda: end_agents(self._seats.values()))
            for machine in self._cluster.machines:
                if roles := [place.role for place in self._places.values() if place.machine == machine.name]:
                    self._seats[machine.name] = Seat(machine, self._make_agent(machine), roles)
            if away := self._open_agents():
                self._start_head(away)
            trainer = self._seats[self._places[TRAINING].machine]
            self._trainer_at = trainer.machine.address
            self._ports = trainer.call("listen", self._trainer_at)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, role: str) -> RemoteWorker:
        found, share = self._places[role], self._shares[role]
        seat = self._seats[found.machine]
        weights_port, ranks_port = self._ports
        here = Here(
            threads=share.threads,
            yields=share.yields,
            address=seat.machine.address,
            weights_from=(self._trainer_at, weights_port),
            ranks_at=(self._trainer_at, ranks_port),
        )
        plan = self._session.run.plan.read_bytes() if seat.away else b""
        order = Order(role=role, here=here, gpus=found.gpus, listens=role == TRAINING, plan=plan)
        pid = seat.call("start", msgspec.json.encode(order))
        return RemoteWorker(role, pid, self._session.run.log(role), seat, self._look)

    def bury(self, worker: Worker) -> None:
        seat = self._seats[worker.machine]
        seat.call("bury", worker.role, timeout_s=self._session.config.launch.lost_s)
        if self._head is not None and seat.away:  # records that it has sent may be on the way
            self._head.catch_up()

    def failure(self) -> PipelineRLError | None:
        self._look()
        if self._head is not None and self._head.problem is not None:  # agents end because of it
            return self._head.problem
        for seat in self._seats.values():
            if seat.lost is not None:
                ranks = {TRAINING, *rank_roles(self._session.config)}
                kind = RankLostError if len(ranks) > 1 and ranks.intersection(seat.roles) else StageDiedError
                return kind(f"{seat.name}, which runs {', '.join(seat.roles)}, is lost: {seat.lost}")
        return self._board.problem

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """Wait for a machine that may be lost: other processes notice its silence sooner than the launcher."""
        begin_s = time.monotonic()
        while (lost := self.failure()) is None:
            waited_s = time.monotonic() - begin_s
            quiet = any(seat.unavailable or self._silent_s(seat) > QUIET_S for seat in self._seats.values())
            if waited_s > (self._session.config.launch.lost_s + CAUSE_PATIENCE_S if quiet else CAUSE_PATIENCE_S):
                return failure
            time.sleep(POLL_S)
        return lost

    def _make_agent(self, machine: Machine) -> Any:
        """An actor of this run on the machine. `wait_until_unused` finds its name.

        The name is of this session only: Ray keeps that of an agent which has ended until its launcher has, too.
        """
        gpus = sum(len(place.gpus) for place in self._places.values() if place.machine == machine.name)
        where = NodeAffinitySchedulingStrategy(self._cluster.ids[machine.name], soft=False)
        name = f"{self._session.run.root}:{machine.name}:{self._session.plan.id}:{_launcher()}"
        options = {"name": name, "num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": where}
        return cast(Any, ray.remote(RayAgent)).options(**options).remote()

    def _open_agents(self) -> list[Seat]:
        """Have all agents begin. Returns those whose machines do not have the run directory.

        Raises UserError for what is wrong on a machine.
        """
        session, run = self._session, self._session.run
        nonce = (f"control/shared-{secrets.token_hex(8)}", secrets.token_hex(16))
        write_atomically(run.root / nonce[0], nonce[1].encode())
        begin_s, bound_s = time.monotonic(), session.config.launch.startup_timeout_s
        try:
            opening, away = {}, []
            for name, seat in self._seats.items():
                setup = Setup(
                    version=__version__,
                    run_dir=str(run.root),
                    nonce=nonce,
                    session=session.plan.id,
                    machine=name,
                    stages=tuple(stage for role in seat.roles for stage in stages_of(session.config, role)),
                    ahead_s=self._clock_ahead_s(seat, max(1.0, bound_s - (time.monotonic() - begin_s))),
                    records_from_s=session.records_from_s,
                    lost_s=session.config.launch.lost_s,
                    working_folder=os.getcwd(),
                )
                opening[name] = setup
            for name, setup in opening.items():
                seat = self._seats[name]
                problem = seat.call("open", msgspec.json.encode(setup))
                seat.away = problem == AWAY
                if seat.away:
                    away.append(seat)
                    problem = seat.call("open", msgspec.json.encode(self._for_away(setup)))
                if problem:
                    raise UserError(f"{seat.name}: {problem}")
                self._judge_memory(seat)
        finally:
            (run.root / nonce[0]).unlink(missing_ok=True)
        return away

    # ---- machines that do not have the run directory

    def _for_away(self, setup: Setup) -> Setup:
        run, model = self._session.run, Path(self._session.config.model.path).expanduser()
        read = (run.settings, run.plan, name_in_redis(run))
        files = {str(path.relative_to(run.root)): path.read_bytes() for path in read}
        return msgspec.structs.replace(setup, files=files, model_folder=model.is_dir())

    def _start_head(self, away: Sequence[Seat]) -> None:
        """Take what these machines send, and send them the checkpoint that they load."""
        session, run = self._session, self._session.run
        url, prefix, patience_s = redis_of(session.config, run, session.plan.redis_url)
        connection = RedisConnection(url, "head", patience_s)
        ready = ReadyFiles(run.control, connection, prefix)
        self._head = RunningHead(Head(connection, prefix, Fence.of(session), self._fetch), ready)
        for seat in away:
            trains = TRAINING in seat.roles
            self._say(_is_away(seat.name, trains=trains))
            if trains and session.plan.checkpoint is not None:
                self._send_folder(seat, Path(session.plan.checkpoint))

    def _close_head(self) -> None:
        if self._head is not None:
            self._head.close()

    def _fetch(self, machine: str, name: str, size: int) -> Iterator[bytes]:
        """The pieces of a file on the machine. Raises StageDiedError if it does not answer."""
        seat = self._seats[machine]
        coming: deque[Any] = deque()
        offsets = iter(range(0, size, LONGEST_PIECE))
        while True:
            for offset in islice(offsets, PIECES_AHEAD - len(coming)):
                coming.append(seat.actor.read.remote(name, offset, min(LONGEST_PIECE, size - offset)))
            if not coming:
                return
            yield seat.result(coming.popleft())

    def _send_folder(self, seat: Seat, folder: Path) -> None:
        coming: deque[Any] = deque()  # Ray carries them out in order
        for path in files_in(folder):
            name = str(path.relative_to(self._session.run.root))
            with path.open("rb") as file:
                for offset in range(0, max(1, path.stat().st_size), LONGEST_PIECE):
                    if len(coming) == PIECES_AHEAD:
                        seat.result(coming.popleft())
                    coming.append(seat.actor.write.remote(name, offset, file.read(LONGEST_PIECE)))
        for call in coming:
            seat.result(call)

    def _judge_memory(self, seat: Seat) -> None:
        """Show what the processes of a machine may need. Raises UserError if that can't fit."""
        config, gpus = self._session.config, {role: self._places[role].gpus for role in seat.roles}
        if (prediction := check_memory(config).prediction) is None:
            return

        def machine(device: str) -> Memory | None:
            found = seat.call("memory", device)
            return None if found is None else Memory(*found)

        try:
            judged = judge_machine(config, prediction, gpus, machine)
        except UserError as error:
            raise UserError(f"{seat.name}: {error}") from error
        for line in judged.lines:
            self._say(f"{seat.machine.name}: {line}")

    def _clock_ahead_s(self, seat: Seat, bound_s: float) -> float:
        """The machine's clock minus this one's, from the fastest of some calls. The first waits for the agent's start."""
        try:
            seat.call("clock", timeout_s=bound_s)
        except StageDiedError as error:
            if isinstance(error.__cause__, exceptions.ActorDiedError):  # with its machine: Ray has just noticed
                raise
            gpus = sum(len(self._places[role].gpus) for role in seat.roles)
            raise UserError(
                f"{seat.name}: no agent could be started in {bound_s:.0f} s ({error}); it needs {gpus} of the machine's "
                f"{seat.machine.gpus} GPUs, which others may use"
            ) from error
        measured = []
        for _ in range(CLOCK_CALLS):
            asked_s = time.monotonic()
            there_s = seat.call("clock")
            answered_s = time.monotonic()
            measured.append((answered_s - asked_s, there_s - (asked_s + answered_s) / 2))
        return float(min(measured)[1])

    def _look(self) -> None:
        """Look at all agents, unless that was done just now."""
        if time.monotonic() - self._looked_s < POLL_S:
            return
        self._looked_s = time.monotonic()
        for seat in self._seats.values():
            seat.look()
            if seat.lost is None and (silent_s := self._silent_s(seat)) > self._session.config.launch.lost_s:
                seat.lost = f"it has not been heard for {silent_s:.0f} s (launch.lost_s)"

    def _silent_s(self, seat: Seat) -> float:
        return self._heartbeats.silent_s(seat.machine.name)

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT_EVERY_S):
            with suppress(StreamError):
                self._heartbeats.beat()


def end_agents(seats: Collection[Seat]) -> None:
    """Have them end with all their processes."""
    ending = [seat.actor.close.remote() for seat in seats if seat.lost is None]
    if ending:
        with suppress(exceptions.RayError):
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_TIMEOUT_S)
    for seat in seats:
        ray.kill(seat.actor)


def _cluster() -> Cluster:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeName"], node["NodeID"]))
    names = [node["NodeName"] for node in nodes]
    machines, ids = [], {}
    for node in nodes:
        unique = names.count(node["NodeName"]) == 1
        name = node["NodeName"] if unique else f"{node['NodeName']}-{node['NodeID'][:6]}"
        resources = node["Resources"]
        address = node["NodeManagerAddress"]
        machines.append(Machine(name, address, max(1, int(resources.get("CPU", 0))), int(resources.get("GPU", 0))))
        ids[name] = node["NodeID"]
    return Cluster(tuple(machines), ids, ray.util.get_node_ip_address())


def _authenticated() -> bool:
    """Whether this process proves with a token to others that it belongs to the cluster, and asks the same of them."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled  # noqa: PLC0415 - since 2.52
    except ImportError:
        return False
    return bool(is_token_auth_enabled())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _reason(error: Exception) -> str:
    """What Ray says at the end of its message about an actor that died."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return next(
        (line for line in reversed(lines) if line.startswith("The actor")), lines[-1] if lines else "no reason known"
    )

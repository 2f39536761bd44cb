"""A Ray cluster as host of a run. Needs the extra `ray`.

Ray places, starts and watches: each process of the run has an actor on its machine (`agent.Agent`), which starts it and
waits for its end. Everything else goes over the process's connection with the hub. Actors belong to the launcher, and Ray
ends them with it, and their processes end with them. A machine is lost when Ray says that an actor on it has died.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from pipelinerl._version import __version__
from pipelinerl.config.schema import LaunchConfig, RunConfig
from pipelinerl.errors import PipelineRLError, RankLostError, RunDirectoryError, StageDiedError, UserError
from pipelinerl.extras import require
from pipelinerl.files import write_atomically
from pipelinerl.launch.hosts.agent import Agent
from pipelinerl.launch.hosts.host import Host, Worker, worker_kind
from pipelinerl.launch.session import Session, WorkerReport, WorkerSpec
from pipelinerl.resources.placement import Node, Placement, place, placement_lines, roles_of, shares_on
from pipelinerl.resources.roles import TRAINING, Share, rank_roles
from pipelinerl.run_directory import ORPHAN_PATIENCE_S

require("ray", "launch.kind ray")  # before the import, which fails without
import ray  # noqa: E402
from ray import exceptions  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

NAMESPACE = "pipelinerl"
CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""For calls that only start something. An agent that does not answer in this time is lost."""
CLOSE_TIMEOUT_S = 15.0
POLL_S = 0.02
CAUSE_PATIENCE_S = 1.0
"""After a failure: the time for Ray to name a lost machine, which may be its cause, if all agents answer."""
LOST_S = 60.0
"""The same if an agent does not answer: Ray's health checks take some 15 s."""
QUIET_S = 1.5
"""Time for agents to answer."""


class Cluster(NamedTuple):
    """The machines of the cluster, with Ray's ids of them, and the address of this one."""

    machines: tuple[Node, ...]
    ids: dict[str, str]
    address: str


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


def placement_of(config: RunConfig, cluster: Cluster) -> list[Placement]:
    """Where the run's processes go. Raises UserError if that is impossible."""
    return place(roles_of(config), cluster.machines, config.launch.place)


class RemoteWorker(Worker):
    """A process on another machine, as its agent reports it."""

    def __init__(self, handle: Handle, pid: int, log: Path) -> None:
        self.role, self.machine, self._pid, self.log = handle.role, handle.machine.name, pid, log
        self.asked_to_stop = False
        self._handle = handle
        self._waiting = handle.actor.wait.remote()
        self._report: WorkerReport | None = None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def running(self) -> bool:
        """False too once the machine is lost."""
        return self.report() is None and self._handle.lost is None

    def report(self) -> WorkerReport | None:
        if self._report is None and self._handle.lost is None and ray.wait([self._waiting], timeout=0)[0]:
            try:
                self._report = msgspec.json.decode(ray.get(self._waiting), type=WorkerReport)
            except exceptions.RayError as error:
                self._handle.lost = _reason(error)
        return self._report

    def dump_stacks(self) -> None:
        self._handle.tell("stacks")

    def ask_to_stop(self) -> None:
        if self.running:
            self.asked_to_stop = True
            self._handle.tell("stop")

    def kill(self) -> None:
        self._handle.tell("kill")

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return not self.running


class Handle:
    """The agent of a role, as the launcher sees it. `lost` says why it is lost, if it is."""

    def __init__(self, role: str, machine: Node, actor: Any) -> None:
        self.role, self.machine, self.actor = role, machine, actor
        self.lost: str | None = None

    def call(self, method: str, *arguments: object) -> Any:
        """Call the agent. Raises StageDiedError if it does not answer."""
        return self.result(getattr(self.actor, method).remote(*arguments), CALL_TIMEOUT_S)

    def result(self, called: Any, timeout_s: float) -> Any:
        """What a call returned. Raises StageDiedError."""
        try:
            return ray.get(called, timeout=timeout_s)
        except exceptions.RayTaskError as error:
            raise StageDiedError(f"{self.name}: {type(error.cause).__name__}: {error.cause}") from error
        except exceptions.RayError as error:
            raise StageDiedError(f"{self.name} does not answer ({_first_line(error)})") from error

    def tell(self, what: str) -> None:
        """Send a signal to the process, without waiting for it."""
        if self.lost is None:
            self.actor.signal.remote(what)

    @property
    def name(self) -> str:
        """The machine as messages name it."""
        machine = self.machine
        return f"machine {machine.name}" + (f" ({machine.address})" if machine.address != machine.name else "")


class RayHost(Host):
    """The machines of a cluster. Each process of the run has an agent, which is an actor on the process's machine."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        places = placement_of(session.config, cluster)
        super().__init__(session)
        self._cluster, self.placement = cluster, placement_lines(places, cluster.machines)
        self._places = {place.role: place for place in places}
        self._shares: dict[str, Share] = shares_on(session.config, session.schedule, places, cluster.machines)
        self._handles: dict[str, Handle] = {}
        self._workers: list[RemoteWorker] = []
        self._ranks_at: tuple[str, int] | None = None

    def open(self, stack: ExitStack) -> None:
        session = self._session
        kinds = {role: kind for role in self._places if (kind := worker_kind(session.config, role)) is not None}
        listener = self._server.listen(self._cluster.address, session.plan.hub_key, kinds)
        stack.callback(listener.close)
        self._hub_at = listener.address
        stack.callback(lambda: end_agents(self._handles.values()))
        machines = {machine.name: machine for machine in self._cluster.machines}
        for role, where in self._places.items():
            node = self._cluster.ids[where.machine]
            # `wait_until_unused` finds the name. It is of this session only: Ray keeps it until the launcher has ended.
            options = {
                "name": f"{session.run.root}:{role}:{session.plan.id}:{_launcher()}",
                "num_cpus": 0,
                "num_gpus": len(where.gpus),
                "max_restarts": 0,
                "max_concurrency": 4,  # one call waits for the end of the process
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            actor = cast(Any, ray.remote(Agent)).options(**options).remote()
            self._handles[role] = Handle(role, machines[where.machine], actor)
        self._prepare()
        trainer = self._handles[TRAINING]
        address = trainer.machine.address
        self._ranks_at = (address, trainer.call("listen", address))

    def start(self, role: str) -> RemoteWorker:
        handle, share, session = self._handles[role], self._shares[role], self._session
        spec = WorkerSpec(
            session=session.plan.id,
            threads=share.threads,
            yields=share.yields,
            machine=handle.machine.name,
            address=handle.machine.address,
            hub_at=self._hub_at,
            ranks_at=self._ranks_at,
        )
        elapsed_s = time.monotonic() - session.records_from_s
        pid = handle.call("start", str(session.run.root), role, elapsed_s, msgspec.json.encode(spec))
        worker = RemoteWorker(handle, pid, session.run.log(role))
        self._workers.append(worker)
        return worker

    def reap(self, worker: Worker) -> None:
        self._handles[worker.role].call("reap")
        self.settle([worker])

    def failure(self) -> PipelineRLError | None:
        if self._server.failure is not None:
            return self._server.failure
        for worker in self._workers:
            worker.running  # noqa: B018 - looks at it
        for handle in self._handles.values():
            if handle.lost is not None:
                ranks = {TRAINING, *rank_roles(self._session.config)}
                kind = RankLostError if len(ranks) > 1 and handle.role in ranks else StageDiedError
                others = [one.role for one in self._handles.values() if one.machine == handle.machine]
                return kind(f"{handle.name}, which runs {', '.join(others)}, is lost: {handle.lost}")
        return None

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """Wait for a machine that may be lost: other processes notice a broken connection sooner than Ray."""
        calls = [handle.actor.answer.remote() for handle in self._handles.values() if handle.lost is None]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=QUIET_S) if calls else ([], [])
        deadline_s = time.monotonic() + (CAUSE_PATIENCE_S if len(answered) == len(calls) else LOST_S)
        while (lost := self.failure()) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return lost or failure

    def _prepare(self) -> None:
        """Have all agents look at their machines. Raises UserError for what is wrong there."""
        session, run = self._session, self._session.run
        note, contents = run.root / f"control/shared-{secrets.token_hex(8)}", secrets.token_hex(16)
        write_atomically(note, contents.encode())
        begin_s, bound_s = time.monotonic(), session.config.launch.startup_timeout_s
        calls = {
            role: one.actor.prepare.remote(__version__, str(note), contents, os.getcwd())
            for role, one in self._handles.items()
        }
        try:
            for role, handle in self._handles.items():
                left_s = max(1.0, bound_s - (time.monotonic() - begin_s))
                try:
                    problem = handle.result(calls[role], left_s)
                except StageDiedError as error:
                    if isinstance(error.__cause__, exceptions.ActorDiedError):  # with its machine: Ray has just noticed
                        raise
                    problem = (
                        f"no agent could be started in {left_s:.0f} s ({error}); it needs {len(self._places[role].gpus)} of "
                        f"the machine's {handle.machine.gpus} GPUs, which others may use"
                    )
                if problem:
                    raise UserError(f"{handle.name}: {problem}")
        finally:
            note.unlink(missing_ok=True)


def end_agents(handles: Collection[Handle]) -> None:
    """Have them end with all their processes."""
    ending = [handle.actor.close.remote() for handle in handles if handle.lost is None]
    if ending:
        with suppress(exceptions.RayError):
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_TIMEOUT_S)
    for handle in handles:
        ray.kill(handle.actor)


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
        machines.append(Node(name, address, max(1, int(resources.get("CPU", 0))), int(resources.get("GPU", 0))))
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

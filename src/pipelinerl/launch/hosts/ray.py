"""A Ray cluster as host of a run. Needs the extra `ray`.

Each process of the run is an actor (`worker.WorkerActor`): Ray places and starts it, carries its two calls and notices its
death. Everything else goes over its connection with the hub. Actors belong to the launcher, and Ray ends them with it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from pipelinerl._version import __version__
from pipelinerl.config.schema import LaunchConfig
from pipelinerl.errors import PipelineRLError, RankLostError, RunDirectoryError, StageDiedError, UserError, first_line
from pipelinerl.extras import require
from pipelinerl.launch.hosts.host import Host, Worker, named, worker_kind
from pipelinerl.launch.hosts.worker import WorkerActor
from pipelinerl.launch.session import Session, WorkerReport, WorkerSpec
from pipelinerl.resources.placement import Node, place, placement_lines, roles_of, shares_on
from pipelinerl.resources.roles import TRAINING, process_environment, rank_roles
from pipelinerl.run_directory import ORPHAN_PATIENCE_S

require("ray", "launch.kind ray")  # before the import, which fails without
import ray  # noqa: E402
from ray import exceptions  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

NAMESPACE = "pipelinerl"
CONNECT_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.2
LOST_S = 60.0
"""After a death: the time for its machine to answer, or for Ray to count it as lost, which takes some 15 s."""


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
            f"launch.ray_address: no connection with the Ray cluster {where} ({first_line(error)}); start one with "
            "`ray start --head`, and this command on one of its machines"
        ) from error
    try:
        cluster = _cluster()
        if len(cluster.machines) > 1 and not _authenticated() and not config.ray_without_token:
            raise UserError(
                "launch.kind: this Ray cluster has no token authentication, so anybody can run code through its ports on "
                "its machines; start it with RAY_AUTH_MODE=token (docs/cluster.md), or set launch.ray_without_token to true"
            )
        yield cluster
    finally:
        ray.shutdown()


def wait_until_unused(root: Path) -> None:
    """Wait until no actor of another launcher has this run directory: Ray needs seconds to end those of a killed one.

    Raises RunDirectoryError if they do not end, because that launcher still runs. The lock of a run directory excludes only
    launchers on the same machine.
    """
    deadline_s = time.monotonic() + ORPHAN_PATIENCE_S
    own = f":{ray.get_runtime_context().get_job_id()}"
    while any(name.startswith(f"{root}:") and not name.endswith(own) for name in ray.util.list_named_actors()):
        if time.monotonic() > deadline_s:
            raise RunDirectoryError(
                f"{root} is in use by another run on this cluster; wait for it or choose another --run_dir"
            )
        time.sleep(0.5)


class RayWorker(Worker):
    """A process that is an actor of Ray, on the machine `node`. `died`: Ray does not say whether its machine is lost."""

    def __init__(self, role: str, node: Node, log: Path, *, strategy: Any, actor: Any, begun: Any) -> None:
        """`begun`: the call of `WorkerActor.begin`."""
        self.role, self.machine, self.log, self.pid = role, node.name, log, 0
        self._node, self._strategy, self._actor, self._begun = node, strategy, actor, begun
        self._running: Any = None
        self._report: WorkerReport | None = None

    def start(self, records_from_s: float, timeout_s: float) -> None:
        """Start its stages. Raises UserError for what is wrong on its machine, StageDiedError if that is lost."""
        try:
            self.pid, problem = ray.get(self._begun, timeout=timeout_s)
        except exceptions.ActorDiedError as error:
            raise StageDiedError(f"the {self.role} process on {self.machine} died as it started: {error}") from error
        except exceptions.RayError as error:
            problem = f"no process could be started in {timeout_s:.0f} s ({first_line(error)})"
            problem += f"; others may use some of the machine's {self._node.gpus} GPUs" if self._node.gpus else ""
        if problem:
            raise UserError(f"{named_machine(self._node)}: {problem}")
        self._running = self._actor.run.remote(time.monotonic() - records_from_s)

    @property
    def running(self) -> bool:
        return self.report() is None

    def report(self) -> WorkerReport | None:
        if self._report is None and self._running is not None and ray.wait([self._running], timeout=0)[0]:
            try:
                self._report = msgspec.json.decode(ray.get(self._running), type=WorkerReport)
            except exceptions.RayError:
                message = f"{named(self)} was killed or crashed (log: {self.log})"
                died = WorkerReport(kind=StageDiedError.__name__, message=message, died=True)
                self._report = WorkerReport() if self.asked_to_stop else died
            self.kill()
        return self._report

    def kill(self) -> None:
        ray.kill(self._actor)

    def wait(self, timeout_s: float) -> bool:
        if self._running is not None:
            ray.wait([self._running], timeout=timeout_s)
        return not self.running

    def send_signal(self, number: int) -> Any:
        """Send it a signal, by a task on its machine, which returns if the machine is there. 0: no signal."""
        task = cast(Any, ray.remote(_send_signal)).options(num_cpus=0, scheduling_strategy=self._strategy)
        return task.remote(self.pid, int(number))


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class RayHost(Host):
    """The machines of a cluster. Each process of the run is an actor on its machine."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        places = place(roles_of(session.config), cluster.machines, session.config.launch.place)
        super().__init__(session)
        self._places = {one.role: one for one in places}
        self._cluster, self.placement = cluster, placement_lines(places, cluster.machines)
        self._shares = shares_on(session.config, session.schedule, places, cluster.machines)
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._workers: dict[str, RayWorker] = {}
        self._lost: PipelineRLError | None = None

    def open(self, stack: ExitStack) -> None:
        config, plan = self._session.config, self._session.plan
        kinds = {role: kind for role in self._places if (kind := worker_kind(config, role)) is not None}
        listener = self._server.listen(self._cluster.address, plan.hub_key, kinds)
        stack.callback(listener.close)
        self._deadline_s = time.monotonic() + config.launch.startup_timeout_s
        for role in self._places:
            worker = self._workers[role] = self._begin(role, listener.address)
            stack.callback(worker.kill)

    def start(self, role: str) -> RayWorker:
        worker, records_from_s = self._workers[role], self._session.records_from_s
        try:
            worker.start(records_from_s, max(1.0, self._deadline_s - time.monotonic()))
        except StageDiedError as error:
            raise self.cause(error) from error.__cause__
        return worker

    def _begin(self, role: str, hub_at: tuple[str, int]) -> RayWorker:
        """Create the actor of a role, and have it look at its machine, without waiting for it."""
        session, where, share = self._session, self._places[role], self._shares[role]
        machine = self._machines[where.machine]
        strategy = NodeAffinitySchedulingStrategy(self._cluster.ids[machine.name], soft=False)
        options = {
            # `wait_until_unused` finds the name. It is of this session only: Ray keeps it until the launcher has ended.
            "name": f"{session.run.root}:{role}:{session.plan.id}:{ray.get_runtime_context().get_job_id()}",
            "num_cpus": 0,
            "num_gpus": len(where.gpus),
            "max_restarts": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": {**process_environment(share.threads), "PYTHONUNBUFFERED": "1"}},
        }
        spec = WorkerSpec(
            session=session.plan.id,
            threads=share.threads,
            yields=share.yields,
            machine=machine.name,
            address=machine.address,
            hub_at=hub_at,
        )
        actor = cast(Any, ray.remote(WorkerActor)).options(**options).remote()
        begun = actor.begin.remote(str(session.run.root), role, msgspec.json.encode(spec), __version__, os.getcwd())
        return RayWorker(role, machine, session.run.log(role), strategy=strategy, actor=actor, begun=begun)

    def failure(self) -> PipelineRLError | None:
        return self._lost or super().failure()

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """The error that names a lost machine of the run, once each has answered or is lost; or else `failure`.

        Processes notice a broken connection sooner than Ray notices that a machine is lost.
        """
        on = {worker.machine: worker for worker in self._workers.values()}
        waiting, deadline_s = [worker.send_signal(0) for worker in on.values()], time.monotonic() + LOST_S
        while True:
            there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for name in on:
                if self._cluster.ids[name] not in there:
                    here = [place.role for place in self._places.values() if place.machine == name]
                    ranks = {TRAINING, *rank_roles(self._session.config)}
                    kind = RankLostError if len(ranks) > 1 and ranks.intersection(here) else StageDiedError
                    machine = named_machine(self._machines[name])
                    self._lost = kind(f"{machine}, which runs {', '.join(here)}, is lost: Ray gets no answer")
                    return self._lost
            if not waiting or time.monotonic() > deadline_s:
                return failure
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_EVERY_S)


def named_machine(machine: Node) -> str:
    """The machine as messages name it."""
    return f"machine {machine.name}" + (f" ({machine.address})" if machine.address != machine.name else "")


def _cluster() -> Cluster:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeName"], node["NodeID"]))
    names = [node["NodeName"] for node in nodes]
    machines, ids = [], {}
    for node in nodes:
        unique, resources = names.count(node["NodeName"]) == 1, node["Resources"]
        name = node["NodeName"] if unique else f"{node['NodeName']}-{node['NodeID'][:6]}"
        cpus, gpus = max(1, int(resources.get("CPU", 0))), int(resources.get("GPU", 0))
        machines.append(Node(name, node["NodeManagerAddress"], cpus, gpus))
        ids[name] = node["NodeID"]
    return Cluster(tuple(machines), ids, ray.util.get_node_ip_address())


def _authenticated() -> bool:
    """Whether this process proves with a token to others that it belongs to the cluster, and asks the same of them."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled  # noqa: PLC0415 - since 2.52
    except ImportError:
        return False
    return bool(is_token_auth_enabled())

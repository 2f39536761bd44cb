"""Processes that are kept while the run goes on from its checkpoint: their models stay loaded.

Engine servers that the run has started only stay as they are: the first weights of a session end all that came before (see
`serving.wire.WeightUpdateRequest`). Generation processes do this:

    launcher                                              generation process (`parent_pipe.Turns`)
    a session has lost the trainer
      SIGUSR2 ────────────────────────────────────────▶   ends its rollouts, closes stream, records and admission
      ◀─────────────────────────────────────── report     waits
    ends all other processes, rewinds the run to its checkpoint, plans the next session
      SIGUSR2 ────────────────────────────────────────▶   opens what the plan says; its engine takes the weights of the
                                                          checkpoint from its folder (servers get them
                                                          too), and generates
    starts a trainer ───────── the same weights ──────▶   takes them, as any update

With weights by broadcast, the launcher keeps the socket at which the trainer listens, so its address stays. A process whose
broadcast has ended waits for the launcher's signal. In the next session it joins the new trainer's broadcast, with that
session's key: no member, and no update, of an earlier session can be in it.

Between two sessions nothing of the old one is left in the process but its environment and its engine. So the new session
has no token of weights that the rewind gave up: groups that were in progress start again under their index, like all that a
resume does not find in the streams.

On a Ray cluster, the agents do this for the launcher, and wait too (`agent.Agent.have_wait`, `ray.KeptAgents`).

The launcher imports this module when a session is lost.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from pipelinerl.child import HUNG_PATIENCE_S, stop_all
from pipelinerl.config.schema import RunConfig
from pipelinerl.launch.roles import generation_roles, server_roles
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.servers import ReadyFile
from pipelinerl.weights.shared.file import CONTROL_BYTES

if TYPE_CHECKING:
    from pipelinerl.launch.hosts.host import LocalWorker
    from pipelinerl.launch.hosts.ray import Cluster

POLL_S = 0.02
HEALTH_S = 3.0
"""Time for a server to answer. It has nothing to do by then."""


class Kept(Protocol):
    """Processes that wait for the next session. `servers_key` is the key with which kept engine servers are reached."""

    servers_key: str

    @property
    def roles(self) -> Collection[str]:
        """Of the processes that still wait."""

    def fits(self, cluster: Cluster | None) -> bool:
        """Whether they can take part in a session on this cluster (None: this machine)."""

    def close(self) -> None:
        """End the processes that still wait. May be called twice."""


class Waiting:
    """Processes of one machine that wait: generation for a signal (`parent_pipe.Turns`), engine servers for requests."""

    def __init__(self, processes: Sequence[LocalWorker], config: RunConfig) -> None:
        self._waiting = {process.role: process for process in processes}
        self._told = set(generation_roles(config))

    def next_session(self, role: str) -> LocalWorker | None:
        """Have the process of this role take part in the session that was planned. None if there is none."""
        worker = self._waiting.pop(role, None)
        if worker is None:
            return None
        if not worker.running:  # it has died since
            worker.kill()
            return None
        if role in self._told:
            worker.report_file.unlink(missing_ok=True)
            worker.send_signal(signal.SIGUSR2)
        return worker

    @property
    def roles(self) -> Collection[str]:
        return self._waiting.keys()

    def close(self) -> None:
        """End the processes that still wait."""
        stop_all(list(self._waiting.values()), HUNG_PATIENCE_S)
        self._waiting.clear()


class KeptHere(Waiting):
    """Kept processes of this machine, and the channel over which they get weights."""

    def __init__(self, processes: Sequence[LocalWorker], session: Session, weights_fd: int) -> None:
        super().__init__(processes, session.config)
        self.servers_key = session.plan.servers_key
        self._weights = open(os.dup(weights_fd), "rb", buffering=0)  # noqa: SIM115 - closed by `close`

    def channel(self) -> int:
        """The channel for weights (`host.make_channel`), as if it were new. The caller closes it.

        The socket of a broadcast needs nothing: whoever still connects with the key of an earlier session is refused.
        """
        weights_fd = self._weights.fileno()
        if stat.S_ISREG(os.fstat(weights_fd).st_mode):
            forget_updates(weights_fd)
        return os.dup(weights_fd)

    def fits(self, cluster: Cluster | None) -> bool:
        return cluster is None

    def close(self) -> None:
        super().close()
        self._weights.close()


def forget_updates(weights_fd: int) -> None:
    """Make the shared file as if it were new, for another sender. Nobody may use it meanwhile."""
    os.pwrite(weights_fd, bytes(CONTROL_BYTES), 0)


def keep_here(session: Session, started: Sequence[LocalWorker], weights_fd: int, hurry: Callable[[], bool]) -> KeptHere:
    """Keep those of the processes on this machine that can take part in another session."""
    waiting = have_wait(session, [worker for worker in started if worker.running], hurry)
    roles = roles_to_keep(session.config, {worker.role for worker in waiting})
    return KeptHere([worker for worker in waiting if worker.role in roles], session, weights_fd)


def have_wait(session: Session, processes: Sequence[LocalWorker], hurry: Callable[[], bool]) -> list[LocalWorker]:
    """Have the processes of this machine that hold models wait for the next session. Returns those that do.

    Generation processes end their part of the session first. One that still starts ends. One that does not answer within
    `HUNG_PATIENCE_S`, or until `hurry()`, does not wait. Engine servers that the run has started only have to answer.
    """
    generating, serving = set(generation_roles(session.config)), set(server_roles(session.config))
    workers = [process for process in processes if process.role in generating]
    for worker in workers:
        worker.send_signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + HUNG_PATIENCE_S
    while any(worker.running and not worker.report_file.exists() for worker in workers):
        if time.monotonic() > deadline_s or hurry():
            break
        time.sleep(POLL_S)
    waiting = [worker for worker in workers if worker.running and worker.report_file.exists()]
    return waiting + [
        process for process in processes if process.role in serving and answers(session, process.role, process.pid)
    ]


def roles_to_keep(config: RunConfig, waiting: Collection[str]) -> set[str]:
    """Those of the `waiting` processes, on all machines, that can take part in another session."""
    if config.engine.kind == "vllm" and not set(generation_roles(config)).issubset(waiting):
        return set(waiting) - set(server_roles(config))  # one that is updating their weights may be killed
    return set(waiting)


def answers(session: Session, role: str, pid: int) -> bool:
    """Whether the engine server answers that is the process `pid`. One that still loads its model, or hangs, does not.

    vLLM also has to work: if an update of its weights was broken off, it is paused.
    """
    try:
        said = msgspec.json.decode(session.run.ready_file(role).read_bytes(), type=ReadyFile)
        url, kinds, key = urlsplit(said.url), {"http": HTTPConnection, "https": HTTPSConnection}, session.plan.servers_key
        with closing(kinds[url.scheme](url.netloc, timeout=HEALTH_S)) as connection:
            _get(connection, "/health", key)
            works = session.config.engine.kind != "vllm" or not json.loads(_get(connection, "/is_paused", key))["is_paused"]
    except (OSError, HTTPException):
        return False
    return works and said.pid == pid


def _get(connection: HTTPConnection, path: str, key: str) -> bytes:
    """Raises HTTPException for any other answer than 200."""
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    with connection.getresponse() as answer:
        if answer.status != HTTPStatus.OK:
            raise HTTPException(answer.status)
        return answer.read()

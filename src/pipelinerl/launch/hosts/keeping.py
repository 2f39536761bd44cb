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
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from pipelinerl.child import HUNG_PATIENCE_S, stop_all
from pipelinerl.launch.hosts.host import LocalWorker
from pipelinerl.launch.roles import generation_roles
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.servers import ReadyFile
from pipelinerl.weights.shared.file import CONTROL_BYTES

if TYPE_CHECKING:
    from pipelinerl.launch.hosts.processes import Processes

POLL_S = 0.02
HEALTH_S = 3.0
"""Time for a server to answer. It has nothing to do by then."""


class Kept:
    """Processes that wait for the next session, and the channel over which they get weights.

    `workers` wait for a signal (`parent_pipe.Turns`), `servers` for requests.
    """

    def __init__(self, workers: Sequence[LocalWorker], servers: Sequence[LocalWorker], weights_fd: int) -> None:
        self._waiting = {worker.role: worker for worker in (*workers, *servers)}
        self._told = {worker.role for worker in workers}
        self._weights_fd = os.dup(weights_fd)
        self.count = len(self._waiting)

    def channel(self) -> int:
        """The channel for weights (`host.make_channel`), as if it were new. The caller closes it.

        The socket of a broadcast needs nothing: whoever still connects with the key of an earlier session is refused.
        """
        if stat.S_ISREG(os.fstat(self._weights_fd).st_mode):
            forget_updates(self._weights_fd)
        return os.dup(self._weights_fd)

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
        os.close(self._weights_fd)


def forget_updates(weights_fd: int) -> None:
    """Make the shared file as if it were new, for another sender. Nobody may use it meanwhile."""
    os.pwrite(weights_fd, bytes(CONTROL_BYTES), 0)


def keep(session: Session, processes: Processes, weights_fd: int, hurry: Callable[[], bool]) -> Kept | None:
    """Have the processes that hold models wait for the next session. Those that do belong to this one no more.

    Generation processes end their part of the session first. One that still starts ends. One that does not answer within
    `HUNG_PATIENCE_S`, or until `hurry()`, is not kept. Engine servers that the run has started only have to answer.
    """
    config = session.config
    if not config.launch.restarts or processes.broker_failure():
        return None
    generating = set(generation_roles(config))
    workers = [one for one in processes.workers if isinstance(one, LocalWorker) and one.role in generating]
    for worker in workers:
        worker.send_signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + HUNG_PATIENCE_S
    while any(worker.running and not worker.report_file.exists() for worker in workers):
        if time.monotonic() > deadline_s or hurry():
            break
        time.sleep(POLL_S)
    waiting = [worker for worker in workers if worker.running and worker.report_file.exists()]
    processes.workers[:] = [worker for worker in processes.workers if worker not in waiting]
    servers = [one for one in processes.servers if isinstance(one, LocalWorker) and _answers(session, one)]
    if config.engine.kind == "vllm" and len(waiting) < len(generating):
        servers = []  # one that is updating their weights may be killed
    processes.servers[:] = [server for server in processes.servers if server not in servers]
    return Kept(waiting, servers, weights_fd)


def _answers(session: Session, server: LocalWorker) -> bool:
    """Whether an engine server answers. One that still loads its model, or hangs, does not.

    vLLM also has to work: if an update of its weights was broken off, it is paused.
    """
    try:
        said = msgspec.json.decode(session.run.ready_file(server.role).read_bytes(), type=ReadyFile)
        with closing(HTTPConnection(urlsplit(said.url).netloc, timeout=HEALTH_S)) as connection:
            _get(connection, "/health")
            works = session.config.engine.kind != "vllm" or not json.loads(_get(connection, "/is_paused"))["is_paused"]
    except (OSError, HTTPException):
        return False
    return works and said.pid == server.pid


def _get(connection: HTTPConnection, path: str) -> bytes:
    """Raises HTTPException for any other answer than 200."""
    connection.request("GET", path)
    with connection.getresponse() as answer:
        if answer.status != HTTPStatus.OK:
            raise HTTPException(answer.status)
        return answer.read()

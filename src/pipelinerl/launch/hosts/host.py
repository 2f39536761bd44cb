"""Where the processes of a run are started: a `Host`. This machine is one (`LocalHost`), a Ray cluster another (`ray`).

A host only starts processes and knows how they end. What is started, what a death means and when the run is over is the same
for all hosts (`processes`). Workers do not know what started them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

import pipelinerl.errors
from pipelinerl.child import KILL_TIMEOUT_S, ChildProcess
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, PipelineRLError, StageDiedError
from pipelinerl.files import shared_memory
from pipelinerl.hub.admission import Part
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.interfaces import Board
from pipelinerl.launch.session import Channels, Here, Session, WorkerReport
from pipelinerl.launch.streams import make_hub
from pipelinerl.process import PeakMemory
from pipelinerl.resources.memory import on_gpus
from pipelinerl.resources.roles import PREPROCESSING, TRAINING, generation_roles, server_roles, worker_roles
from pipelinerl.resources.share import process_environment, shares_of, usable_cores
from pipelinerl.status.board import MemoryBoard


def remove_weights_of(pid: int) -> None:
    """Remove the weight files for engine servers that a killed trainer left behind."""
    for left in Path("/dev/shm").glob(f"pipelinerl-weights-{pid}-*"):  # noqa: S108 - see `weights.files`
        shutil.rmtree(left, ignore_errors=True)


class Worker(Protocol):
    """A process of the run, as the launcher sees it. `machine` is "" on this machine."""

    role: str
    machine: str
    asked_to_stop: bool
    log: Path

    @property
    def pid(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def failure(self) -> PipelineRLError | None:
        """The error that it ended with. None if it still runs, ended with status 0, or was stopped on request."""

    @property
    def died(self) -> bool:
        """Whether it ended without an outcome: it was killed, or wrote no report of an error."""

    def peak_memory(self) -> PeakMemory | None:
        """Known once it has ended without being killed."""

    def dump_stacks(self) -> None:
        """Have it write the stacks of all its threads to its log (see faulthandler)."""

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None:
        """Kill it with all processes that it started. Does not wait."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, for at most `timeout_s`. Returns whether it has."""


def end_with_children(worker: Worker) -> None:
    """Kill the process and what it has started, wait for its end, and remove the weight files that it may have left."""
    worker.kill()
    worker.wait(KILL_TIMEOUT_S)
    remove_weights_of(worker.pid)


class Host(Protocol):
    """A context: processes may be started inside, and have ended at its end."""

    board: Board

    def settle(self, ended: Sequence[Worker]) -> None:
        """Wait until everything is known that these processes sent before they ended."""

    def waiting(self) -> int:
        """Rollouts in the streams."""

    def parts(self) -> dict[int, Part]:
        """What generation processes have done, by number."""

    def start(self, role: str) -> Worker:
        """Start a process. Servers come first: workers may hold what servers need."""

    def bury(self, worker: Worker) -> None:
        """Kill what a process that died has started. Nothing that it has sent arrives after this. Raises StageDiedError."""

    def failure(self) -> PipelineRLError | None:
        """Why the host can't go on, if it is not because of a single process: a machine is lost, for example."""

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """What caused the failure of a process, which may be known only a little later; or the failure itself."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class LocalWorker(ChildProcess):
    """A process on this machine."""

    log: Path

    def __init__(
        self,
        session: Session,
        role: str,
        here: Here,
        *,
        channels: Channels = Channels(),  # noqa: B008 - it does not change
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, which inherits `fds` and those of `channels`.

        Its report of an earlier session is removed; its log is appended to.
        """
        run = session.run
        self.role = role
        self.machine = here.machine
        self.report_file = run.report(role)
        self.report_file.unlink(missing_ok=True)
        said = msgspec.json.encode(msgspec.structs.replace(here, session=session.plan.id)).decode()
        arguments = [role, str(run.root), *map(str, channels), str(session.records_from_s), said]
        super().__init__(
            [sys.executable, "-m", "pipelinerl.launch.hosts.worker", *arguments],
            log=run.log(role),
            environment={**process_environment(role, here.threads), "PYTHONUNBUFFERED": "1", **(environment or {})},
            fds=[*fds, *channels.opened],
            watches_parent=True,
        )

    def dump_stacks(self) -> None:
        self.send_signal(signal.SIGUSR1)

    def peak_memory(self) -> PeakMemory | None:
        report = self._report()
        return None if report is None else report.peak

    def failure(self) -> PipelineRLError | None:
        status = self.status
        if not status or (self.asked_to_stop and status == -signal.SIGTERM):
            return None
        report = self._report()
        if report is None or report.error is None:
            return StageDiedError(f"{named(self)} {self.how_it_ended()}{self.log_excerpt()}")
        kind = getattr(pipelinerl.errors, report.error.kind, StageDiedError)
        error: PipelineRLError = kind(report.error.message)
        error.add_note(report.error.traceback)
        return error

    @property
    def died(self) -> bool:
        return bool(self.status) and self._report() is None and not self.asked_to_stop

    def _report(self) -> WorkerReport | None:
        """What the worker wrote when it ended."""
        try:
            return msgspec.json.decode(self.report_file.read_bytes(), type=WorkerReport)
        except (OSError, *INVALID_DATA):
            return None


def worker_kind(config: RunConfig, role: str) -> WorkerKind | None:
    """What the hub does for the process of a role; None for engine servers and ranks, which do without it."""
    apart = config.launch.preprocessor == "process"
    if role == TRAINING:
        return WorkerKind(reads="prepared" if apart else "rollouts", follows=True)
    if role == PREPROCESSING:
        return WorkerKind(reads="rollouts")
    if role in (roles := generation_roles(config)):
        return WorkerKind(process=roles.index(role))
    return None


def named(worker: Worker) -> str:
    """A process as messages name it."""
    place = f" on {worker.machine}" if worker.machine else ""
    return f"the {worker.role} process (pid {worker.pid}{place})"


class HubHost:
    """What every host has: the session's hub, which is served inside the context."""

    def __init__(self, session: Session) -> None:
        """Raises StreamError."""
        self._session, self._hub = session, make_hub(session, MemoryBoard())
        self._server = HubServer(self._hub)
        self.board: Board = self._server
        self._stack = ExitStack()

    def settle(self, ended: Sequence[Worker]) -> None:
        for worker in ended:
            if kind := worker_kind(self._session.config, worker.role):
                self._server.wait_ended(kind)

    def waiting(self) -> int:
        return self._hub.waiting

    def parts(self) -> dict[int, Part]:
        return self._hub.admission.parts

    def open(self, stack: ExitStack) -> None:
        """Open the rest of the host. `stack` closes it at the end, or if this raises an error."""

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(self._server)
            self.open(opened)
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


class LocalHost(HubHost):
    """This machine. All processes inherit `lock_fd`: it stays open until they have ended, also if the launcher is killed.

    `placement`: lines on which process is on which GPU, if any is.
    """

    def __init__(self, session: Session, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._workers: list[LocalWorker] = []
        roles = [*server_roles(session.config), *worker_roles(session.config)]
        self._shares = shares_of(session.config, session.schedule, roles, usable_cores())
        self.placement: Sequence[str] = ()
        self._gpus: Mapping[str, str] = {}
        if on_gpus(session.config):
            from pipelinerl.resources.placement import place_here, placement_lines, visible_gpus  # noqa: PLC0415

            places, machine = place_here(session.config)
            self.placement = placement_lines(places, [machine])
            self._gpus = visible_gpus(session.config, places, os.environ.get("CUDA_VISIBLE_DEVICES"))
        super().__init__(session)

    def start(self, role: str) -> LocalWorker:
        worker = self._start(role)
        self._workers.append(worker)
        return worker

    def _start(self, role: str) -> LocalWorker:
        share, servers = self._shares[role], server_roles(self._session.config)
        here = Here(threads=share.threads, yields=share.yields)
        environment = {"CUDA_VISIBLE_DEVICES": self._gpus[role]} if role in self._gpus else {}
        if role in servers:
            return LocalWorker(self._session, role, here, fds=[self._lock_fd], environment=environment)
        # The workers are parents of the servers too: if the launcher is killed, servers end after the last worker.
        parents = (worker.parent_fd for worker in self._workers if worker.role in servers and worker.running)
        fds = [self._lock_fd, *parents]
        options: dict[str, Any] = {"fds": fds, "environment": environment}
        if (kind := worker_kind(self._session.config, role)) is None:
            return LocalWorker(self._session, role, here, channels=self.channels, **options)
        with self._server.connect(kind) as connected:
            channels = self.channels._replace(hub=connected.fileno())
            return LocalWorker(self._session, role, here, channels=channels, **options)

    def bury(self, worker: Worker) -> None:
        end_with_children(worker)
        self.settle([worker])

    def failure(self) -> PipelineRLError | None:
        return self._server.failure

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        return failure

    def open(self, stack: ExitStack) -> None:
        ranks = -1
        if self._session.config.trainer.ranks > 1:
            from pipelinerl.channel import listen  # noqa: PLC0415 - only several ranks need it

            ranks = listen().detach()
            stack.callback(os.close, ranks)
        weights = -1
        if self._session.config.weights.kind == "shared":
            weights = shared_memory()
            stack.callback(os.close, weights)
        self.channels = Channels(weights=weights, ranks=ranks)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for worker in self._workers:
            remove_weights_of(worker.pid)

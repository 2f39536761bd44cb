"""Where the processes of a run are started: a `Host`. This machine is one (`LocalHost`), a Ray cluster another (`ray`).

A host only starts processes and knows how they end. What is started, what a death means and when the run is over is the same
for all hosts (`processes`). Workers do not know what started them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Self

import msgspec

import pipelinerl.errors
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, PipelineRLError, RunInterruptedError, StageDiedError
from pipelinerl.files import shared_memory
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.hub import Hub
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.hub.stream import FileStream, GroupStream
from pipelinerl.interfaces import Board
from pipelinerl.launch.session import Session, WorkerReport, WorkerSpec
from pipelinerl.process import PeakMemory
from pipelinerl.process.child import KILL_TIMEOUT_S, UNKNOWN_STATUS, ChildProcess, Stoppable
from pipelinerl.process.forks import ForkServer
from pipelinerl.resources.machine import usable_cores
from pipelinerl.resources.roles import (
    PREPROCESSING,
    TRAINING,
    generation_roles,
    on_gpus,
    process_environment,
    server_roles,
    shares_of,
    worker_roles,
)
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import stream_capacity
from pipelinerl.status.board import MemoryBoard
from pipelinerl.types import StageStatus

FINISHED = "finished"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pause before the first restart of a process or a session. It doubles with each further one, up to the longest."""


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a run that reached its goal. `stream_rollouts` are in a stream, not yet read by the trainer.

    `restarts`: how often each process was started again, and the `run` from its latest checkpoint. `lost`: the session ended
    because a process was lost, so that another session can go on. `launcher_cpu_s`: its CPU seconds since
    all stages had loaded, unless it runs stages itself.
    """

    statuses: Mapping[str, StageStatus]
    error: PipelineRLError | None
    wall_s: float
    stream_rollouts: int = 0
    peak_memory: Mapping[str, PeakMemory] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    lost: bool = False
    launcher_cpu_s: float | None = None


class Attempts:
    """The ends of one thing, a process or the sessions of a run, which is started again at most `allowed` times in a row.

    reports    why it ended each time since it last worked
    pause_s    how long to wait before it is started again
    due_s      when that is; None: it runs
    restarts   how often it was started again, the last time at `began_s`
    """

    def __init__(self, allowed: int) -> None:
        self.allowed, self.restarts, self.began_s, self.pause_s = allowed, 0, inf, FIRST_PAUSE_S
        self.reports: list[str] = []
        self.due_s: float | None = None

    def after(self, why: str, what: str, *, worked: bool) -> str | None:
        """It has ended, perhaps after it `worked`. Returns what happens next, for the user; None if it ended too often."""
        self.reports = [*([] if worked else self.reports), why]
        self.pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(len(self.reports) - 1, 16))
        last = why.splitlines()[0].removesuffix("; the end of its log:").removesuffix(":")
        line = f"{last}; {what} in {self.pause_s:g} s (restart {len(self.reports)} of {self.allowed})"
        return line if len(self.reports) <= self.allowed else None

    def all(self, head: str) -> str:
        """All reports, numbered."""
        return "\n".join([head, *(f"{number}. {report}" for number, report in enumerate(self.reports, start=1))])


def interruption(session: Session) -> RunInterruptedError:
    """The error for a run that was asked to stop."""
    run = session.run
    if session.config.stream.kind == "memory" or not any(run.checkpoints.glob("step_*")):
        return RunInterruptedError("stopped before its goal")
    return RunInterruptedError(f"stopped before its goal; continue with `pipelinerl train --resume {run.root}`")


class Worker(Stoppable):
    """A process of the run, as the launcher sees it. `machine` is "" on this one; with its machine, it has ended."""

    role: str
    machine: str
    log: Path

    @abstractmethod
    def report(self) -> WorkerReport | None:
        """How it ended. None if it runs, or is lost with its machine."""

    def failure(self) -> PipelineRLError | None:
        """The error that it ended with. None if it still runs, ended with status 0, or was stopped on request."""
        if (report := self.report()) is None or not report.kind:
            return None
        error: PipelineRLError = getattr(pipelinerl.errors, report.kind, StageDiedError)(report.message)
        if report.traceback:
            error.add_note(report.traceback)
        return error

    @property
    def died(self) -> bool:
        report = self.report()
        return report is not None and report.died and not self.asked_to_stop


class LocalWorker(ChildProcess, Worker):
    """A process on this machine."""

    log: Path

    def __init__(
        self,
        run: RunDirectory,
        role: str,
        spec: WorkerSpec,
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """Start the process, which inherits `fds` and those of `spec`.

        Its report of an earlier session is removed; its log is appended to.
        """
        self.role, self.machine = role, ""
        self._ended: WorkerReport | None = None
        self.report_file = run.report(role)
        self.report_file.unlink(missing_ok=True)
        arguments = [role, str(run.root), msgspec.json.encode(spec).decode()]
        super().__init__(
            [sys.executable, "-m", "pipelinerl.launch.hosts.worker", *arguments],
            log=run.log(role),
            environment={**process_environment(spec.threads), "PYTHONUNBUFFERED": "1", **(environment or {})},
            fds=[*fds, *(fd for fd in (spec.hub, spec.weights) if fd >= 0)],
            watches_parent=True,
            forks=forks,
        )

    def report(self) -> WorkerReport | None:
        if self._ended is not None or (status := self.status) is None:
            return self._ended
        try:
            written, reported = msgspec.json.decode(self.report_file.read_bytes(), type=WorkerReport), True
        except (OSError, *INVALID_DATA):
            written, reported = WorkerReport(), False
        if status == UNKNOWN_STATUS and (reported or self.asked_to_stop) and not written.kind:
            status = 0
        if not status or (self.asked_to_stop and status == -signal.SIGTERM):
            self._ended = WorkerReport(written.peak)
        elif written.kind:
            self._ended = written
        else:
            message = f"{named(self)} {self.how_it_ended()}{self.log_excerpt()}"
            self._ended = WorkerReport(written.peak, StageDiedError.__name__, message, died=not reported)
        return self._ended


def worker_kind(config: RunConfig, role: str) -> WorkerKind | None:
    """What the hub does for the process of a role; None for engine servers and ranks, which do without it."""
    apart = config.launch.preprocessor == "process"
    if role == TRAINING:
        return WorkerKind(reads="prepared" if apart else "groups", follows=True)
    if role == PREPROCESSING:
        return WorkerKind(reads="unprepared")
    if role in (roles := generation_roles(config)):
        return WorkerKind(process=roles.index(role))
    return None


def named(worker: Worker) -> str:
    """A process as messages name it."""
    place = f" on {worker.machine}" if worker.machine else ""
    return f"the {worker.role} process (pid {worker.pid}{place})"


def open_stream(config: RunConfig, run: RunDirectory, run_id: str) -> GroupStream:
    """The stream of the run. Raises StreamError, and ConfigError for a wrong address of Redis."""
    if config.stream.kind == "memory":
        return FileStream()
    if config.stream.url is None:
        return FileStream(run.streams / "rollouts", run.recorded)
    from pipelinerl.hub.redis import RedisStream  # noqa: PLC0415 - needs the extra `redis`

    return RedisStream(config.stream.url, f"pipelinerl-{run_id}-rollouts")


def make_hub(session: Session, board: Board) -> Hub:
    """The hub of a session, over the run's stream. Raises StreamError."""
    config, plan = session.config, session.plan
    admission = AdmissionState(
        session.schedule,
        taken=plan.taken,
        processes=config.engine.processes,
        handed_over=sum(kept.left for kept in plan.kept),
        settled=plan.settled,
    )
    rollouts = open_stream(config, session.run, plan.run)
    rollouts.count([kept.left for kept in plan.kept])
    return Hub(
        admission,
        rollouts,
        session.run.root,
        board,
        capacity=stream_capacity(config),
        drops=config.stream.when_full == "drop_oldest",
    )


class Host(ABC):
    """Starts processes while inside it as a context; they have ended at its end. It has the session's hub.

    `placement`: lines on which process is on which machine and GPU, unless all are on this machine's CPUs.
    """

    placement: Sequence[str] = ()

    def __init__(self, session: Session) -> None:
        """Raises StreamError."""
        self._session, self.hub = session, make_hub(session, MemoryBoard())
        self._server = HubServer(self.hub)
        self.board: Board = self._server
        self._stack = ExitStack()

    @abstractmethod
    def start(self, role: str) -> Worker:
        """Start a process. Raises OSError, UserError and StageDiedError."""

    def ready(self) -> bool:
        """Whether `start` starts a process at once. Raises StageDiedError if it can't be."""
        return True

    def reap(self, worker: Worker) -> None:
        """Kill what a process that died has started. Nothing that it has sent arrives after this."""
        worker.kill()
        worker.wait(KILL_TIMEOUT_S)
        self.settle([worker])

    def settle(self, ended: Sequence[Worker]) -> None:
        """Wait until everything is known that these processes sent before they ended."""
        for worker in ended:
            if kind := worker_kind(self._session.config, worker.role):
                self._server.wait_ended(kind)

    def failure(self) -> PipelineRLError | None:
        """Why the host can't go on, if it is not because of a single process: a machine is lost, for example."""
        return self._server.failure

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """What caused the failure of a process, which may be known only a little later; or the failure itself."""
        return failure

    @abstractmethod
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


class LocalHost(Host):
    """This machine. All processes inherit `lock_fd`: it stays open until they have ended, also if the launcher is killed."""

    def __init__(self, session: Session, lock_fd: int, forks: ForkServer | None = None) -> None:
        self._lock_fd, self._forks, self._weights = lock_fd, forks, -1
        self._workers: list[LocalWorker] = []
        self._servers = server_roles(session.config)
        roles = [*self._servers, *worker_roles(session.config)]
        self._shares = shares_of(session.config, session.schedule, roles, usable_cores())
        self._gpus: Mapping[str, str] = {}
        if on_gpus(session.config):
            from pipelinerl.resources.placement import place_here, placement_lines, visible_gpus  # noqa: PLC0415

            places, machine = place_here(session.config)
            self.placement = placement_lines(places, [machine])
            self._gpus = visible_gpus(session.config, places, os.environ.get("CUDA_VISIBLE_DEVICES"))
        super().__init__(session)

    def ready(self) -> bool:
        return self._forks is None or self._forks.ready()

    def start(self, role: str) -> LocalWorker:
        session, share = self._session, self._shares[role]
        spec = WorkerSpec(
            session=session.plan.id,
            records_from_s=session.records_from_s,
            threads=share.threads,
            yields=share.yields,
            weights=-1 if role in self._servers else self._weights,
        )
        environment = {"CUDA_VISIBLE_DEVICES": self._gpus[role]} if role in self._gpus else {}
        with ExitStack() as stack:
            if kind := worker_kind(session.config, role):
                connected = stack.enter_context(self._server.connect(kind))
                spec = msgspec.structs.replace(spec, hub=connected.fileno())
            worker = LocalWorker(session.run, role, spec, fds=[self._lock_fd], environment=environment, forks=self._forks)
        self._workers.append(worker)
        return worker

    def open(self, stack: ExitStack) -> None:
        if self._session.config.weights.kind == "shared":
            self._weights = shared_memory()
            stack.callback(os.close, self._weights)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for worker in self._workers:  # a killed trainer leaves weight files for engine servers: see `weights.sending`
            for left in Path("/dev/shm").glob(f"pipelinerl-weights-{worker.pid}-*"):  # noqa: S108
                shutil.rmtree(left, ignore_errors=True)

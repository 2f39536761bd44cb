"""Runs generation (one or more processes), training and what they need in separate processes, and watches them.

    launcher ──starts──▶ generation (engine or its client, actor, environment)   ┐ rollouts: files or Redis,
             ──starts──▶ preprocessing, if it is a separate process              │ weights: shared memory or a broadcast,
             ──starts──▶ training (with `trainer.ranks`, one process a rank)     ┘ statuses: the status board
             ──starts──▶ engine servers, if the run has its own
             ◀──status board, exit codes── all

The launcher computes nothing. It shows the status board, notices at once when a process ends, asks the watchdog whether
the run makes progress, and turns Ctrl-C into a clean stop. It starts some processes again if they die (`restarts`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelinerl.child import stop_all
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import (
    BroadcastEndedError,
    CrashLoopError,
    PipelineRLError,
    RankLostError,
    RunInterruptedError,
    StageDiedError,
    StalledError,
    StreamError,
    WeightUpdateError,
)
from pipelinerl.files import UNWRITABLE
from pipelinerl.launch.hosts.host import Host, Worker, named
from pipelinerl.launch.run_lock import RunLock, keep_settings
from pipelinerl.launch.session import Session
from pipelinerl.launch.summary import Outcome, interruption
from pipelinerl.process import Interrupts, counted_interrupts
from pipelinerl.resources.roles import TRAINING, generation_roles, rank_roles, server_roles, worker_roles, worker_stages
from pipelinerl.status.board import last_statuses, write_statuses
from pipelinerl.status.screen import RunView
from pipelinerl.status.watchdog import Watchdog
from pipelinerl.types import TRAINER, StageStatus, goal_reached, trainer_progress

if TYPE_CHECKING:
    from pipelinerl.launch.restarts import Healing

LOOK_EVERY_S = 0.1
STOP_PATIENCE_S = 120.0
"""Time for a clean stop: a decode step, an optimizer step and a checkpoint."""
CAUSE_PATIENCE_S = 1.0
"""Time for a rank of the trainer to end, after another one, or an engine, noticed that it is lost."""
SERVER_PATIENCE_S = 20.0
"""Time for an engine server to stop. It is idle by then."""


@dataclass
class Processes:
    """The processes of a session. `servers` serve the `workers` until the workers have ended.

    `replaceable`: the roles whose processes are started again.
    """

    host: Host
    workers: list[Worker] = field(default_factory=list)
    servers: list[Worker] = field(default_factory=list)
    replaceable: Sequence[str] = ()

    def dead(self) -> list[Worker]:
        """The processes to start again."""
        return [worker for worker in (*self.servers, *self.workers) if worker.role in self.replaceable and worker.died]

    def failure(self) -> PipelineRLError | None:
        """Why a process ended that should not have. What others depend on comes first: its end may end the others."""
        if failure := self.host.failure():
            return failure
        dead = self.dead()
        for server in self.servers:
            if not server.running and server not in dead:
                return server.failure() or premature_exit(server)
        others = [worker for worker in self.workers if worker not in dead]
        failures = {worker.role: failure for worker in others if (failure := worker.failure()) is not None}
        if isinstance(failures.get(TRAINING), RankLostError):  # it ended because of another rank, and may have ended engines
            failures = {role: failure for role, failure in failures.items() if role.startswith(TRAINING)}
        # The loss of a rank, or of a member of a broadcast, is noticed by the others: what the lost one died of comes first.
        noticed = (RankLostError, WeightUpdateError)
        return min(failures.values(), key=lambda failure: isinstance(failure, noticed), default=None)

    def silent_ranks(self, roles: Sequence[str]) -> RankLostError | None:
        """The error that names the ranks of the trainer that still run, if all others have ended for want of them."""
        ranks = [worker for worker in self.workers if worker.role in roles]
        silent = [worker for worker in ranks if worker.running]
        ended = [worker.failure() for worker in ranks if worker not in silent]
        if not silent or not ended or not all(isinstance(failure, RankLostError) for failure in ended):
            return None
        names = " and ".join(map(named, silent))
        return RankLostError(f"{names} no longer answers the other ranks of the trainer: it is stopped, or hangs")

    def lost(self, error: PipelineRLError | None) -> bool:
        """Whether the error is that a process or a machine was lost, and not one that would only happen again."""
        if isinstance(error, BroadcastEndedError):
            return True
        if isinstance(error, CrashLoopError) or not isinstance(error, (StageDiedError, StalledError, StreamError)):
            return False
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in UNWRITABLE:
            return False
        if isinstance(error, StalledError):
            trainer = trainer_progress(last_statuses(self.host.board).get(TRAINER))
            return trainer is not None and trainer.busy_s > 0  # it worked before
        if isinstance(error, RankLostError) or self.host.failure():
            return True
        return any(worker.died for worker in (*self.servers, *self.workers))


def premature_exit(worker: Worker) -> PipelineRLError:
    """The error for a worker that ended with status 0 before the run was over."""
    return StageDiedError(f"{named(worker)} ended before the run did (was it told to stop?)")


def run_processes(session: Session, view: RunView, host: Host, lock: RunLock) -> Outcome:
    """Run the session to its end on `host`. Errors of the run are in the outcome, not raised."""
    begin_s = time.monotonic()
    processes = Processes(host, replaceable=replaceable_roles(session.config))
    watch = _Watch(session, lock, processes, view)
    for line in host.placement:
        view.say(line)
    error: PipelineRLError | None = None
    lost = False
    statuses, waiting = dict[str, StageStatus](), 0
    with ExitStack() as stack:
        interrupts = stack.enter_context(counted_interrupts())
        try:
            stack.enter_context(host)
            for role in server_roles(session.config):
                processes.servers.append(host.start(role))
            for role in worker_roles(session.config):
                processes.workers.append(host.start(role))
            error = watch.run(interrupts)
            lost = processes.lost(error)
        except PipelineRLError as raised:
            error, lost = raised, processes.lost(raised)
        finally:
            error = _stop(session, processes.workers, view, interrupts, error)
            asked = interrupts.count
            stop_all(processes.servers, SERVER_PATIENCE_S, lambda: interrupts.count > asked)
            host.settle(processes.workers)
            statuses, waiting = last_statuses(host.board), host.hub.waiting
    view.update(statuses, time.monotonic())
    started = [*processes.servers, *processes.workers]
    return Outcome(
        statuses=statuses,
        error=error,
        wall_s=time.monotonic() - begin_s,
        stream_rollouts=waiting,
        peak_memory={one.role: report.peak for one in started if (report := one.report()) and report.peak},
        restarts=watch.healing.summary() if watch.healing else {},
        lost=lost and not isinstance(error, RunInterruptedError),
    )


def replaceable_roles(config: RunConfig) -> list[str]:
    """The processes that are started again if they die. A member of a broadcast can't be: its group is formed once."""
    if not config.launch.restarts:
        return []
    engines = [*server_roles(config), *generation_roles(config)]
    lost = {TRAINING, *rank_roles(config), *(engines if config.weights.kind == "collective" else ())}
    return [role for role in (*server_roles(config), *worker_roles(config)) if role not in lost]


class _Watch:
    """Watches processes, statuses and interrupts until the run is over."""

    def __init__(self, session: Session, lock: RunLock, processes: Processes, view: RunView) -> None:
        self._session, self._lock, self._processes, self._view = session, lock, processes, view
        self._stages, self._followers = worker_stages(session.config), rank_roles(session.config)  # which end with rank 0
        self._watchdog = Watchdog(session.config.launch.watchdog_s)
        self._loaded, self._begin_s = False, 0.0
        self.healing: Healing | None = None

    def run(self, interrupts: Interrupts) -> PipelineRLError | None:
        """Returns why the run ended; None if it reached its goal."""
        processes, self._begin_s = self._processes, time.monotonic()
        while True:
            self._lock.require_directory()
            ended = [worker for worker in processes.workers if not worker.running and worker not in processes.dead()]
            try:
                self._replace(time.monotonic())
                failure = processes.failure()
            except PipelineRLError as error:
                failure = error
            if failure is not None:
                return self._cause(failure)
            processes.host.settle(ended)
            statuses = self._look()
            early = [worker for worker in ended if worker.role not in self._followers]
            if early and not goal_reached(statuses.get(TRAINER)):
                return premature_exit(early[0])
            if len(ended) == len(processes.workers) and not (self.healing and self.healing.pending):
                return None
            if interrupts.count:
                return RunInterruptedError("stopping")
            if stalled := self._stalled(statuses, time.monotonic()):
                return stalled
            time.sleep(LOOK_EVERY_S)

    def _replace(self, now: float) -> None:
        """Replace dead processes. Raises PipelineRLError if the run must end instead."""
        processes = self._processes
        if dead := processes.dead():
            self._heal().heal(dead, now)
            for living in (processes.servers, processes.workers):
                living[:] = [worker for worker in living if worker not in dead]
        for worker in self.healing.begin(now) if self.healing else ():
            (processes.servers if worker.role.startswith("server-") else processes.workers).append(worker)

    def _heal(self) -> Healing:
        if self.healing is None:
            from pipelinerl.launch.restarts import Healing  # noqa: PLC0415 - few runs need it

            self.healing = Healing(self._session, self._processes.host, self._view)
        return self.healing

    def _cause(self, failure: PipelineRLError) -> PipelineRLError:
        processes = self._processes
        if self._followers:
            time.sleep(CAUSE_PATIENCE_S)
            failure = processes.silent_ranks([TRAINING, *self._followers]) or processes.failure() or failure
        return processes.host.cause(failure)

    def _look(self) -> dict[str, StageStatus]:
        """The statuses of the processes that run now. Shows them, and notes when all parts have loaded."""
        processes, now = self._processes, time.monotonic()
        started = {("", os.getpid()), *((worker.machine, worker.pid) for worker in processes.workers)}
        found = last_statuses(processes.host.board)
        statuses = {stage: status for stage, status in found.items() if (status.machine, status.pid) in started}
        self._view.update(statuses, now)
        write_statuses(self._session.run.statuses, statuses)
        if not self._loaded and not any(_not_ready(stage, statuses.get(stage)) for stage in self._stages):
            self._loaded = True
            keep_settings(self._session.config, self._session.run)
        if self.healing is not None:
            self.healing.observe(statuses, now)
        return statuses

    def _stalled(self, statuses: Mapping[str, StageStatus], now: float) -> StalledError | None:
        """Why nothing moves, or is not ready in time. Silent processes that can be replaced are killed instead."""
        launch, processes = self._session.config.launch, self._processes
        begin_s, absent = self._begin_s, list[str]()
        if self.healing is not None:
            begin_s, absent = max(begin_s, self.healing.changed_s), self.healing.absent_servers
        # A stage without a status is still starting, as is an absent server, and the others may wait for it.
        stall = None if absent or set(self._stages) - statuses.keys() else self._watchdog.observe(statuses, now)
        if stall is not None:
            if not self._heal().kill(stall.suspects, processes.workers, processes.replaceable):
                return StalledError(stall.message)
            self._watchdog = Watchdog(launch.watchdog_s)  # those that waited for them have time to go on
        late = [*absent, *(text for stage in self._stages if (text := _not_ready(stage, statuses.get(stage))))]
        if late and now - begin_s > launch.startup_timeout_s:
            return StalledError(f"{' and '.join(late)} not ready after {now - begin_s:.0f} s (launch.startup_timeout_s)")
        return None


def _stop(
    session: Session, workers: Sequence[Worker], view: RunView, interrupts: Interrupts, error: PipelineRLError | None
) -> PipelineRLError | None:
    """Stop the workers, with time to write a checkpoint. Returns the error that the run ended with, if any."""
    patience_s = STOP_PATIENCE_S
    hung: list[Worker] = []
    if isinstance(error, StalledError):
        for worker in workers:
            worker.dump_stacks()
        logs = ", ".join(str(worker.log) for worker in workers)
        error = StalledError(f"{error}\nstacks of all threads are in {logs}")
        patience_s = min(patience_s, session.config.launch.watchdog_s)  # a hung process will not stop cleanly either
        hung = [worker for worker in workers if worker.role in generation_roles(session.config)]
    if isinstance(error, RankLostError):  # one is stopped, perhaps, and without it the others can't save anything
        hung = [worker for worker in workers if worker.role in (TRAINING, *rank_roles(session.config))]
    asked = 0
    if isinstance(error, RunInterruptedError):
        asked = 1
        view.say("stopping: a checkpoint is being written (Ctrl-C again to end now)")
    elif any(worker.running for worker in workers):
        view.say("the run has failed: stopping its other processes (Ctrl-C to end them now)")
    killed = stop_all(workers, patience_s, lambda: interrupts.count > asked, hung=hung)
    if not isinstance(error, RunInterruptedError):
        return error
    followers = rank_roles(session.config)  # while it loads, rank 0 ends at once, and they are lost without it
    late = [
        failure
        for worker in workers
        if worker not in killed
        and (failure := worker.failure()) is not None
        and not (worker.role in followers and isinstance(failure, RankLostError))
    ]
    if late:
        return late[0]
    if killed:
        roles = " and ".join(worker.role for worker in killed)
        return RunInterruptedError(f"ended at once: {roles} had no time to finish; {interruption(session)}")
    return interruption(session)


def _not_ready(stage: str, status: StageStatus | None) -> str | None:
    """The stage with its status text if it is not ready yet; otherwise None."""
    if status is None:
        return stage
    return f"{stage} ({status.detail})" if status.state == "starting" else None

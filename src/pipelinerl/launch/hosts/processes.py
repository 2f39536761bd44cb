"""Runs generation (one or more processes), training and what they need in separate processes, and watches them.

    launcher ──starts──▶ generation (engine or its client, actor, environment)   ┐ rollouts: files or Redis,
             ──starts──▶ preprocessing, if it is a separate process              │ weights: shared memory or a broadcast,
             ──starts──▶ training (with `trainer.ranks`, one process a rank)     ┘ statuses: the status board
             ──starts──▶ engine servers, if the run has its own
             ◀──status board, exit codes── all

The launcher computes nothing. It shows the status board, notices at once when a process ends, asks the watchdog whether
the run makes progress, and turns Ctrl-C into a clean stop. It starts some processes again if they die (`healing`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
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
from pipelinerl.files import UNWRITABLE, JsonLines
from pipelinerl.launch.hosts.host import Host, Worker, named
from pipelinerl.launch.interrupts import Interrupts, counted_interrupts
from pipelinerl.launch.roles import TRAINING, generation_roles, rank_roles, server_roles, worker_roles, worker_stages
from pipelinerl.launch.run_lock import RunLock, errors_explained, keep_settings
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.streams import PREPARED, ROLLOUTS, StreamStore, group_reader, prepared_reader
from pipelinerl.launch.summary import Outcome, interruption
from pipelinerl.status.board import last_statuses
from pipelinerl.status.screen import View
from pipelinerl.status.watchdog import Watchdog
from pipelinerl.types import TRAINER, Group, Prepared, StageStatus, goal_reached, trainer_progress

if TYPE_CHECKING:
    from pipelinerl.launch.healing import Healing
    from pipelinerl.stream.redis_server import RedisServer

LOOK_EVERY_S = 0.1
STOP_PATIENCE_S = 120.0
"""Time for a clean stop: a decode step, an optimizer step and a checkpoint."""
CAUSE_PATIENCE_S = 1.0
"""Time for a rank of the trainer to end, after another one, or an engine, noticed that it is lost."""
SERVER_PATIENCE_S = 20.0
"""Time for an engine server to stop. It is idle by then."""


@dataclass
class Processes:
    """The processes of a session. `servers` and `broker` serve the `workers` until the workers have ended."""

    host: Host
    broker: RedisServer | None
    workers: list[Worker] = field(default_factory=list)
    servers: list[Worker] = field(default_factory=list)
    replaceable: Sequence[str] = ()  # roles
    healing: Healing | None = None

    def dead(self) -> list[Worker]:
        """The processes to start again."""
        return [worker for worker in (*self.servers, *self.workers) if worker.role in self.replaceable and worker.died]

    def replace(self, make: Callable[[], Healing], now: float) -> PipelineRLError | None:
        """Replace dead processes. Returns why the run must end instead, if so."""
        try:
            if dead := self.dead():
                self.healing = self.healing or make()
                self.healing.heal(dead, now)
                for living in (self.servers, self.workers):
                    living[:] = [worker for worker in living if worker not in dead]
            for worker in self.healing.begin(now) if self.healing else ():
                (self.servers if worker.role.startswith("server-") else self.workers).append(worker)
        except PipelineRLError as error:
            return error
        return None

    def broker_failure(self) -> PipelineRLError | None:
        why = None if self.broker is None else self.broker.failure()
        return None if why is None else StageDiedError(why)

    def failure(self) -> PipelineRLError | None:
        """Why a process ended that should not have. What others depend on comes first: its end may end the others."""
        if failure := self.broker_failure() or self.host.failure():
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
        if isinstance(error, RankLostError) or self.broker_failure() or self.host.failure():
            return True
        return any(worker.died for worker in (*self.servers, *self.workers))


def premature_exit(worker: Worker) -> PipelineRLError:
    """The error for a worker that ended with status 0 before the run was over."""
    return StageDiedError(f"{named(worker)} ended before the run did (was it told to stop?)")


def run_processes(session: Session, view: View, host: Host, broker: RedisServer | None, lock: RunLock) -> Outcome:
    """Run the session to its end on `host`. Errors of the run are in the outcome, not raised. `broker` runs already."""
    begin_s = time.monotonic()
    processes = Processes(host, broker)
    beginning = (0, 0, 0)
    error: PipelineRLError | None = None
    lost = False

    def healing() -> Healing:
        from pipelinerl.launch.healing import Healing  # noqa: PLC0415 - few runs need it

        return Healing(session, host, view, beginning)

    statuses: dict[str, StageStatus] = {}
    with ExitStack() as stack:
        interrupts = stack.enter_context(counted_interrupts())
        try:
            stack.enter_context(host)
            if roles := replaceable_roles(session.config):
                processes.replaceable, beginning = roles, beginning_of(session)
            for role in server_roles(session.config):
                processes.servers.append(host.start(role))
            for role in worker_roles(session.config):
                processes.workers.append(host.start(role))
            error = _watch(session, lock, processes, healing, view=view, interrupts=interrupts)
            lost = processes.lost(error)
        except PipelineRLError as raised:
            error, lost = raised, processes.lost(raised)
        finally:
            error = _stop(session, processes.workers, view, interrupts, error)
            asked = interrupts.count
            stop_all(processes.servers, SERVER_PATIENCE_S, lambda: interrupts.count > asked)
            statuses = last_statuses(host.board)
    view.update(statuses, time.monotonic())
    in_streams: dict[int, int] = {}
    try:
        if broker is None or broker.failure() is None:
            in_streams = rollouts_in_streams(session.streams(), session.config)
    except PipelineRLError as raised:
        error = error or raised
    started = [*processes.servers, *processes.workers]
    return Outcome(
        statuses=statuses,
        error=error,
        wall_s=time.monotonic() - begin_s,
        stream_rollouts=session.plan.rollouts_left(in_streams),
        peak_memory_bytes={worker.role: peak for worker in started if (peak := worker.peak_memory_bytes()) is not None},
        restarts=processes.healing.summary() if processes.healing else {},
        lost=lost and not isinstance(error, RunInterruptedError),
    )


def beginning_of(session: Session) -> tuple[int, int, int]:
    """Where the session begins, for `healing.Beginning`."""
    store, path = session.streams(), session.run.rollouts_of(0, shared=False)
    with errors_explained(), closing(JsonLines(path)):  # removes a partial last line
        recorded = path.stat().st_size
    with closing(store.writer(ROLLOUTS, Group, capacity=None, when_full="block", on_drop=None)) as writer:
        first = writer.stats()
    if session.config.launch.preprocessor == "with_trainer":
        return recorded, first.written, 0
    with closing(store.writer(PREPARED, Prepared, capacity=None, when_full="block", on_drop=None)) as second:
        return recorded, first.written, second.stats().written - first.taken


def replaceable_roles(config: RunConfig) -> list[str]:
    """The processes that are started again if they die. A member of a broadcast can't be: its group is formed once."""
    if not config.launch.restarts:
        return []
    engines = [*server_roles(config), *generation_roles(config)]
    lost = {TRAINING, *rank_roles(config), *(engines if config.weights.kind == "collective" else ())}
    return [role for role in (*server_roles(config), *worker_roles(config)) if role not in lost]


def _watch(
    session: Session,
    lock: RunLock,
    processes: Processes,
    healing: Callable[[], Healing],
    *,
    view: View,
    interrupts: Interrupts,
) -> PipelineRLError | None:
    """Watch processes, statuses and interrupts until the run is over. Returns why it ended; None if it reached its goal."""
    config = session.config
    watchdog = Watchdog(config.launch.watchdog_s)
    stages = worker_stages(config)
    loaded = False
    workers = processes.workers
    followers = rank_roles(config)  # they end with rank 0
    begin_s = time.monotonic()
    while True:
        lock.require_directory()
        ended = [worker for worker in workers if not worker.running and worker not in processes.dead()]
        if failure := processes.replace(healing, time.monotonic()) or processes.failure():
            if followers:
                time.sleep(CAUSE_PATIENCE_S)
                failure = processes.silent_ranks([TRAINING, *followers]) or processes.failure() or failure
            return processes.broker_failure() or processes.host.cause(failure)
        now = time.monotonic()
        found = last_statuses(processes.host.board)
        started = {("", os.getpid()), *((worker.machine, worker.pid) for worker in workers)}
        statuses = {stage: status for stage, status in found.items() if (status.machine, status.pid) in started}
        view.update(statuses, now)
        if not loaded and not any(_not_ready(stage, statuses.get(stage)) for stage in stages):
            loaded = True
            with errors_explained():
                keep_settings(config, session.run)
        early = [worker for worker in ended if worker.role not in followers]
        if early and not goal_reached(statuses.get(TRAINER)):
            return premature_exit(early[0])
        absent: Sequence[str] = ()
        if processes.healing is not None:
            processes.healing.observe(statuses, now)
            begin_s, absent = max(begin_s, processes.healing.changed_s), processes.healing.absent_servers
        if len(ended) == len(workers) and not (processes.healing and processes.healing.pending):
            return None
        if interrupts.count:
            return RunInterruptedError("stopping")
        # A stage without a status is still starting, as is an absent server, and the others may wait for it.
        stall = watchdog.observe(statuses, now) if statuses.keys() >= set(stages) and not absent else None
        if stall is not None:
            processes.healing = processes.healing or (healing() if processes.replaceable else None)
            if not (processes.healing and processes.healing.kill(stall.suspects, workers, processes.replaceable)):
                return StalledError(stall.message)
            watchdog = Watchdog(config.launch.watchdog_s)  # those that waited for them have time to go on
        late = [*absent, *(text for stage in stages if (text := _not_ready(stage, statuses.get(stage))))]
        if late and now - begin_s > config.launch.startup_timeout_s:
            return StalledError(f"{' and '.join(late)} not ready after {now - begin_s:.0f} s (launch.startup_timeout_s)")
        time.sleep(LOOK_EVERY_S)


def _stop(
    session: Session, workers: Sequence[Worker], view: View, interrupts: Interrupts, error: PipelineRLError | None
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


def rollouts_in_streams(store: StreamStore, config: RunConfig) -> dict[int, int]:
    """Index -> number of rollouts of each group still in a stream, after all processes have ended.

    A group that the preprocessor did not commit counts as waiting, unless it is also in the prepared stream. Known
    overcount: if the preprocessor was killed after writing a group and before committing it, and the trainer has committed
    that group since, it is still counted here. A resume excludes it by the trainer's ledger.
    """
    if config.launch.preprocessor == "with_trainer":
        return {group.index: len(group.rollouts) for group in store.waiting(ROLLOUTS, Group)}
    waiting = {prepared.index: len(prepared.ids) for prepared in store.waiting(PREPARED, Prepared)}
    with closing(prepared_reader(store)) as second, closing(group_reader(store)) as first:
        passed_on = {prepared.index for _, prepared in second.read(sys.maxsize)}
        left = {group.index: len(group.rollouts) for _, group in first.read(sys.maxsize) if group.index not in passed_on}
    return waiting | left

"""Runs generation (one or more processes), training and what they need in separate processes, and watches them.

    launcher ──starts──▶ generation (engine or its client, actor, environment)   ┐ rollouts: files or Redis,
             ──starts──▶ preprocessing, if it is a separate process              │ weights: shared memory or a broadcast,
             ──starts──▶ training (with `trainer.ranks`, one process a rank)     ┘ statuses: the status board
             ──starts──▶ engine servers, if the run has its own
             ◀──status board, exit codes── all

The launcher computes nothing. It shows the status board, notices at once when a process ends, asks the watchdog whether
the run makes progress, and turns Ctrl-C into a clean stop. It starts some processes again if they die (`Healing`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec

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
from pipelinerl.files import UNWRITABLE, write_atomically
from pipelinerl.hub.admission import ProcessTotals
from pipelinerl.launch.hosts.host import Attempts, Host, Outcome, Worker, interruption, named
from pipelinerl.launch.run_lock import keep_settings
from pipelinerl.launch.session import Session
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.statistics import engine_total
from pipelinerl.process import Interrupts, counted_interrupts
from pipelinerl.process.child import stop_all
from pipelinerl.resources.roles import TRAINING, generation_roles, rank_roles, server_roles, stages_of, worker_roles
from pipelinerl.status.board import last_statuses, starting, write_statuses
from pipelinerl.status.view import RunView
from pipelinerl.status.watchdog import Watchdog
from pipelinerl.types import (
    LOST,
    STREAM_DROP,
    TRAINER,
    ActorProgress,
    EngineProgress,
    StageStatus,
    TrainerProgress,
    goal_reached,
    trainer_progress,
)

LOOK_EVERY_S = 0.1
STOP_PATIENCE_S = 120.0
"""Time for a clean stop: a decode step, an optimizer step and a checkpoint."""
CAUSE_PATIENCE_S = 1.0
"""Time for a rank of the trainer to end, after another one, or an engine, noticed that it is lost."""
SERVER_PATIENCE_S = 20.0
"""Time for an engine server to stop. It is idle by then."""
WORKED_S = 600.0
"""A process that has worked for so long after a restart has recovered: its restarts count from zero again."""
PAUSES_KEPT = 256
"""Pauses for weight updates, of all ended processes of a role, that are published."""
ENDED = "ended-"
"""How the names of the stages begin that have the totals of processes that died."""


class Healing:
    """The restarts of a session's processes, while the others continue.

        death ─▶ what is left of it is killed ─▶ its work is counted ─▶ a pause ─▶ it is started again

    A process that is killed can't write any more, so nothing of it arrives after its replacement has started. What it had
    begun is returned before that, by the hub:

    generation     The groups that it had in progress are counted as lost and start again under their index, in any
                   generation process. The trainer does not wait for the engine until the new process asks for weights; it
                   gets the newest.
    preprocessing  The groups that it had read and not passed on are read again.

    Any other process, like the trainer, takes its session with it. Another session follows from the latest checkpoint
    (`run.Losses`). The caller removes dead processes from its own list, and adds what `begin` starts. `attempts` is by role,
    `changed_s` the time of the latest death or restart.
    """

    def __init__(self, session: Session, host: Host, view: RunView) -> None:
        self._session, self._host, self._view = session, host, view
        self.attempts: dict[str, Attempts] = {}
        self.changed_s = 0.0

    def heal(self, dead: Sequence[Worker], now: float) -> None:
        """Count the work of processes that died, and plan their restarts. Raises CrashLoopError if they died too often."""
        self.changed_s = now
        looping = []
        for worker in dead:
            attempts = self.attempts.setdefault(worker.role, Attempts(self._session.config.launch.restarts))
            worked = now - attempts.began_s >= WORKED_S
            following = attempts.after(str(worker.failure()), "it is started again", worked=worked)
            attempts.due_s = now + attempts.pause_s
            self._host.reap(worker)
            self._count(worker)
            if following is None:
                times = f"{len(attempts.reports)} times (launch.restarts: {attempts.allowed})"
                looping.append(attempts.all(f"the {worker.role} process died {times}:"))
            else:
                self._view.say(following)
        if looping:
            raise CrashLoopError("\n".join(looping))

    def begin(self, now: float) -> Iterator[Worker]:
        """Start the processes that are due, one at a time. Raises StageDiedError if one can't be started.

        A new process learns which evaluations have taken place, and which weights the run has come to.
        """
        run, plan = self._session.run, self._session.plan
        for role, attempts in self.attempts.items():
            if attempts.due_s is not None and now >= attempts.due_s and self._host.ready():
                trainer = trainer_progress(self._host.board.read(TRAINER)) or TrainerProgress()
                evaluated = [record.version for record in read_records(run.evaluations, EvaluationRecord)]
                version, latest = max(plan.version, trainer.published_version), max(evaluated, default=plan.evaluated)
                known = msgspec.structs.replace(plan, version=version, evaluated=latest)
                try:
                    write_atomically(run.plan, msgspec.json.encode(known), mode=0o600)
                    yield self._host.start(role)
                except OSError as error:  # a full disk, or no memory for a process
                    raise StageDiedError(f"{attempts.reports[-1]}\nit can't be started again: {error}") from error
                attempts.due_s, attempts.restarts = None, attempts.restarts + 1
                attempts.began_s = self.changed_s = now

    def _count(self, worker: Worker) -> None:
        """Publish the totals of all processes of this role that died: the actors' by the hub, the engines' as published."""
        config, board = self._session.config, self._host.board
        stages = stages_of(config, worker.role)
        if worker.role in (roles := generation_roles(config)):
            part = self._host.hub.admission.parts.get(roles.index(worker.role), ProcessTotals())
            actor = ActorProgress(
                groups_started=part.groups + part.lost // config.actor.group_size,
                rollouts_started=part.attempts + part.lost,
                rollouts_handed_over=part.rollouts - part.replaced,
                rollouts_dropped=+Counter({**part.dropped, LOST: part.lost, STREAM_DROP: part.replaced}),
            )
            mine = {ENDED + stages[0]: os.getpid(), stages[0]: worker.pid}  # what the new one publishes is not of the dead
            known = {stage: status for stage, pid in mine.items() if (status := board.read(stage)) and status.pid == pid}
            engine = engine_total(known) or EngineProgress()
            now, pauses_s = time.monotonic(), engine.pauses_s[-PAUSES_KEPT:]
            engine = msgspec.structs.replace(engine, slots=0, in_progress=0, queued=0, probes=(), pauses_s=pauses_s)
            status = StageStatus(stage="", pid=os.getpid(), state="done", detail="", since_s=now, written_s=now)
            for stage, progress in zip(stages, (engine, actor), strict=True):
                board.publish(msgspec.structs.replace(status, stage=ENDED + stage, progress=progress))
        starting(board, stages, "has died and is started again")


class Processes:
    """The processes of a session: its workers, and engine servers, which serve the workers until these have ended.

    started       processes that run, or have ended and were not replaced
    replaceable   the roles whose processes are started again if they die
    healing       what does that
    loaded_cpu_s  the launcher's CPU seconds when all stages had loaded
    """

    def __init__(self, session: Session, host: Host, view: RunView) -> None:
        self._session, self.host, self._view = session, host, view
        self.started: list[Worker] = []
        self.replaceable = replaceable_roles(session.config)
        self.healing = Healing(session, host, view)
        self._stages = [stage for role in worker_roles(session.config) for stage in stages_of(session.config, role)]
        self._loaded = False
        self.loaded_cpu_s = time.process_time()

    @property
    def workers(self) -> list[Worker]:
        return [one for one in self.started if not one.role.startswith("server-")]

    @property
    def servers(self) -> list[Worker]:
        return [one for one in self.started if one.role.startswith("server-")]

    @property
    def ranks(self) -> list[Worker]:
        return [one for one in self.started if one.role.startswith(TRAINING)]

    def failure(self) -> PipelineRLError | None:
        """Why a process ended that should not have. What others depend on comes first: its end may end the others."""
        if failure := self.host.failure():
            return failure
        if ended := [server for server in self.servers if not server.running]:
            return ended[0].failure() or premature_exit(ended[0])
        failures = {
            worker.role: failure
            for worker in self.workers
            if (failure := worker.failure()) is not None and not (worker.role in self.replaceable and worker.died)
        }
        if isinstance(failures.get(TRAINING), RankLostError):  # it ended because of another rank, and may have ended engines
            failures = {role: failure for role, failure in failures.items() if role.startswith(TRAINING)}
        # The loss of a rank, or of a member of a broadcast, is noticed by the others: what the lost one died of comes first.
        noticed = (RankLostError, WeightUpdateError)
        return min(failures.values(), key=lambda failure: isinstance(failure, noticed), default=None)

    def cause(self, failure: PipelineRLError) -> PipelineRLError:
        """What caused a failure, which may be known only a little later; or the failure itself."""
        if len(self.ranks) > 1:
            time.sleep(CAUSE_PATIENCE_S)
            silent = [rank for rank in self.ranks if rank.running]
            ended = [rank.failure() for rank in self.ranks if not rank.running]
            if silent and ended and all(isinstance(one, RankLostError) for one in ended):  # for want of the silent ones
                names = " and ".join(map(named, silent))
                failure = RankLostError(f"{names} no longer answers the other ranks of the trainer: it is stopped, or hangs")
            else:
                failure = self.failure() or failure
        return self.host.cause(failure)

    def lost(self, error: PipelineRLError | None) -> bool:
        """Whether the error is the loss of a process or a machine. Other errors would only happen again."""
        if isinstance(error, BroadcastEndedError):
            return True
        if isinstance(error, CrashLoopError) or not isinstance(error, (StageDiedError, StalledError, StreamError)):
            return False
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in UNWRITABLE:
            return False
        if isinstance(error, StalledError):
            trainer = trainer_progress(last_statuses(self.host.board).get(TRAINER))
            return trainer is not None and trainer.busy_s > 0  # it worked before
        return isinstance(error, RankLostError) or bool(self.host.failure()) or any(one.died for one in self.started)

    def watch(self, interrupts: Interrupts) -> PipelineRLError | None:
        """Watch processes, statuses and interrupts until the run is over. Returns why that is; None: it reached its goal."""
        launch, begin_s = self._session.config.launch, time.monotonic()
        watchdog = Watchdog(launch.watchdog_s)
        followers = rank_roles(self._session.config)  # which end with rank 0
        while True:
            try:
                ended = self._replace(time.monotonic())
                failure = self.failure()
            except PipelineRLError as error:
                failure = error
            if failure is not None:
                return self.cause(failure)
            self.host.settle(ended)
            now = time.monotonic()
            statuses, late = self._look(now)
            early = [worker for worker in ended if worker.role not in followers]
            if early and not goal_reached(statuses.get(TRAINER)):
                return premature_exit(early[0])
            waiting = any(attempts.due_s is not None for attempts in self.healing.attempts.values())  # for its restart
            if len(ended) == len(self.workers) and not waiting:
                return None
            if interrupts.count:
                return RunInterruptedError("stopping")
            if not set(self._stages) - statuses.keys():  # one without a status still starts, and others may wait for it
                stall = watchdog.observe(statuses, now)
                if stall is not None:
                    return StalledError(stall)
            waited_s = now - max(begin_s, self.healing.changed_s)
            if late and waited_s > launch.startup_timeout_s:
                return StalledError(f"{' and '.join(late)} not ready after {waited_s:.0f} s (launch.startup_timeout_s)")
            time.sleep(LOOK_EVERY_S)

    def _replace(self, now: float) -> list[Worker]:
        """Replace dead processes. Returns the other workers that have ended. Raises PipelineRLError if the run must end."""
        ended = [worker for worker in self.workers if not worker.running]
        if dead := [one for one in self.started if one.role in self.replaceable and one.died]:
            self.healing.heal(dead, now)
            self.started = [one for one in self.started if one not in dead]
        self.started += self.healing.begin(now)
        return [worker for worker in ended if worker not in dead]

    def _look(self, now: float) -> tuple[dict[str, StageStatus], list[str]]:
        """The statuses of the processes that run now, which it shows, and the stages that have not loaded yet."""
        started = {("", os.getpid()), *((worker.machine, worker.pid) for worker in self.workers)}
        found = last_statuses(self.host.board)
        statuses = {stage: status for stage, status in found.items() if (status.machine, status.pid) in started}
        self._view.update(statuses, now)
        write_statuses(self._session.run.statuses, statuses)
        late = []
        for stage in self._stages:
            status = statuses.get(stage)
            if status is None or status.state == "starting":
                late.append(f"{stage} ({status.detail})" if status else stage)
        if not late and not self._loaded:
            self._loaded, self.loaded_cpu_s = True, time.process_time()
            keep_settings(self._session.config, self._session.run)
        return statuses, late

    def stop(self, interrupts: Interrupts, error: PipelineRLError | None) -> PipelineRLError | None:
        """Stop the workers, with time to write a checkpoint. Returns the error that the run ended with, if any."""
        config, workers, patience_s, asked = self._session.config, self.workers, STOP_PATIENCE_S, 0
        hung: list[Worker] = []
        if isinstance(error, StalledError):
            for worker in workers:
                worker.send_signal(signal.SIGUSR1)  # it writes the stacks of its threads to its log: see `worker.run_role`
            logs = ", ".join(str(worker.log) for worker in workers)
            error = StalledError(f"{error}\nstacks of all threads are in {logs}")
            patience_s = min(patience_s, config.launch.watchdog_s)  # a hung process will not stop cleanly either
            hung = [worker for worker in workers if worker.role in generation_roles(config)]
        if isinstance(error, RankLostError):  # one is stopped, perhaps, and without it the others can't save anything
            hung = self.ranks
        if isinstance(error, RunInterruptedError):
            asked = 1
            self._view.say("stopping: a checkpoint is being written (Ctrl-C again to end now)")
        elif any(worker.running for worker in workers):
            self._view.say("the run has failed: stopping its other processes (Ctrl-C to end them now)")
        killed = stop_all(workers, patience_s, lambda: interrupts.count > asked, hung=hung)
        if not isinstance(error, RunInterruptedError):
            return error
        failures = {worker.role: failure for worker in workers if worker not in killed and (failure := worker.failure())}
        for role in rank_roles(config):  # while it loads, rank 0 ends at once, and they are lost without it
            if isinstance(failures.get(role), RankLostError):
                del failures[role]
        if failures:
            return next(iter(failures.values()))
        error = interruption(self._session)
        if killed:
            roles = " and ".join(worker.role for worker in killed)
            return RunInterruptedError(f"ended at once: {roles} had no time to finish; {error}")
        return error


def premature_exit(worker: Worker) -> PipelineRLError:
    """The error for a worker that ended with status 0 before the run was over."""
    return StageDiedError(f"{named(worker)} ended before the run did (was it asked to stop?)")


def replaceable_roles(config: RunConfig) -> list[str]:
    """The processes that are started again if they die: of one machine, those with nothing that others can't do without.

    An engine that is a member of a broadcast is not one: its group is formed once.
    """
    if not config.launch.restarts or config.launch.kind == "ray":
        return []
    lost = {TRAINING, *rank_roles(config), *(generation_roles(config) if config.weights.kind == "collective" else ())}
    return [role for role in worker_roles(config) if role not in lost]


def run_processes(session: Session, view: RunView, host: Host) -> Outcome:
    """Run the session to its end on `host`. Errors of the run are in the outcome, not raised."""
    begin_s, error = time.monotonic(), None
    processes = Processes(session, host, view)
    for line in host.placement:
        view.say(line)
    with counted_interrupts() as interrupts, ExitStack() as stack:
        try:
            stack.enter_context(host)
            while not host.ready():
                if interrupts.count:
                    raise RunInterruptedError("stopping")
                if (waited_s := time.monotonic() - begin_s) > session.config.launch.startup_timeout_s:
                    raise StalledError(f"imports were not done after {waited_s:.0f} s (launch.startup_timeout_s)")
                time.sleep(LOOK_EVERY_S)
            for role in (*server_roles(session.config), *worker_roles(session.config)):
                processes.started.append(host.start(role))
            error = processes.watch(interrupts)
        except PipelineRLError as raised:
            error = raised
        finally:
            lost = processes.lost(error)
            error = processes.stop(interrupts, error)
            asked = interrupts.count
            stop_all(processes.servers, SERVER_PATIENCE_S, lambda: interrupts.count > asked)
            host.settle(processes.workers)
            statuses, waiting = last_statuses(host.board), host.hub.waiting
    view.update(statuses, time.monotonic())
    return Outcome(
        statuses=statuses,
        error=error,
        wall_s=time.monotonic() - begin_s,
        stream_rollouts=waiting,
        peak_memory={one.role: report.peak for one in processes.started if (report := one.report()) and report.peak},
        restarts={role: attempts.restarts for role, attempts in processes.healing.attempts.items()},
        lost=lost and not isinstance(error, RunInterruptedError),
        launcher_cpu_s=time.process_time() - processes.loaded_cpu_s,
    )

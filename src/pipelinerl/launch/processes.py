"""Generation (one or more processes) and training in processes of their own, watched by this one.

    launcher ──starts──▶ generation (engine, actor, environment)   ┐ rollouts: files, weights: shared memory,
             ──starts──▶ training (preprocessor, trainer)          ┘ statuses: the board
             ◀──board, exit codes── all

The launcher computes nothing: it shows what the board says, notices at once when a process ends, asks the watchdog
whether anything moves, and turns Ctrl-C into a clean stop.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence

from pipelinerl.board import MmapBoard
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunInterruptedError, StalledError
from pipelinerl.launch.interrupts import Interrupts, counted_interrupts
from pipelinerl.launch.outcome import Outcome, interruption, last_statuses
from pipelinerl.launch.resources import plan_threads, thread_environment, usable_cores
from pipelinerl.launch.roles import TRAINING, generation_roles
from pipelinerl.launch.run_directory import RunLock
from pipelinerl.launch.session import Session
from pipelinerl.launch.supervisor import Worker, stop_all, worker_files
from pipelinerl.metrics.view import View
from pipelinerl.metrics.watchdog import Watchdog
from pipelinerl.status import generation_stages
from pipelinerl.stream.waiting import waiting_items
from pipelinerl.types import Group, StageStatus, TrainerProgress
from pipelinerl.weights.shared_file import create_shared_file

LOOK_EVERY_S = 0.1
STOP_PATIENCE_S = 120.0
"""Time for a clean stop: a decode step, an optimizer step and a checkpoint."""


def run_processes(session: Session, view: View, lock: RunLock) -> Outcome:
    """Run to the end, whatever it is. Errors of the run are in the outcome, not raised.

    The workers inherit `lock`: should this process be killed, nobody takes the run directory before they have ended.
    """
    begin_s = time.monotonic()
    board = MmapBoard(session.run.control)
    weights_fd = create_shared_file()
    lifeline_fd, held_fd = os.pipe()
    workers: list[Worker] = []
    error: PipelineRLError | None = None
    with counted_interrupts() as interrupts:
        try:
            _start(session, workers, weights_fd, lifeline_fd, lock)
            error = _watch(session.config, board, workers, view=view, interrupts=interrupts, begin_s=begin_s)
        finally:
            error = _stop(session, workers, view, interrupts, error)
            for fd in (weights_fd, lifeline_fd, held_fd):
                os.close(fd)
    statuses = last_statuses(board)
    view.update(statuses, time.monotonic())
    return Outcome(
        statuses=statuses,
        error=error,
        wall_s=time.monotonic() - begin_s,
        stream_rollouts=session.plan.rollouts_left(waiting_items(session.run.stream, Group)),
        peak_memory_bytes={worker.role: peak for worker in workers if (peak := worker.peak_memory_bytes()) is not None},
    )


def _start(session: Session, workers: list[Worker], weights_fd: int, lifeline_fd: int, lock: RunLock) -> None:
    threads = plan_threads(session.config, session.schedule, usable_cores())
    counts = dict.fromkeys(generation_roles(session.config), threads.generation) | {TRAINING: threads.training}
    for role, count in counts.items():
        arguments = [str(session.run.root), str(weights_fd), str(lifeline_fd), str(session.records_from_s)]
        fds = [weights_fd, lifeline_fd, lock.fd]
        workers.append(Worker(role, arguments, thread_environment(count), fds, worker_files(session.run, role)))


def _watch(
    config: RunConfig,
    board: MmapBoard,
    workers: Sequence[Worker],
    *,
    view: View,
    interrupts: Interrupts,
    begin_s: float,
) -> PipelineRLError | None:
    """Look at everything again and again until the run is over; why it is, if not because it reached its goal."""
    watchdog = Watchdog(config.launch.watchdog_s)
    stages = [*itertools.chain.from_iterable(generation_stages(config.engine.processes)), "trainer"]
    pids = {worker.pid for worker in workers}
    while True:
        ended = [worker for worker in workers if not worker.running]
        failures = [failure for worker in ended if (failure := worker.failure()) is not None]
        if failures:
            return failures[0]
        now = time.monotonic()
        statuses = {stage: status for stage, status in last_statuses(board).items() if status.pid in pids}
        view.update(statuses, now)
        if ended and not _goal_reached(statuses):
            return ended[0].desertion()
        if len(ended) == len(workers):
            return None
        if interrupts.count:
            return RunInterruptedError("stopping")
        stall = watchdog.observe(statuses, now)
        if stall is not None:
            return StalledError(stall.message)
        late = [stage for stage in stages if _not_ready(statuses.get(stage))]
        if late and now - begin_s > config.launch.startup_timeout_s:
            return StalledError(f"{' and '.join(late)} not ready after {now - begin_s:.0f} s (launch.startup_timeout_s)")
        time.sleep(LOOK_EVERY_S)


def _stop(
    session: Session, workers: Sequence[Worker], view: View, interrupts: Interrupts, error: PipelineRLError | None
) -> PipelineRLError | None:
    """End what still runs, giving it time to write a checkpoint, and say how the run ended, all things considered."""
    patience_s = STOP_PATIENCE_S
    if isinstance(error, StalledError):
        for worker in workers:
            worker.dump_stacks()
        logs = ", ".join(str(worker.files.log) for worker in workers)
        error = StalledError(f"{error}\nstacks of all threads are in {logs}")
        patience_s = min(patience_s, session.config.launch.watchdog_s)  # what hangs won't stop either
    asked = 0
    if isinstance(error, RunInterruptedError):
        asked = 1
        view.say("stopping: a checkpoint is being written (Ctrl-C again to end now)")
    elif any(worker.running for worker in workers):
        view.say("the run has failed: its other processes are told to end (Ctrl-C to end them now)")
    killed = stop_all(workers, patience_s, lambda: interrupts.count > asked)
    if not isinstance(error, RunInterruptedError):
        return error
    late = [failure for worker in workers if worker not in killed and (failure := worker.failure()) is not None]
    if late:
        return late[0]
    if killed:
        roles = " and ".join(worker.role for worker in killed)
        return RunInterruptedError(f"ended at once: {roles} had no time to finish; {interruption(session)}")
    return interruption(session)


def _goal_reached(statuses: Mapping[str, StageStatus]) -> bool:
    status = statuses.get("trainer")
    return status is not None and isinstance(status.progress, TrainerProgress) and status.progress.goal_reached


def _not_ready(status: StageStatus | None) -> bool:
    return status is None or status.state == "starting"

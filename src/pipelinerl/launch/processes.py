"""Generation and training in a process each, watched by this one.

    launcher ──starts──▶ generation (engine, actor, environment)   ┐ rollouts: files, weights: shared memory,
             ──starts──▶ training (preprocessor, trainer)          ┘ statuses: the board
             ◀──board, exit codes── both

The launcher computes nothing: it shows what the board says, notices at once when a process ends, asks the watchdog
whether anything moves, and turns Ctrl-C into a clean stop.
"""

from __future__ import annotations

import os
import time

from pipelinerl.board import MmapBoard
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunInterruptedError, StalledError
from pipelinerl.interfaces import Schedule
from pipelinerl.launch.interrupts import Interrupts, counted_interrupts
from pipelinerl.launch.outcome import Outcome, last_statuses
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.supervisor import Worker, stop_all, worker_files
from pipelinerl.launch.threads import plan_threads, thread_environment, usable_cores
from pipelinerl.metrics.view import View
from pipelinerl.metrics.watchdog import Watchdog
from pipelinerl.stream.waiting import waiting_items
from pipelinerl.types import Group, StageStatus
from pipelinerl.weights.shared_file import create_shared_file

LOOK_EVERY_S = 0.1
STOP_PATIENCE_S = 120.0
"""Time for a clean stop: a decode step, an optimizer step and a checkpoint."""


def run_processes(config: RunConfig, run: RunDirectory, schedule: Schedule, *, view: View, started_s: float) -> Outcome:
    """Run to the end, whatever it is. Errors of the run are in the outcome, not raised."""
    board = MmapBoard(run.control)
    threads = plan_threads(config, schedule, usable_cores())
    weights = create_shared_file()
    lifeline, held_end = os.pipe()
    workers = []
    with counted_interrupts() as interrupts:
        try:
            for role, count in (("generation", threads.generation), ("training", threads.training)):
                arguments = [str(run.root), str(weights), str(lifeline), str(started_s)]
                environment = thread_environment(count)
                workers.append(Worker(role, arguments, environment, [weights, lifeline], worker_files(run, role)))
            error = _watch(config, board, workers, view=view, interrupts=interrupts, started_s=started_s)
        finally:
            stop_all(workers, STOP_PATIENCE_S, lambda: interrupts.hurried)
            for fd in (weights, lifeline, held_end):
                os.close(fd)
    statuses = last_statuses(board)
    view.update(statuses, time.monotonic())
    return Outcome(
        statuses=statuses,
        error=error,
        wall_s=time.monotonic() - started_s,
        stream_rollouts=sum(len(group.rollouts) for group in waiting_items(run.stream, Group)),
        peak_memory_bytes={worker.role: peak for worker in workers if (peak := worker.peak_memory_bytes()) is not None},
    )


def _watch(
    config: RunConfig, board: MmapBoard, workers: list[Worker], *, view: View, interrupts: Interrupts, started_s: float
) -> PipelineRLError | None:
    """Look at everything again and again until the run is over; why it is, if not because it reached its goal."""
    watchdog = Watchdog(config.launch.watchdog_s)
    pids = {worker.pid for worker in workers}
    while True:
        for worker in workers:
            failure = worker.failure()
            if failure is not None:
                return failure
        if not any(worker.running for worker in workers):
            return None
        if interrupts.count:
            view.say("stopping: a checkpoint is being written (Ctrl-C again to end now)")
            return RunInterruptedError("stopped")
        now = time.monotonic()
        statuses = {stage: status for stage, status in last_statuses(board).items() if status.pid in pids}
        view.update(statuses, now)
        stall = _stall(config, watchdog, statuses, now, started_s)
        if stall is not None:
            for worker in workers:
                worker.dump_stacks()
            logs = ", ".join(str(worker.files.log) for worker in workers)
            return StalledError(f"{stall}\nstacks of all threads are in {logs}")
        time.sleep(LOOK_EVERY_S)


def _stall(
    config: RunConfig, watchdog: Watchdog, statuses: dict[str, StageStatus], now: float, started_s: float
) -> str | None:
    stall = watchdog.observe(statuses, now)
    if stall is not None:
        return stall.message
    late = [stage for stage in ("engine", "actor", "trainer") if _not_ready(statuses.get(stage))]
    if late and now - started_s > config.launch.startup_timeout_s:
        return f"{' and '.join(late)} not ready after {now - started_s:.0f} s (launch.startup_timeout_s)"
    return None


def _not_ready(status: StageStatus | None) -> bool:
    return status is None or status.state == "starting"

"""The whole run in one process and one thread of control: deterministic, for debugging, teaching and tests.

The same objects as with processes, over a stream, a board and a weight channel in memory. After each of the actor's
iterations (one engine step) the trainer gets a turn; so a step never overlaps with generation, and the order of
everything is a function of the run file.
"""

from __future__ import annotations

import asyncio
import faulthandler
import resource
import sys
import time
from typing import Any

from pipelinerl.board import MemoryBoard
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunInterruptedError, StalledError
from pipelinerl.interfaces import Schedule, StreamReader, StreamWriter
from pipelinerl.launch.capacity import stream_capacity
from pipelinerl.launch.interrupts import Interrupts, counted_interrupts
from pipelinerl.launch.outcome import Outcome, last_statuses
from pipelinerl.launch.plan import StartPlan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.threads import plan_threads, usable_cores
from pipelinerl.metrics.view import View
from pipelinerl.metrics.watchdog import Watchdog
from pipelinerl.stream import FileStreamReader, FileStreamWriter, memory_stream
from pipelinerl.trainer import Trainer
from pipelinerl.types import Group

LOOK_EVERY_S = 0.5


def run_embedded(
    config: RunConfig, run: RunDirectory, schedule: Schedule, *, plan: StartPlan, view: View, started_s: float
) -> Outcome:
    """Run to the end, whatever it is. Errors of the run are in the outcome, not raised."""
    import torch  # noqa: PLC0415 - only this launcher computes in the launching process

    from pipelinerl.launch.generation import build_generation, generate  # noqa: PLC0415
    from pipelinerl.launch.training import build_trainer  # noqa: PLC0415
    from pipelinerl.weights.memory import MemoryChannel  # noqa: PLC0415

    torch.set_num_threads(plan_threads(config, schedule, usable_cores()).training)
    board, channel = MemoryBoard(), MemoryChannel()
    writer, reader = _stream(config, run)
    error: PipelineRLError | None = None
    with counted_interrupts() as interrupts:
        try:
            trainer = build_trainer(
                config,
                run,
                board=board,
                schedule=schedule,
                plan=plan,
                reader=reader,
                sender=channel.sender,
                started_s=started_s,
            )
            side = build_generation(
                config,
                run,
                board=board,
                schedule=schedule,
                plan=plan,
                writer=writer,
                receiver=channel.receiver,
                started_s=started_s,
            )
            trainer.start()
            turn = _Turn(trainer, board, view, config.launch.watchdog_s)
            asyncio.run(generate(side, stop=lambda: interrupts.count > 0, between=turn))
            error = _end(trainer, interrupts)
        except PipelineRLError as raised:
            error = raised
        finally:
            faulthandler.cancel_dump_traceback_later()
    outcome = Outcome(
        statuses=last_statuses(board),
        error=error,
        wall_s=time.monotonic() - started_s,
        stream_rollouts=sum(len(group.rollouts) for _, group in reader.read(1 << 30)),
        peak_memory_bytes={"embedded": _peak_memory_bytes()},
    )
    view.update(outcome.statuses, time.monotonic())
    writer.close()
    reader.close()
    return outcome


class _Turn:
    """What happens between two iterations of the actor: the trainer's turn and, now and then, a look at everything."""

    def __init__(self, trainer: Trainer, board: MemoryBoard, view: View, watchdog_s: float) -> None:
        self._trainer = trainer
        self._board = board
        self._view = view
        self._watchdog = Watchdog(watchdog_s)
        self._watchdog_s = watchdog_s
        self._looked_s = 0.0

    def __call__(self) -> None:
        self._trainer.pump()
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        # Whatever holds the thread for longer than this ends the process, with the stack that says where.
        faulthandler.dump_traceback_later(2 * self._watchdog_s, exit=True, file=sys.__stderr__ or 2)
        statuses = last_statuses(self._board)
        self._view.update(statuses, now)
        stall = self._watchdog.observe(statuses, now)
        if stall is not None:
            raise StalledError(stall.message)


def _end(trainer: Trainer, interrupts: Interrupts) -> PipelineRLError | None:
    if not interrupts.hurried:
        trainer.finish()
    return RunInterruptedError("stopped") if interrupts.count and not trainer.goal_reached else None


def _stream(config: RunConfig, run: RunDirectory) -> tuple[StreamWriter[Group], StreamReader[Group]]:
    options: dict[str, Any] = {"capacity": stream_capacity(config), "when_full": config.stream.when_full}
    if config.stream.kind == "memory":
        return memory_stream(**options)
    return FileStreamWriter(run.stream, Group, **options), FileStreamReader(run.stream, Group)


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""The whole run in one process and one thread of control: deterministic, for debugging, teaching and tests.

The objects are those of a run in several processes, with the stream, the status board and the weight channel in memory. The
trainer runs after each iteration of the actor (one engine step). An optimizer step therefore never overlaps with generation,
and the order of all events is a function of the run file.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import torch

from pipelinerl.environments.user.code import run_to_end
from pipelinerl.errors import PipelineRLError, StalledError
from pipelinerl.hub.hub import Direct, DirectMessages, DirectReader, Hub
from pipelinerl.launch.hosts.host import Outcome, interruption, make_hub
from pipelinerl.launch.run_lock import keep_settings
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.generation import Generation
from pipelinerl.launch.stages.preprocessing import make_preprocessor
from pipelinerl.launch.stages.training import load_policy, open_trainer
from pipelinerl.process import LOG_FORMAT, Interrupts, counted_interrupts, peak_memory
from pipelinerl.resources.machine import usable_cores
from pipelinerl.resources.roles import TRAINING, shares_of, worker_roles
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import MemoryBoard, last_statuses, starting, write_statuses
from pipelinerl.status.view import RunView
from pipelinerl.status.watchdog import Watchdog
from pipelinerl.types import TRAINER, StageStatus
from pipelinerl.weights.receiving import Receiver
from pipelinerl.weights.sending import MemoryWeightSender

LOOK_EVERY_S = 0.5


def run_embedded(session: Session, view: RunView) -> Outcome:
    """Run the session to its end. Errors of the run are in the outcome, not raised."""
    begin_s, board = time.monotonic(), _GuardedBoard(2 * session.config.launch.watchdog_s)
    shares = shares_of(session.config, session.schedule, worker_roles(session.config), usable_cores())
    error: PipelineRLError | None = None
    with (
        logging_to(session.run),
        torch_threads(shares[TRAINING].threads),
        counted_interrupts(raises_at=2) as interrupts,
        closing(make_hub(session, board)) as hub,
    ):
        try:
            if not _run(session, hub, interrupts, view=view):
                error = interruption(session)
        except PipelineRLError as raised:
            error = raised
        finally:
            faulthandler.cancel_dump_traceback_later()
        statuses, waiting, memory = last_statuses(board), hub.waiting, {"embedded": peak_memory()}
    view.update(statuses, time.monotonic())
    return Outcome(statuses, error, time.monotonic() - begin_s, stream_rollouts=waiting, peak_memory=memory)


def _run(session: Session, hub: Hub, interrupts: Interrupts, *, view: RunView) -> bool:
    """Alternate generation and training to the end. Returns whether the goal was reached.

    Every `LOOK_EVERY_S`, the view is updated, the statuses are written for other processes, and the watchdog looks at them.
    """
    watchdog, looked_s, messages = Watchdog(session.config.launch.watchdog_s), 0.0, DirectMessages()
    sender = MemoryWeightSender(messages)
    generation = Generation(session, hub.board, Direct(hub), Receiver(messages, sender.tensors))
    starting(hub.board, [TRAINER], "loads the model")
    policy = load_policy(session)
    reader = DirectReader(hub, make_preprocessor(session.config, policy.lora))
    with closing(sender), open_trainer(session, hub.board, policy, reader, sender) as trainer:

        def after_iteration() -> None:
            nonlocal looked_s
            if not looked_s:
                keep_settings(session.config, session.run)
            trainer.pump()
            now = time.monotonic()
            if now - looked_s < LOOK_EVERY_S:
                return
            looked_s = now
            statuses = last_statuses(hub.board)
            view.update(statuses, now)
            write_statuses(session.run.statuses, statuses)
            if (stall := watchdog.observe(statuses, now)) is not None:
                raise StalledError(stall)

        trainer.start()
        run_to_end(generation.run(stop=lambda: interrupts.count > 0, between=after_iteration))
        trainer.finish()
        return trainer.goal_reached


class _GuardedBoard(MemoryBoard):
    """Ends the process with a stack dump when no stage has published a status for `patience_s`.

    The watchdog runs only between two iterations. This covers code that blocks the only thread.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._patience_s = patience_s

    def publish(self, status: StageStatus) -> None:
        super().publish(status)
        if status.state != "starting":  # loading a model has no time limit
            faulthandler.dump_traceback_later(self._patience_s, exit=True, file=sys.__stderr__ or 2)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads while inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Log(logging.FileHandler):
    """`before`: level and propagation of the package's logger before the first of the runs that write logs now."""

    before: tuple[int, bool]

    def handleError(self, record: logging.LogRecord) -> None:
        """A line is lost on a full disk. The run's records say that it is full."""


@contextmanager
def logging_to(run: RunDirectory) -> Iterator[None]:
    """Write this package's log to a file while inside, as separate processes do: the terminal belongs to the view."""
    logger, handler = logging.getLogger("pipelinerl"), _Log(run.log("embedded"))
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    others = [other for other in logger.handlers if isinstance(other, _Log)]  # of runs in other threads
    handler.before = others[0].before if others else (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if not any(isinstance(other, _Log) for other in logger.handlers):
            logger.setLevel(handler.before[0])
            logger.propagate = handler.before[1]
        with suppress(OSError):
            handler.close()

"""The entry point of a run's processes.

    python -m pipelinerl.launch.hosts.worker ROLE RUN_DIR WEIGHTS_FD RECORDS_FROM_S

ROLE is one of `roles.worker_roles` or `roles.server_roles`.

A worker runs its stages until the run is over, it is told to stop, or its launcher has ended. SIGTERM ends it at once while
it loads, and asks for a clean stop afterwards. Its standard input is the parent-death pipe, by which it notices the end of
the launcher. At the end it writes a result or an error report to the run directory.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from pipelinerl.child import take_stdin, when_closed
from pipelinerl.errors import PipelineRLError
from pipelinerl.files import write_atomically
from pipelinerl.launch.hosts.resources import (
    GENERATION_NICENESS,
    LOG_FORMAT,
    generation_threads,
    peak_memory_bytes,
    plan_threads,
    trainer_goes_first,
    usable_cores,
)
from pipelinerl.launch.hosts.roles import PREPROCESSING, TRAINING, generation_roles, server_roles
from pipelinerl.launch.hosts.supervisor import ErrorReport, WorkerResult
from pipelinerl.launch.outcome import goal_reached
from pipelinerl.launch.run_directory import ORPHAN_PATIENCE_S, RunDirectory
from pipelinerl.launch.session import Session, read_session
from pipelinerl.launch.stages.generation import DropRelay
from pipelinerl.launch.stages.streams import group_reader, group_writer, prepared_writer
from pipelinerl.launch.stages.weights import make_receiver, make_sender, sender_address
from pipelinerl.status.board import MmapBoard
from pipelinerl.status.reporter import generation_stages
from pipelinerl.types import TRAINER

YOUNG_OBJECTS = 50_000
"""Garbage collection threshold: more objects than the rollouts in progress have, but traversed in milliseconds."""


def main(arguments: list[str]) -> int:
    role, run_dir, weights_fd, records_from_s = arguments
    run = RunDirectory(Path(run_dir))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # at INFO it logs every request
    parent_pipe = take_stdin()
    when_closed(parent_pipe, lambda: os.kill(os.getpid(), signal.SIGTERM), ORPHAN_PATIENCE_S)
    try:
        session = read_session(run, float(records_from_s))
        if role == TRAINING:
            _training(session, int(weights_fd))
        elif role == PREPROCESSING:
            _preprocessing(session)
        elif role in server_roles(session.config):
            _server(session, role, parent_pipe)
        else:
            _generation(session, int(weights_fd), generation_roles(session.config).index(role))
    except PipelineRLError as error:
        _write_error_report(run.error_report(role), type(error).__name__, str(error))
        return error.exit_status
    except Exception as error:  # noqa: BLE001 - the launcher reports whatever ends this process
        message = f"the {role} process (pid {os.getpid()}) failed: {type(error).__name__}: {error} (log: {run.log(role)})"
        _write_error_report(run.error_report(role), "StageDiedError", message)
        return 1
    write_atomically(run.result(role), msgspec.json.encode(WorkerResult(peak_memory_bytes=peak_memory_bytes())))
    return 0


def _generation(session: Session, weights_fd: int, index: int) -> None:
    import torch  # noqa: PLC0415 - after the thread variables of this process are set

    from pipelinerl.launch.stages.generation import build_generation, generate  # noqa: PLC0415

    config, drops = session.config, DropRelay()
    torch.set_num_threads(generation_threads(config, session.schedule, usable_cores()))
    if config.engine.kind == "local":
        _yield_to_the_trainer(session)
    stage = generation_stages(config.engine.processes)[index].engine
    with (
        closing(group_writer(session.streams(), config, drops)) as writer,
        closing(make_receiver(session, weights_fd, index, stage)) as receiver,
    ):
        generation = build_generation(
            session,
            MmapBoard(session.run.control),
            writer,
            drops,
            receiver,
            index=index,
            sender=sender_address(session, weights_fd),
        )
        # The objects of the model and the libraries live until the end: keep the collector from traversing them every time.
        gc.collect()
        gc.freeze()
        # Reference counts free finished rollouts. With the default threshold of 700, rollouts alone would trigger 10
        # collections a second.
        gc.set_threshold(YOUNG_OBJECTS)
        asyncio.run(generate(generation, stop=_stop_on_sigterm(threading.Event())))


def _server(session: Session, role: str, parent_pipe: int) -> None:
    from pipelinerl.launch.stages.servers import become_vllm, serve_engine  # noqa: PLC0415 - as above

    _yield_to_the_trainer(session)
    if session.config.engine.kind == "vllm":
        become_vllm(session, role, parent_pipe)
    serve_engine(session, role)


def _yield_to_the_trainer(session: Session) -> None:
    if trainer_goes_first(session.config, session.schedule, usable_cores()):
        os.nice(GENERATION_NICENESS)


def _preprocessing(session: Session) -> None:
    from pipelinerl.launch.stages.preprocessing import build_preprocessor  # noqa: PLC0415 - it may need torch, as above

    board, store = MmapBoard(session.run.control), session.streams()
    with closing(group_reader(store)) as reader, closing(prepared_writer(store)) as writer:
        preprocessor = build_preprocessor(session, board, reader, writer)
        stop = _stop_on_sigterm(threading.Event())
        preprocessor.run(lambda: stop() or goal_reached(board.read(TRAINER)))


def _training(session: Session, weights_fd: int) -> None:
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.launch.stages.preprocessing import prepared_groups  # noqa: PLC0415
    from pipelinerl.launch.stages.training import build_trainer, failures_on_board, load_policy, open_logs  # noqa: PLC0415

    torch.set_num_threads(plan_threads(session.config, session.schedule, usable_cores()).training)
    stopping = threading.Event()
    board = MmapBoard(session.run.control)
    policy = load_policy(session, board)
    with (
        closing(prepared_groups(session, policy.lora)) as reader,
        closing(make_sender(session, weights_fd, stopping.is_set)) as sender,
        open_logs(session) as logs,
    ):
        trainer = build_trainer(session, board, policy, reader=reader, sender=sender, logs=logs)
        stop = _stop_on_sigterm(stopping)
        with failures_on_board(trainer):
            trainer.run(stop)


def _stop_on_sigterm(stopping: threading.Event) -> Callable[[], bool]:
    """From now on SIGTERM asks for a clean stop. Before, it ends the process, which has nothing to save yet."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    return stopping.is_set


def _write_error_report(path: Path, kind: str, message: str) -> None:
    traceback.print_exc()
    try:
        write_atomically(path, msgspec.json.encode(ErrorReport(kind, message, traceback.format_exc())))
    except OSError as error:  # on a full disk the log may still have room; the launcher shows its last lines
        print(f"{message}\n(can't write {path}: {error})", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The entry point of a run's processes.

    python -m pipelinerl.launch.worker ROLE RUN_DIR WEIGHTS_FD LIFELINE_FD RECORDS_FROM_S

ROLE is `training`, or one of `roles.generation_roles`.

A worker does its side of the run until it is done, is told to stop (SIGTERM: at once while it loads, cleanly afterwards),
or its launcher is gone (the lifeline, a pipe whose other end the launcher holds, is closed). It leaves its result or its
last words in the run directory.
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
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from pipelinerl.board import MmapBoard
from pipelinerl.errors import PipelineRLError
from pipelinerl.files import write_atomically
from pipelinerl.launch.capacity import stream_capacity
from pipelinerl.launch.drops import DropRelay
from pipelinerl.launch.resources import (
    GENERATION_NICENESS,
    LOG_FORMAT,
    peak_memory_bytes,
    plan_threads,
    trainer_goes_first,
    usable_cores,
)
from pipelinerl.launch.roles import TRAINING, generation_roles
from pipelinerl.launch.run_directory import ORPHAN_PATIENCE_S, RunDirectory
from pipelinerl.launch.session import Session, read_session
from pipelinerl.launch.supervisor import LastWords, WorkerResult, worker_files
from pipelinerl.stream import FileStreamReader, FileStreamWriter
from pipelinerl.types import Group

YOUNG_OBJECTS = 50_000
"""More objects than the rollouts in progress have, and few enough to be walked over in milliseconds."""


def main(arguments: list[str]) -> int:
    role, run_dir, weights_fd, lifeline_fd, records_from_s = arguments
    run = RunDirectory(Path(run_dir))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    threading.Thread(target=_watch_launcher, args=(int(lifeline_fd),), daemon=True).start()
    files = worker_files(run, role)
    try:
        session = read_session(run, float(records_from_s))
        if role == TRAINING:
            _training(session, int(weights_fd))
        else:
            _generation(session, int(weights_fd), generation_roles(session.config).index(role))
    except PipelineRLError as error:
        _leave_last_words(files.last_words, type(error).__name__, str(error))
        return error.exit_status
    except Exception as error:  # noqa: BLE001 - the process's boundary: the launcher reports it
        message = f"the {role} process (pid {os.getpid()}) failed: {type(error).__name__}: {error} (its log: {files.log})"
        _leave_last_words(files.last_words, "StageDiedError", message)
        return 1
    write_atomically(files.result, msgspec.json.encode(WorkerResult(peak_memory_bytes=peak_memory_bytes())))
    return 0


def _generation(session: Session, weights_fd: int, index: int) -> None:
    import torch  # noqa: PLC0415 - after the thread variables of this process are set

    from pipelinerl.launch.generation import build_generation, generate  # noqa: PLC0415
    from pipelinerl.weights.shared import SharedWeightReceiver  # noqa: PLC0415

    config, stream, drops = session.config, session.run.stream, DropRelay()
    torch.set_num_threads(plan_threads(config, session.schedule, usable_cores()).generation)
    if trainer_goes_first(config, session.schedule, usable_cores()):
        os.nice(GENERATION_NICENESS)
    capacity, when_full = stream_capacity(config), config.stream.when_full
    with (
        closing(FileStreamWriter(stream, Group, capacity=capacity, when_full=when_full, on_drop=drops)) as writer,
        closing(SharedWeightReceiver(weights_fd, index)) as receiver,
    ):
        side = build_generation(session, MmapBoard(session.run.control), writer, drops, receiver, index=index)
        # What is loaded stays: without this every collection walks over the model's and the libraries' objects again.
        gc.collect()
        gc.freeze()
        # Rollouts come and go by their reference counts. At the usual 700 they alone set a collection off 10 times a second.
        gc.set_threshold(YOUNG_OBJECTS)
        asyncio.run(generate(side, stop=_heed_sigterm(threading.Event())))


def _training(session: Session, weights_fd: int) -> None:
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.launch.training import build_trainer, failures_on_board, open_logs  # noqa: PLC0415
    from pipelinerl.weights.shared import SharedWeightSender  # noqa: PLC0415

    torch.set_num_threads(plan_threads(session.config, session.schedule, usable_cores()).training)
    stopping = threading.Event()
    with (
        closing(FileStreamReader(session.run.stream, Group)) as reader,
        closing(SharedWeightSender(weights_fd, session.config.engine.processes, give_up=stopping.is_set)) as sender,
        open_logs(session) as logs,
    ):
        trainer = build_trainer(session, MmapBoard(session.run.control), reader, sender, logs)
        stop = _heed_sigterm(stopping)
        with failures_on_board(trainer):
            trainer.run(stop)


def _heed_sigterm(stopping: threading.Event) -> Callable[[], bool]:
    """From now on SIGTERM asks for a clean stop. Until now it ended the process: there was nothing to lose."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    return stopping.is_set


def _watch_launcher(lifeline_fd: int) -> None:
    """Wait for the other end of the pipe to close; then there is nobody left to work for."""
    os.read(lifeline_fd, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_PATIENCE_S)
    os._exit(1)


def _leave_last_words(path: Path, kind: str, message: str) -> None:
    traceback.print_exc()
    try:
        write_atomically(path, msgspec.json.encode(LastWords(kind, message, traceback.format_exc())))
    except OSError as error:  # a full disk: the log may have room for it, and the launcher shows its end
        print(f"{message}\n(can't write {path}: {error})", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

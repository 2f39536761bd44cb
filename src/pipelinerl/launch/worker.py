"""The entry point of a run's processes: `python -m pipelinerl.launch.worker ROLE RUN_DIR FD LIFELINE STARTED`.

A worker does its side of the run until it is done, is told to stop (SIGTERM), or its launcher is gone (the lifeline, a
pipe whose other end the launcher holds, is closed). It leaves its result or its last words in the run directory.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelinerl.board import MmapBoard
from pipelinerl.config import config_from_yaml
from pipelinerl.errors import PipelineRLError
from pipelinerl.files import write_atomically
from pipelinerl.launch.capacity import stream_capacity
from pipelinerl.launch.plan import read_plan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.supervisor import LastWords, WorkerResult, worker_files
from pipelinerl.launch.threads import plan_threads, usable_cores
from pipelinerl.schedule import make_schedule
from pipelinerl.stream import FileStreamReader, FileStreamWriter
from pipelinerl.types import Group

ORPHAN_PATIENCE_S = 30.0
"""How long a worker whose launcher is gone may take to end by itself."""


def main(arguments: list[str]) -> int:
    role, run_dir, fd, lifeline, started_s = arguments
    run = RunDirectory(Path(run_dir))
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threading.Thread(target=_watch_launcher, args=(int(lifeline), stopping), daemon=True).start()
    files = worker_files(run, role)
    try:
        work = {"generation": _generation, "training": _training}[role]
        work(run, int(fd), float(started_s), stopping.is_set)
    except PipelineRLError as error:
        _leave_last_words(files.last_words, error)
        traceback.print_exc()
        return error.exit_status
    except Exception as error:  # noqa: BLE001 - the process's boundary: the launcher reports it
        _leave_last_words(files.last_words, error)
        traceback.print_exc()
        return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    write_atomically(files.result, msgspec.json.encode(WorkerResult(peak_memory_bytes=peak)))
    return 0


def _generation(run: RunDirectory, fd: int, started_s: float, stop: Callable[[], bool]) -> None:
    import torch  # noqa: PLC0415 - after the thread variables of this process are set

    from pipelinerl.launch.generation import build_generation, generate  # noqa: PLC0415
    from pipelinerl.weights.shared import SharedWeightReceiver  # noqa: PLC0415

    config = config_from_yaml(run.config.read_text())
    schedule = make_schedule(config)
    torch.set_num_threads(plan_threads(config, schedule, usable_cores()).generation)
    capacity, when_full = stream_capacity(config), config.stream.when_full
    writer = FileStreamWriter(run.stream, Group, capacity=capacity, when_full=when_full)
    receiver = SharedWeightReceiver(fd, 0)
    side = build_generation(
        config,
        run,
        board=MmapBoard(run.control),
        schedule=schedule,
        plan=read_plan(run),
        writer=writer,
        receiver=receiver,
        started_s=started_s,
    )
    asyncio.run(generate(side, stop=stop))
    writer.close()
    receiver.close()


def _training(run: RunDirectory, fd: int, started_s: float, stop: Callable[[], bool]) -> None:
    import torch  # noqa: PLC0415 - as above

    from pipelinerl.launch.training import build_trainer  # noqa: PLC0415
    from pipelinerl.weights.shared import SharedWeightSender  # noqa: PLC0415

    config = config_from_yaml(run.config.read_text())
    schedule = make_schedule(config)
    torch.set_num_threads(plan_threads(config, schedule, usable_cores()).training)
    reader = FileStreamReader(run.stream, Group)
    sender = SharedWeightSender(fd, 1)
    trainer = build_trainer(
        config,
        run,
        board=MmapBoard(run.control),
        schedule=schedule,
        plan=read_plan(run),
        reader=reader,
        sender=sender,
        started_s=started_s,
    )
    trainer.run(stop)
    reader.close()


def _watch_launcher(lifeline: int, stopping: threading.Event) -> None:
    """Wait for the other end of the pipe to close; then there is nobody left to work for."""
    os.read(lifeline, 1)
    stopping.set()
    time.sleep(ORPHAN_PATIENCE_S)
    os._exit(1)


def _leave_last_words(path: Path, error: BaseException) -> None:
    kind = type(error).__name__ if isinstance(error, PipelineRLError) else "StageDiedError"
    message = str(error) if isinstance(error, PipelineRLError) else f"{type(error).__name__}: {error}"
    write_atomically(path, msgspec.json.encode(LastWords(kind, message, traceback.format_exc())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

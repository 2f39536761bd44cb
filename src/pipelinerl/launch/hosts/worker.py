"""The entry point of a run's processes.

    python -m pipelinerl.launch.hosts.worker ROLE RUN_DIR SPEC

SPEC is a `session.WorkerSpec` as JSON. ROLE is one of `roles.worker_roles` or `roles.server_roles`.

A worker runs its stages until the run is over, it is told to stop, or its launcher has ended. SIGTERM ends it at once while
it loads, and asks for a clean stop afterwards. Its standard input is the parent-death pipe, by which it notices the end of
the launcher. At the end it writes a report to the run directory.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import closing
from pathlib import Path

import msgspec

from pipelinerl.errors import PipelineRLError, RunDirectoryError, StageDiedError
from pipelinerl.files import UNWRITABLE, remedy, write_atomically
from pipelinerl.hub.client import HubClient, dial
from pipelinerl.launch import GARBAGE_THRESHOLD
from pipelinerl.launch.session import Session, WorkerError, WorkerReport, WorkerSpec, read_session
from pipelinerl.process import LOG_FORMAT, peak_memory, take_stdin, when_closed
from pipelinerl.resources.roles import PREPROCESSING, TRAINING, generation_roles, rank_roles, server_roles
from pipelinerl.run_directory import ORPHAN_PATIENCE_S, RunDirectory


def main(arguments: list[str]) -> int:
    gc.set_threshold(GARBAGE_THRESHOLD)
    role, root, spec = arguments
    run, here = RunDirectory(Path(root)), msgspec.json.decode(spec, type=WorkerSpec)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # at INFO it logs every request
    parent_pipe = take_stdin()
    when_closed(parent_pipe, lambda: os.kill(os.getpid(), signal.SIGTERM), ORPHAN_PATIENCE_S)
    failed, status = None, 0
    try:
        _run(read_session(run, here), role, parent_pipe)
    except Exception as error:  # noqa: BLE001 - the launcher reports whatever ends this process
        traceback.print_exc()
        if isinstance(error, PipelineRLError):
            kind, message, status = type(error).__name__, str(error), error.exit_status
        elif isinstance(error, OSError) and error.errno in UNWRITABLE:
            kind, status = RunDirectoryError.__name__, 1
            message = f"the {role} process can't write to {error.filename or run.root}: {error.strerror}; {remedy(error)}"
        else:
            kind, status, pid = StageDiedError.__name__, 1, os.getpid()
            message = f"the {role} process (pid {pid}) failed: {type(error).__name__}: {error} (log: {run.log(role)})"
        failed = WorkerError(kind, message, traceback.format_exc())
    try:
        write_atomically(run.report(role), msgspec.json.encode(WorkerReport(peak_memory(), failed)))
    except OSError as error:
        if failed is None:
            raise
        # On a full disk the log may still have room; the launcher shows its last lines.
        print(f"{failed.message}\n(can't write {run.report(role)}: {error})", file=sys.stderr)
    return status


def _run(session: Session, role: str, parent_pipe: int) -> None:
    """Run the stages of `role` to their end. Each process imports its own stages only."""
    if role in rank_roles(session.config):
        from pipelinerl.launch.stages.training import run_rank  # noqa: PLC0415

        run_rank(session, role)
        return
    if role in server_roles(session.config):
        from pipelinerl.launch.stages.servers import run_server  # noqa: PLC0415

        run_server(session, role, parent_pipe)
        return
    with closing(_hub(session, role)) as hub:
        if role == TRAINING:
            from pipelinerl.launch.stages.training import run_training  # noqa: PLC0415

            run_training(session, hub)
        elif role == PREPROCESSING:
            from pipelinerl.launch.stages.preprocessing import run_preprocessing  # noqa: PLC0415

            run_preprocessing(session, hub)
        else:
            from pipelinerl.launch.stages.generation import run_generation  # noqa: PLC0415

            run_generation(session, hub, generation_roles(session.config).index(role))


def _hub(session: Session, role: str) -> HubClient:
    here = session.here
    if here.hub_at is None:
        return HubClient(socket.socket(fileno=here.hub))
    return dial(here.hub_at, session.plan.hub_key, role, here.machine)


if __name__ == "__main__":
    ended_with = main(sys.argv[1:])
    if ended_with and sys.argv[1].startswith(TRAINING):
        sys.stderr.flush()
        os._exit(ended_with)  # an ordinary exit would wait for collective operations that can't end any more
    sys.exit(ended_with)

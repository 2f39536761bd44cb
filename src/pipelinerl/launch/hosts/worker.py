"""The entry point of a run's processes: a process of this machine, or an actor of a Ray cluster.

    python -m pipelinerl.launch.hosts.worker ROLE RUN_DIR SPEC

SPEC is a `session.WorkerSpec` as JSON. ROLE is one of `roles.worker_roles` or `roles.server_roles`.

A worker runs its stages until the run is over, it is asked to stop, or its launcher has ended. SIGTERM ends it at once while
it loads, and asks for a clean stop afterwards. At its end it reports: in the run directory, or as the result of its call.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path

import msgspec

from pipelinerl._version import __version__
from pipelinerl.errors import PipelineRLError, RunDirectoryError, StageDiedError
from pipelinerl.files import UNWRITABLE, remedy, write_atomically
from pipelinerl.hub.client import HubClient, dial
from pipelinerl.launch import GARBAGE_THRESHOLD
from pipelinerl.launch.session import Session, WorkerReport, WorkerSpec, read_session
from pipelinerl.process import LOG_FORMAT, name_process, peak_memory, take_stdin, when_closed
from pipelinerl.resources.roles import PREPROCESSING, TRAINING, generation_roles, rank_roles, server_roles
from pipelinerl.run_directory import ORPHAN_PATIENCE_S, RunDirectory


def main(arguments: list[str]) -> int:
    """A process of this machine. Its standard input is the parent-death pipe, by which it notices its launcher's end."""
    (role, root, spec), parent_pipe = arguments, take_stdin()
    run = RunDirectory(Path(root))
    name_process(role)
    when_closed(parent_pipe, lambda: os.kill(os.getpid(), signal.SIGTERM), ORPHAN_PATIENCE_S)
    report = run_role(run, role, msgspec.json.decode(spec, type=WorkerSpec), parent_pipe)
    try:
        write_atomically(run.report(role), msgspec.json.encode(report))
    except OSError as error:
        if not report.kind:
            raise
        # On a full disk the log may still have room; the launcher shows its last lines.
        print(f"{report.message}\n(can't write {run.report(role)}: {error})", file=sys.stderr)
    return 1 if report.kind else 0


class WorkerActor:
    """A worker as an actor of Ray: `begin` is called, then `run`. It leads a process group, which ends with it."""

    def begin(self, root: str, role: str, spec: bytes, version: str, folder: str) -> tuple[int, str]:
        """Returns the id of its process, and what is wrong on this machine, or "".

        `version`: of the launcher's package. Relative paths in the run file are relative to its working `folder`.
        """
        self._run, self._role = RunDirectory(Path(root)), role
        self._spec = msgspec.json.decode(spec, type=WorkerSpec)
        if version != __version__:
            own = f"it has pipelinerl {__version__}, and the launcher {version}"
            return 0, f"{own}: install the same version on all machines"
        try:
            read_session(self._run, self._spec)
        except (OSError, PipelineRLError):
            return 0, f"it does not have {root}: put run_dir on a file system that all machines share"
        if Path(folder).is_dir():
            os.chdir(folder)
        if os.getpgrp() != os.getpid():
            os.setsid()
        self._pipe, _stays_open = os.pipe()  # when this process has ended, a small one kills all of its group
        command = ["/bin/sh", "-c", f"read -r _; kill -9 -{os.getpid()}"]
        subprocess.Popen(command, stdin=self._pipe, start_new_session=True)  # noqa: S603 - our own command
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in place of Ray's
        log = os.open(self._run.log(role), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the process ends
        return os.getpid(), ""

    def run(self, elapsed_s: float) -> bytes:
        """Run the stages to their end. Returns a `WorkerReport`. `elapsed_s`: the time of the records, now."""
        spec = msgspec.structs.replace(self._spec, records_from_s=time.monotonic() - elapsed_s)
        return msgspec.json.encode(run_role(self._run, self._role, spec, self._pipe))


def run_role(run: RunDirectory, role: str, here: WorkerSpec, parent_pipe: int) -> WorkerReport:
    """Run the stages of `role` to their end, and report how that came. This process shall end when `parent_pipe` closes."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # at INFO it logs every request
    try:
        _run_stages(read_session(run, here), role, parent_pipe)
    except Exception as error:  # noqa: BLE001 - the launcher reports whatever ends this process
        traceback.print_exc()
        if isinstance(error, PipelineRLError):
            kind, message = type(error).__name__, str(error)
        elif isinstance(error, OSError) and error.errno in UNWRITABLE:
            kind = RunDirectoryError.__name__
            message = f"the {role} process can't write to {error.filename or run.root}: {error.strerror}; {remedy(error)}"
        else:
            kind, pid = StageDiedError.__name__, os.getpid()
            message = f"the {role} process (pid {pid}) failed: {type(error).__name__}: {error} (log: {run.log(role)})"
        return WorkerReport(peak_memory(), kind, message, traceback.format_exc())
    return WorkerReport(peak_memory())


def _run_stages(session: Session, role: str, parent_pipe: int) -> None:
    """Each process imports its own stages only."""
    if role in rank_roles(session.config):
        from pipelinerl.launch.stages.training import run_rank  # noqa: PLC0415

        run_rank(session, role)
        return
    if role in server_roles(session.config):
        from pipelinerl.launch.stages.servers import run_server  # noqa: PLC0415

        run_server(session, role, parent_pipe)
        return
    here = session.here
    if here.hub_at is None:
        hub = HubClient(socket.socket(fileno=here.hub))
    else:
        hub = dial(here.hub_at, session.plan.hub_key, role, here.machine)
    with closing(hub):
        if role == TRAINING:
            from pipelinerl.launch.stages.training import run_training  # noqa: PLC0415

            run_training(session, hub)
        elif role == PREPROCESSING:
            from pipelinerl.launch.stages.preprocessing import run_preprocessing  # noqa: PLC0415

            run_preprocessing(session, hub)
        else:
            from pipelinerl.launch.stages.generation import run_generation  # noqa: PLC0415

            run_generation(session, hub, generation_roles(session.config).index(role))


if __name__ == "__main__":
    ended_with = main(sys.argv[1:])
    if ended_with and sys.argv[1].startswith(TRAINING):
        sys.stderr.flush()
        os._exit(ended_with)  # an ordinary exit would wait for collective operations that can't end any more
    sys.exit(ended_with)

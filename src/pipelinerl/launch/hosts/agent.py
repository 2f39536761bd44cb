"""What acts for the launcher on another machine: starts one process of a run there, and reports how it ends.

It does not know what carries the calls. The process holds the end of a pipe of its agent and ends with it. It reaches the
hub over the network by itself, and finds its settings in the run directory, which is on a file system that all machines
share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from pipelinerl._version import __version__
from pipelinerl.channel import listen
from pipelinerl.launch.hosts.host import LocalWorker
from pipelinerl.launch.session import WorkerSpec
from pipelinerl.run_directory import RunDirectory

POLL_S = 0.02


class Agent:
    """Starts the process of one role, and starts it again on request. The process sees the GPUs that this one sees."""

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None
        self._ranks = -1

    def prepare(self, launcher_version: str, note: str, contents: str, working_folder: str) -> str:
        """What is wrong on this machine, or "". `note` is a file in the run directory, with these `contents`.

        Relative paths in the run file are relative to `working_folder`.
        """
        if launcher_version != __version__:
            return (
                f"it has pipelinerl {__version__}, and the launcher {launcher_version}: install the same version on all "
                "machines"
            )
        try:
            sees = Path(note).read_text() == contents
        except OSError:
            sees = False
        if not sees:
            return f"it does not have {Path(note).parent}: put run_dir on a file system that all machines share"
        if Path(working_folder).is_dir():
            os.chdir(working_folder)
        return ""

    def answer(self) -> None:
        """Shows that the agent answers."""

    def listen(self, address: str) -> int:
        """Open the socket `WorkerSpec.ranks` at this address of the machine. Returns its port."""
        listener = listen(address)
        port: int = listener.getsockname()[1]
        self._ranks = listener.detach()
        return port

    def start(self, run_dir: str, role: str, elapsed_s: float, spec: bytes) -> int:
        """Start the process of a role; returns its id. `spec`: a `WorkerSpec`. `elapsed_s`: the time of the records, now."""
        given = msgspec.json.decode(spec, type=WorkerSpec)
        given = msgspec.structs.replace(given, records_from_s=time.monotonic() - elapsed_s, ranks=self._ranks)
        self._worker = LocalWorker(RunDirectory(Path(run_dir)), role, given)
        return self._worker.pid

    def wait(self) -> bytes:
        """Wait until the process has ended. Returns a `WorkerReport`."""
        worker = self._started
        while (report := worker.report()) is None:
            time.sleep(POLL_S)
        return msgspec.json.encode(report)

    def signal(self, what: str) -> None:
        """`stop`: ask the process to stop. `kill`: kill it and its children. `stacks`: have it write its stacks."""
        worker = self._started
        {"stop": worker.ask_to_stop, "kill": worker.kill, "stacks": worker.dump_stacks}[what]()

    def reap(self) -> None:
        """Kill what the process, which has died, has started."""
        self._started.end_with_children()

    def close(self) -> None:
        """Kill what still runs."""
        if self._worker is not None:
            self.reap()

    @property
    def _started(self) -> LocalWorker:
        assert self._worker is not None  # noqa: S101 - `start` comes first
        return self._worker

"""What acts for the launcher on another machine: starts one process of a run there, and tells how it ends.

It does not know what carries the calls. The process holds the end of a pipe of its agent and ends with it. It reaches the
hub over the network by itself, and finds its settings in the run directory, which is on a file system that all machines
share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipelinerl._version import __version__
from pipelinerl.channel import listen
from pipelinerl.launch.hosts.host import LocalWorker, end_with_children
from pipelinerl.launch.session import Channels, Here, read_session
from pipelinerl.process import PeakMemory
from pipelinerl.resources.memory import this_machine
from pipelinerl.run_directory import RunDirectory

POLL_S = 0.02


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. `kind`, `message` and `notes` are of its error (a class in `errors`), if there is one.

    `died`: see `host.Worker`.
    """

    kind: str | None = None
    message: str = ""
    notes: tuple[str, ...] = ()
    peak: PeakMemory | None = None
    died: bool = False


class Agent:
    """Starts the process of one role, and starts it again when told. `gpus`: what CUDA_VISIBLE_DEVICES is for it."""

    gpus: Sequence[str] = ()

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None
        self._channels = Channels()

    def memory(self, device: str) -> tuple[int, int | None] | None:
        """The fields of a `Memory`: of `cpu`, or of one of the agent's GPUs (`cuda:POSITION`). None if it is not known."""
        found = this_machine(device)
        return None if found is None else (found.total, found.available)

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

    def listen(self, address: str) -> int:
        """Open the socket `ranks` of `Channels` at this address of the machine. Returns its port."""
        listener = listen(address)
        port: int = listener.getsockname()[1]
        self._channels = Channels(ranks=listener.detach())
        return port

    def start(self, run_dir: str, role: str, elapsed_s: float, here: bytes) -> int:
        """Start the process of a role; returns its id. `elapsed_s`: time on the axis of the records; `here`: a `Here`."""
        told = msgspec.json.decode(here, type=Here)
        session = read_session(RunDirectory(Path(run_dir)), time.monotonic() - elapsed_s, told)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        self._worker = LocalWorker(session, role, told, channels=self._channels, environment=environment)
        return self._worker.pid

    def wait(self) -> bytes:
        """Wait until the process has ended. Returns an `Ended`."""
        worker = self._started
        while worker.running:
            time.sleep(POLL_S)
        error = worker.failure()
        ended = Ended(
            kind=None if error is None else type(error).__name__,
            message="" if error is None else str(error),
            notes=() if error is None else tuple(getattr(error, "__notes__", ())),
            peak=worker.peak_memory(),
            died=worker.died,
        )
        return msgspec.json.encode(ended)

    def signal(self, what: str) -> None:
        """`stop`: ask the process to stop. `kill`: kill it and its children. `stacks`: have it write its stacks."""
        worker = self._started
        {"stop": worker.ask_to_stop, "kill": worker.kill, "stacks": worker.dump_stacks}[what]()

    def bury(self) -> None:
        """Kill what the process, which has died, has started."""
        end_with_children(self._started)

    def close(self) -> None:
        """Kill what still runs."""
        if self._worker is not None:
            self.bury()

    @property
    def _started(self) -> LocalWorker:
        assert self._worker is not None  # noqa: S101 - `start` comes first
        return self._worker

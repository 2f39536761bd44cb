"""What acts for the launcher on another machine: starts one process of a run there, and tells how it ends.

It does not know what carries the calls; all arguments and results are strings, numbers and JSON. The process holds the end
of a pipe of its agent and ends with it. It reaches the hub over the network by itself.

A machine that does not see the run directory gives its processes a temporary folder instead. Their records go through the
hub, and their logs to the launcher when they end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pipelinerl._version import __version__
from pipelinerl.channel import listen
from pipelinerl.child import KILL_TIMEOUT_S
from pipelinerl.files import write_atomically
from pipelinerl.launch.hosts.host import LocalWorker, remove_weights_of
from pipelinerl.launch.memory import this_machine
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.session import Channels, Here, PeakMemory, read_session

OWN_FOLDER = "PIPELINERL_OWN_FOLDER"
"""A machine with this environment variable works as if it did not see the run directory."""
LOG_BYTES = 1 << 20
"""The end of a log that a machine without the run directory sends."""
POLL_S = 0.02


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The process that an agent starts.

    version          of this package, on the launcher's machine
    nonce            name and contents of a file in the run directory, to see whether this machine has it
    elapsed_s        time on the axis of the records
    working_folder   relative paths in the run file are relative to it
    settings, plan   contents of `RunDirectory.settings` and `plan`
    model_folder     `model.path` is a folder on the launcher's machine
    """

    version: str
    run_dir: str
    nonce: tuple[str, str]
    role: str
    here: Here
    elapsed_s: float
    working_folder: str
    settings: bytes
    plan: bytes
    model: str
    model_folder: bool


class Version(msgspec.Struct, frozen=True):
    """The part of an `Order` that every version of this package can read."""

    version: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. `kind`, `message` and `notes` are of its error (a class in `errors`), if there is one.

    died    see `host.Worker`
    log     the end of its log, if this machine does not have the run directory
    """

    kind: str | None = None
    message: str = ""
    notes: tuple[str, ...] = ()
    peak: PeakMemory | None = None
    died: bool = False
    log: bytes = b""


class Agent:
    """Starts the process of one role, and starts it again when told. `gpus`: what CUDA_VISIBLE_DEVICES is for it."""

    gpus: Sequence[str] = ()

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None
        self._channels = Channels()
        self._own: Path | None = None

    def memory(self, device: str) -> tuple[int, int | None] | None:
        """The fields of a `Memory`: of `cpu`, or of one of the agent's GPUs (`cuda:POSITION`). None if it is not known."""
        found = this_machine(device)
        return None if found is None else (found.total, found.available)

    def prepare(self, order: bytes) -> tuple[str, bool]:
        """What is wrong on this machine, or "", and whether it sees the run directory."""
        if (theirs := msgspec.json.decode(order, type=Version).version) != __version__:
            return (
                f"it has pipelinerl {__version__}, and the launcher {theirs}: install the same version on all machines",
                True,
            )
        wanted = msgspec.json.decode(order, type=Order)
        name, contents = wanted.nonce
        sees = has(str(Path(wanted.run_dir) / name), contents)
        if Path(wanted.working_folder).is_dir():
            os.chdir(wanted.working_folder)
        if wanted.model_folder and not Path(wanted.model).expanduser().is_dir():
            return (
                f"it does not have the folder {wanted.model} (model.path): copy the model there, or share its folder",
                sees,
            )
        if not sees:
            self._own = Path(tempfile.mkdtemp(prefix="pipelinerl-"))
        return "", sees

    def listen(self, address: str) -> list[int]:
        """Open the sockets `weights` and `ranks` of `Channels` at this address of the machine. Returns their ports."""
        listeners = [listen(address), listen(address)]
        ports = [listener.getsockname()[1] for listener in listeners]
        weights, ranks = (listener.detach() for listener in listeners)
        self._channels = Channels(weights=weights, ranks=ranks)
        return ports

    def start(self, order: bytes) -> int:
        """Start the process; returns its id."""
        wanted = msgspec.json.decode(order, type=Order)
        run = RunDirectory(self._own / "run" if self._own else Path(wanted.run_dir))
        if self._own:
            run.make_folders()
            write_atomically(run.settings, wanted.settings, mode=0o600)
            write_atomically(run.plan, wanted.plan, mode=0o600)
        session = read_session(run, time.monotonic() - wanted.elapsed_s, wanted.here)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        self._worker = LocalWorker(
            session, wanted.role, wanted.here, channels=self._channels, environment=environment if self.gpus else {}
        )
        self._ended_in = wanted.run_dir
        return self._worker.pid

    def wait(self) -> bytes:
        """Wait until the process has ended. Returns an `Ended`."""
        worker = self._started
        while worker.running:
            time.sleep(POLL_S)
        error, own = worker.failure(), str(self._own / "run") if self._own else self._ended_in
        log = b""
        if self._own:
            with suppress(OSError):
                log = worker.log.read_bytes()[-LOG_BYTES:]
        ended = Ended(
            kind=None if error is None else type(error).__name__,
            message="" if error is None else str(error).replace(own, self._ended_in),
            notes=() if error is None else tuple(getattr(error, "__notes__", ())),
            peak=worker.peak_memory(),
            died=worker.died,
            log=log,
        )
        return msgspec.json.encode(ended)

    def signal(self, what: str) -> None:
        """`stop`: ask the process to stop. `kill`: kill it and its children. `stacks`: have it write its stacks."""
        worker = self._started
        {"stop": worker.ask_to_stop, "kill": worker.kill, "stacks": worker.dump_stacks}[what]()

    def bury(self) -> None:
        """Kill what the process, which has died, has started."""
        worker = self._started
        worker.kill()
        worker.wait(KILL_TIMEOUT_S)
        remove_weights_of(worker.pid)

    def read(self, name: str) -> bytes | None:
        """A file of the run directory as this machine has it."""
        with suppress(OSError):
            return (self._started.report_file.parents[1] / name).read_bytes()
        return None

    def write(self, name: str, contents: bytes) -> None:
        """The same, written for the process."""
        if self._own:
            write_atomically(self._own / "run" / name, contents)

    def close(self) -> None:
        """Kill what still runs, and remove what is on this machine only."""
        if self._worker is not None:
            self.bury()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    @property
    def _started(self) -> LocalWorker:
        assert self._worker is not None  # noqa: S101 - `start` comes first
        return self._worker


def has(file: str, contents: str) -> bool:
    """Whether this machine sees a file of the launcher's machine."""
    try:
        return OWN_FOLDER not in os.environ and Path(file).read_text() == contents
    except OSError:
        return False

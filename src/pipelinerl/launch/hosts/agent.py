"""What acts for the launcher on another machine: starts the processes of that machine, and keeps its status board.

    launcher ──calls──▶ agent ──starts──▶ workers (as on one machine: `host.LocalWorker`)
                          ▲  ╲
        heartbeats, Redis │   ╲──mirror──▶ the machine's status board ◀─▶ Redis

An agent does not know what carries the calls; all arguments and results are strings, numbers and JSON. Workers hold the end
of a pipe of their agent and end with it. The agent ends when it is told to, or when it has not heard the launcher's beats
for `launch.lost_s`: then the launcher is gone, or the network between them, and another run may need the machine.

What processes share by maps or locks is in a scratch folder of each machine, since network file systems can't offer it.
Whether a machine has the run directory is checked with a file that the launcher has just written there. One that does not
have it is away: its processes get a folder in the scratch folder instead, and what they write there goes to the launcher
(`launch.away`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from pipelinerl._version import __version__
from pipelinerl.channel import listen
from pipelinerl.child import KILL_TIMEOUT_S
from pipelinerl.errors import PipelineRLError, RunDirectoryError, StreamError
from pipelinerl.files import write_atomically
from pipelinerl.launch.away import Sending
from pipelinerl.launch.fence import Fence
from pipelinerl.launch.hosts.host import Channels, LocalWorker, remove_weights_of
from pipelinerl.launch.memory import this_machine
from pipelinerl.launch.roles import server_roles
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.session import Here, Session, StartPlan, read_session
from pipelinerl.launch.stages.streams import redis_of
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.status.board import MmapBoard
from pipelinerl.status.mirror import Heartbeats, Mirror, RedisBoard

LAUNCHER = "launcher"
"""The launcher's name among the heartbeats. Machines have their own."""
MIRROR_EVERY_S = 0.02
BEAT_EVERY_S = 0.5
SEND_EVERY_S = 0.5
LONGEST_PIECE = 16 << 20
"""Bytes of a checkpoint in one call."""
AWAY = "it does not have the run directory"
OWN_FOLDER = "PIPELINERL_OWN_FOLDER"
"""A machine with this environment variable is away, even if it has the run directory."""
LAST_WORDS_S = 2.0
"""Time in which the launcher can still hear why an agent ends."""


class Greeting(msgspec.Struct, frozen=True):
    """The part of a `Setup` that every version of this package can read."""

    version: str


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to begin.

    version         of this package, on the launcher's machine
    nonce           name and contents of the file in the run directory
    session         `StartPlan.id`
    machine         its own name
    stages          the stages that run on its machine
    ahead_s         its clock minus the launcher's (`time.monotonic`)
    records_from_s  `Session.records_from_s`, by the launcher's clock
    working_folder  relative paths in the run file are relative to it
    files           for a machine that is away: what its processes read in the run directory
    model_folder    `model.path` is a folder on the launcher's machine
    """

    version: str
    run_dir: str
    nonce: tuple[str, str]
    session: str
    machine: str
    stages: tuple[str, ...]
    ahead_s: float
    records_from_s: float
    lost_s: float
    working_folder: str
    files: dict[str, bytes] = {}
    model_folder: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start. `gpus`: positions in the agent's own GPUs. `listens`: it gets the sockets of `listen`. `plan`: the
    contents of the session's plan, for a machine that is away.
    """

    role: str
    here: Here
    gpus: tuple[int, ...] = ()
    listens: bool = False
    plan: bytes = b""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. `kind`, `message` and `notes` are of its error (a class in `errors`), if there is one.

    died: see `host.Worker`
    """

    role: str
    pid: int
    status: int
    kind: str | None = None
    message: str = ""
    notes: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    died: bool = False


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened: how the latest process of each role has ended, and why the agent itself is about to end."""

    ended: tuple[Ended, ...] = ()
    problem: str | None = None


class Agent:
    """`gpus` are the names of its GPUs, as CUDA_VISIBLE_DEVICES has them."""

    gpus: Sequence[str] = ()

    def __init__(self) -> None:
        self._workers: dict[str, LocalWorker] = {}
        self._channels = Channels()
        self._problem: str | None = None
        self._mirroring = threading.Lock()
        self._closing = threading.Event()  # for the threads
        self._scratch: Path | None = None
        self._away = False
        self._sending: Sending | None = None
        self._sent: dict[Path, int] = {}

    def clock(self) -> float:
        return time.monotonic()

    def memory(self, device: str) -> tuple[int, int | None] | None:
        """The fields of a `Memory`: of `cpu`, or of one of the agent's GPUs (`cuda:POSITION`). None if it is not known."""
        found = this_machine(device)
        return None if found is None else (found.total, found.available)

    def open(self, setup: bytes) -> str:
        """Begin. Returns what is wrong on this machine, or "" if nothing is. `AWAY`: call it again with `files`."""
        if (theirs := msgspec.json.decode(setup, type=Greeting).version) != __version__:
            return f"it has pipelinerl {__version__}, and the launcher {theirs}: install the same version on all machines"
        self._setup = msgspec.json.decode(setup, type=Setup)
        root, (name, contents) = Path(self._setup.run_dir), self._setup.nonce
        self._away = bool(self._setup.files)
        if not self._away and not has(str(root / name), contents):
            return AWAY
        self._scratch = Path(tempfile.mkdtemp(prefix="pipelinerl-"))
        if Path(self._setup.working_folder).is_dir():
            os.chdir(self._setup.working_folder)
        try:
            if self._away:
                root = self._scratch / "run"
                self._write_files(RunDirectory(root))
            self._session = self._read_session(root, self._scratch)
            model = self._session.config.model.path
            if self._away and self._setup.model_folder and not Path(model).expanduser().is_dir():
                return f"it does not have the folder {model} (model.path): copy the model there, or share its folder"
            self._board = MmapBoard(self._scratch)
            url, prefix, patience_s = redis_of(self._session.config, self._session.run, self._session.plan.redis_url)
            self._redis = RedisConnection(url, "agent", patience_s)
            shared = RedisBoard(self._redis, prefix)
            self._mirror = Mirror(
                shared, self._board, self._setup.stages, machine=self._setup.machine, ahead_s=self._setup.ahead_s
            )
            self._heartbeats = Heartbeats(self._redis, prefix, self._setup.machine)
            self._heartbeats.beat()
            if self._away:
                self._sending = Sending(self._session, RedisConnection(url, "sender", patience_s), prefix, self._sent)
        except (OSError, PipelineRLError) as error:
            return str(error)
        threading.Thread(target=self._keep, daemon=True).start()
        if self._sending is not None:  # apart, since it waits while the launcher is behind
            threading.Thread(target=self._keep_sending, args=(self._sending,), daemon=True).start()
        return ""

    def listen(self, address: str) -> list[int]:
        """Open the sockets of `Channels`, at this address of the machine. Returns their ports."""
        listeners = [listen(address), listen(address)]
        ports = [listener.getsockname()[1] for listener in listeners]
        self._channels = Channels(*(listener.detach() for listener in listeners))
        return ports

    def start(self, order: bytes) -> int:
        """Start a process; returns its id."""
        wanted = msgspec.json.decode(order, type=Order)
        here = msgspec.structs.replace(wanted.here, machine=self._setup.machine, scratch=str(self._scratch), away=self._away)
        if wanted.plan:
            self._write_plan(self._session.run, wanted.plan)
        channels = self._channels if wanted.listens else Channels()
        servers = server_roles(self._session.config)  # they end after the last worker, as on one machine
        started = self._workers.values() if wanted.role not in servers else ()
        fds = [worker.parent_fd for worker in started if worker.role in servers and worker.running]
        visible = ",".join(self.gpus[position] for position in wanted.gpus)
        environment = {"CUDA_VISIBLE_DEVICES": visible} if wanted.gpus or self.gpus else {}
        worker = LocalWorker(self._session, wanted.role, here, channels=channels, fds=fds, environment=environment)
        self._workers[wanted.role] = worker
        return worker.pid

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A piece of a file in this machine's run directory."""
        with (self._session.run.root / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write a piece of a file that the processes need, in order."""
        path = self._session.run.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if offset else "wb") as file:
            file.write(data)

    def look(self) -> bytes:
        """A `Look`. The last statuses and logs of processes that have ended are in Redis before."""
        ended = [worker for worker in self._workers.values() if not worker.running]
        if ended and self._problem is None:
            self._copy()
            if self._sending is not None:
                with suppress(OSError, StreamError):  # the thread that sends reports it
                    self._sending.send()
        return msgspec.json.encode(Look(ended=tuple(self._ended(worker) for worker in ended), problem=self._problem))

    def signal(self, role: str, what: str) -> None:
        """`stop`: ask the process to stop. `kill`: kill it and its children. `stacks`: have it write its stacks."""
        worker = self._workers[role]
        {"stop": worker.ask_to_stop, "kill": worker.kill, "stacks": worker.dump_stacks}[what]()

    def bury(self, role: str) -> None:
        """Kill what a process that died has started. What it has sent to Redis is there after this, or never."""
        worker = self._workers[role]
        self._kill([worker])
        self._redis.disconnect(worker.pid)

    def close(self) -> None:
        """Kill what still runs, and remove what is on this machine only."""
        self._closing.set()
        self._kill(list(self._workers.values()))
        if self._sending is not None:
            with suppress(OSError, StreamError):
                self._sending.send_the_last()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _read_session(self, root: Path, scratch: Path) -> Session:
        records_from_s = self._setup.records_from_s + self._setup.ahead_s
        here = Here(machine=self._setup.machine, session=self._setup.session)
        return read_session(RunDirectory(root, scratch), records_from_s, here)

    @staticmethod
    def _kill(workers: Sequence[LocalWorker]) -> None:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait(KILL_TIMEOUT_S)
            remove_weights_of(worker.pid)

    def _keep(self) -> None:
        """Copy statuses and send heartbeats until the end. The thread of this."""
        beaten_s, fence = 0.0, Fence.of(self._session)
        with closing(self._redis):
            while not self._closing.wait(MIRROR_EVERY_S):
                try:
                    due = time.monotonic() - beaten_s > BEAT_EVERY_S
                    if due and not self._away:
                        fence.check()
                    self._copy()
                    if due:
                        beaten_s = time.monotonic()
                        self._heartbeats.beat()
                except (OSError, ValueError, StreamError, RunDirectoryError) as error:
                    self._end(str(error))
                if (silent_s := self._heartbeats.silent_s(LAUNCHER)) > self._setup.lost_s:
                    self._end(f"the launcher has not been heard for {silent_s:.0f} s (launch.lost_s)")

    def _copy(self) -> None:
        with self._mirroring:
            self._mirror.push()
            self._mirror.pull()

    def _keep_sending(self, sending: Sending) -> None:
        """Send what is new in this machine's folder until the end. The thread of this."""
        while not self._closing.wait(SEND_EVERY_S):
            try:
                sending.send()
            except (OSError, StreamError) as error:
                self._end(str(error))

    def _write_files(self, run: RunDirectory) -> None:
        run.make_folders()
        for name, contents in self._setup.files.items():
            write_atomically(run.root / name, contents, mode=0o600)
        self._write_plan(run, run.plan.read_bytes())

    @staticmethod
    def _write_plan(run: RunDirectory, contents: bytes) -> None:
        plan = msgspec.json.decode(contents, type=StartPlan)
        if plan.checkpoint is not None:  # it is sent apart
            plan = msgspec.structs.replace(plan, checkpoint=str(run.checkpoints / Path(plan.checkpoint).name))
        write_atomically(run.plan, msgspec.json.encode(plan), mode=0o600)

    def _ended(self, worker: LocalWorker) -> Ended:
        error = worker.failure()
        here, there = str(self._session.run.root), self._setup.run_dir  # the launcher has the logs that messages name
        return Ended(
            role=worker.role,
            pid=worker.pid,
            status=worker.status or 0,
            kind=None if error is None else type(error).__name__,
            message="" if error is None else str(error).replace(here, there),
            notes=() if error is None else tuple(getattr(error, "__notes__", ())),
            peak_memory_bytes=worker.peak_memory_bytes(),
            died=worker.died,
        )

    def _end(self, problem: str) -> None:
        """End this machine's part of the run, and this process."""
        if self._closing.is_set():
            return
        self._problem = problem
        with self._session.run.log(f"agent-{self._setup.machine}").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the agent ends: {problem}\n")
        self.close()
        time.sleep(LAST_WORDS_S)
        os._exit(1)


def has(file: str, contents: str) -> bool:
    """Whether this machine sees a file of the launcher's machine."""
    try:
        return OWN_FOLDER not in os.environ and Path(file).read_text() == contents
    except OSError:
        return False

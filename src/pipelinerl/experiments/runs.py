"""The runs of an experiment: which are done, and execution of the others, one `pipelinerl train` after another.

OUT/request.json       what determines the runs; the same command continues an experiment, others are refused
OUT/NAME/              a run directory for each run
OUT/NAME.yaml, .log    its run file, and the output of its command
OUT/executions.jsonl   a line for each executed run: how it ended, and the load average before it
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.channel import listen
from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, PipelineRLError, RunDirectoryError, RunInterruptedError, TrainingDivergedError
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board
from pipelinerl.launch.hosts.host import LocalWorker
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.launch.session import Session, WorkerSpec
from pipelinerl.launch.stages.training import lead_ranks
from pipelinerl.launch.summary import FINISHED
from pipelinerl.metrics.reading import read_json_lines
from pipelinerl.process import counted_interrupts
from pipelinerl.report import write_json, writing_to
from pipelinerl.resources.hardware import load_average
from pipelinerl.resources.roles import rank_roles
from pipelinerl.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipelinerl.trainer.sharding.ranks import Team

REQUEST_FILE = "request.json"
POLL_S = 0.1
RANKS_PATIENCE_S = 10.0
STOP_S = 180.0
"""Time for a run to write a checkpoint and end."""


@contextlib.contextmanager
def claimed(out: Path, request: Mapping[str, Any], what: str) -> Iterator[None]:
    """Create `out` for this request, or check that it holds this request. Raises RunDirectoryError with the differences.

    An interruption within the block says how to continue.
    """
    path = out / REQUEST_FILE
    try:
        if not path.exists():
            out.mkdir(parents=True, exist_ok=True)
            if any(out.iterdir()):
                raise RunDirectoryError(f"{out} is not empty and holds no {what}; choose a new --out")
            write_json(path, request, indent=2)
        before = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise RunDirectoryError(f"can't use {out}: {error.strerror}; choose another --out") from error
    except INVALID_DATA as error:
        raise RunDirectoryError(f"{path} is damaged: {error}; choose another --out") from error
    if differences := differing(before, request):
        raise RunDirectoryError(
            f"{out} holds another {what} ({'; '.join(differences)}); give the same arguments to continue it, or "
            "choose another --out"
        )
    try:
        yield
    except RunInterruptedError as stopped:
        raise RunInterruptedError(f"stopped; to continue, run the same command with --out {out}") from stopped


def differing(before: Any, now: Any, key: str = "") -> list[str]:
    """`KEY was A, now B` for every value that differs between two JSON-like documents."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = list(dict.fromkeys([*before, *now]))
        return [
            text for name in keys for text in differing(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    encode = msgspec.json.encode
    same = encode(before) == encode(now)
    return [] if same else [f"{key} was {encode(before).decode()}, now {encode(now).decode()}"]


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was not interrupted. `status` is "finished" or "diverged: REASON"."""

    run: str
    status: str
    began: str
    load_before: float | None

    @property
    def finished(self) -> bool:
        return self.status == FINISHED


class Folder:
    """Runs of one experiment, identified by name. A name contains everything in which runs of a request differ."""

    def __init__(self, root: Path, train: Callable[[RunConfig], object]) -> None:
        """`train` executes a run in `config.run_dir`. Raises RunDirectoryError if `executions.jsonl` is damaged."""
        self.root = root
        self._train = train
        self._log = root / "executions.jsonl"
        try:
            self._done = {execution.run: execution for execution in read_json_lines(self._log, Execution)}
        except FileNotFoundError:
            self._done = {}
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"can't read {self._log}: {error}; choose another --out") from error

    def done(self, name: str) -> Execution | None:
        """The run's execution if it was not interrupted and its folder exists."""
        return self._done.get(name) if (self.root / name).is_dir() else None

    def execute(self, name: str, config: RunConfig, *, resume: bool = False) -> Execution:
        """Execute the run `name` unless it is done: from its checkpoint with `resume`, else from the start.

        A run that diverges is a result. Any other error that ends the run is raised.
        """
        if (done := self.done(name)) is not None:
            return done
        if not resume or config.stream.kind == "memory":  # such a stream can't go on
            _clear_run(self.root / name)
        began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
        status = FINISHED
        try:
            self._train(config)
        except TrainingDivergedError as error:
            status = f"diverged: {error}"
        execution = Execution(run=name, status=status, began=began, load_before=load)
        with contextlib.closing(JsonLines(self._log)) as lines:
            lines.write(execution)
        self._done[name] = execution
        return execution


def train_in_child(config: RunConfig) -> None:
    """Run `pipelinerl train` for `config.run_dir`, or let that run go on.

    Raises TrainingDivergedError, RunInterruptedError and, with the last error of its log, PipelineRLError.
    """
    path = Path(str(config.run_dir))
    arguments, log = ["--resume", str(path)], path.with_name(f"{path.name}.log")
    if not (path / "config.yaml").is_file():
        run_file = path.with_name(f"{path.name}.yaml")
        with writing_to(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            run_file.write_text(config_to_yaml(config, only_given=True), encoding="utf-8")
        arguments = [str(run_file)]
    command = [sys.executable, "-m", "pipelinerl", "train", *arguments]
    with counted_interrupts() as interrupts, ChildProcess(command, log=log, patience_s=STOP_S) as process:
        asked = 0
        while not process.wait(POLL_S):
            if interrupts.count > asked:  # the first asks for a checkpoint, the second for the end
                asked = interrupts.count
                process.ask_to_stop()
        lines, status = process.log_lines(), process.status
    if interrupts.count or status in (RunInterruptedError.exit_status, 128 + signal.SIGTERM):
        raise RunInterruptedError("stopped")
    if status:
        why = next((line for line in reversed(lines) if line.startswith("error: ")), process.how_it_ended())
        kind = TrainingDivergedError if status == TrainingDivergedError.exit_status else PipelineRLError
        raise kind(f"{why.removeprefix('error: ')} ({log})")


def remove_parts(run_dir: Path, *names: str) -> None:
    """Remove the parts of a run that are not needed any more."""
    for name in names:
        shutil.rmtree(run_dir / name, ignore_errors=True)


def _clear_run(path: Path) -> None:
    """Remove an incomplete run. Waits for its last processes to exit; raises RunDirectoryError if it is still running."""
    if not path.is_dir():
        return
    lock = RunLock(RunDirectory(path))
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise RunDirectoryError(f"can't remove the unfinished run {path}: {error.strerror}") from error
    finally:
        lock.close()


@contextlib.contextmanager
def rank_processes(session: Session, board: Board) -> Iterator[Team]:
    """The other ranks of a sharded trainer, as processes of their own; this process is rank 0."""
    socket_fd = listen().detach()
    workers: list[LocalWorker] = []
    try:
        for role in rank_roles(session.config):
            spec = WorkerSpec(threads=session.config.trainer.threads or 1, ranks=socket_fd)
            workers.append(LocalWorker(session.run, role, spec))
        with lead_ranks(session, board, socket_fd) as team:
            yield team
        for worker in workers:
            worker.wait(RANKS_PATIENCE_S)
    finally:
        stop_all(workers, RANKS_PATIENCE_S)
        os.close(socket_fd)

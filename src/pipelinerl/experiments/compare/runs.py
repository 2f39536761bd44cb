"""The runs of a comparison: which are done, how they ended, execution of the others, and their held-out rewards.

OUT/request.json                 the request
OUT/runs/seed-0/pipeline/        a run directory for each schedule and seed
OUT/trials/pipeline/p1-e1-.../   a run directory for each trial of settings, records only
OUT/executions.jsonl             a line for each executed run: how it ended, and the load average before it

Schedules are compared by held-out rewards of a run's versions, measured after the run. A training reward belongs to the
weights that sampled the rollout, which are older by the schedule's lag. Held-out problems are answered by the weights of
each version, with the same versions, problems and random numbers for every schedule.

timed run ─▶ weights/step_* ─▶ `pipelinerl eval` in up to one process per core ─▶ held_out.json, and the weights are removed
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.config.schema import RunConfig
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import (
    INVALID_DATA,
    ConfigError,
    PipelineRLError,
    RunDirectoryError,
    RunInterruptedError,
    TrainingDivergedError,
)
from pipelinerl.experiments.compare.request import Request
from pipelinerl.experiments.machine import load_average
from pipelinerl.files import JsonLines
from pipelinerl.launch.interrupts import counted_interrupts
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.run_lock import RunLock
from pipelinerl.launch.share import process_environment
from pipelinerl.launch.summary import FINISHED
from pipelinerl.metrics.reading import read_json_lines
from pipelinerl.models.loading import load_tokenizer


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
    """Runs of one comparison, identified by name. A name contains everything in which runs of a request differ."""

    def __init__(self, root: Path, train: Callable[[RunConfig], object]) -> None:
        """`train` executes a run in `config.run_dir`. Raises RunDirectoryError if `executions.jsonl` is damaged."""
        self.root = root
        self._train = train
        self._log = root / "executions.jsonl"
        self._done = {execution.run: execution for execution in _read_log(self._log)}

    def execute(self, name: str, config: RunConfig) -> Execution:
        """Execute the run `name` from the start unless it is done, and delete any incomplete run of that name.

        A run that diverges is a result. Any other error that ends the run is raised.
        """
        if name in self._done and (self.root / name).is_dir():
            return self._done[name]
        clear_run(self.root / name)
        began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
        status = FINISHED
        with (self.root / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            try:
                self._train(config)
            except TrainingDivergedError as error:
                status = f"diverged: {error}"
        execution = Execution(run=name, status=status, began=began, load_before=load)
        with contextlib.closing(JsonLines(self._log)) as lines:
            lines.write(execution)
        self._done[name] = execution
        return execution


def _read_log(path: Path) -> list[Execution]:
    try:
        return read_json_lines(path, Execution)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; choose another --out") from error


def remove_parts(run_dir: Path, *names: str) -> None:
    """Remove the parts of a run that are not needed any more."""
    for name in names:
        shutil.rmtree(run_dir / name, ignore_errors=True)


def clear_run(path: Path) -> None:
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


# ---- held-out rewards


HELD_OUT_FILE = "held_out.json"
POLL_S = 0.1
STOP_S = 2.0
"""Time for an evaluation to end once it is told to. Its results are not used."""
WORTH_A_PROCESS = 100
"""Attempts that take as long as a process takes to load the model."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of weights `version` over the held-out problems, one attempt each, and its 95% bootstrap interval.

    `failed` attempts count as reward 0.
    """

    version: int
    reward: float
    low: float
    high: float
    failed: int = 0


def check_held_out(request: Request) -> None:
    """Raise ConfigError, before anything is run, if there are no held-out problems. Errors of the environment are raised."""
    if not request.held_out:
        return
    config = request.config
    args = config.environment.args | request.held_out_args
    environment = make_environment(config.environment.kind, args, load_tokenizer(config.model), config.seed)
    if not environment.held_out(1):
        raise ConfigError(
            f"environment {config.environment.kind} has no held-out problems: define `held_out`, or give --held-out 0 to "
            "compare by training rewards, which depend on each schedule's lag"
        )


def answer_held_out(run_dir: Path, request: Request) -> list[Answered]:
    """Have every version of `request.evaluated_versions` answer the held-out problems, by `pipelinerl eval`.

    On CPUs the versions are distributed over one process per core, each with at least `WORTH_A_PROCESS` attempts. Raises
    PipelineRLError with the last line of output if an evaluation fails, and RunInterruptedError.
    """
    versions = request.evaluated_versions
    most = request.machine.cores if request.config.engine.device == "cpu" else 1
    workers = min(len(versions), most, 1 + len(versions) * request.held_out // WORTH_A_PROCESS)
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=run_dir, prefix=".held-out-")))
        interrupts = cleanup.enter_context(counted_interrupts(raises_at=2))
        processes: list[ChildProcess] = []
        cleanup.callback(stop_all, processes, STOP_S)
        outs = [scratch / str(number) for number in range(workers)]
        for number, out in enumerate(outs):
            processes.append(_start(run_dir, versions[number::workers], request, out))
        while any(process.running for process in processes):
            if interrupts.count:
                raise RunInterruptedError("stopped during an evaluation")
            if any(process.status for process in processes):
                break
            time.sleep(POLL_S)
        answered = [one for process, out in zip(processes, outs, strict=True) for one in _answers_of(process, out, run_dir)]
    return sorted(answered, key=lambda one: one.version)


def read_answers(run_dir: Path) -> list[Answered]:
    """Read the run's answers, ascending by version; empty if it is not evaluated. Raises RunDirectoryError."""
    path = run_dir / HELD_OUT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Answered])
    except FileNotFoundError:
        return []
    except (OSError, *INVALID_DATA) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; delete the run's folder") from error


def _start(run_dir: Path, versions: Sequence[int], request: Request, out: Path) -> ChildProcess:
    """Start evaluating `versions` of a run. The temperature is the run file's `evaluation.temperature`."""
    arguments = [*(f"{run_dir}@{version}" for version in versions), "--problems", str(request.held_out), "--attempts", "1"]
    if request.held_out_args:
        args = request.config.environment.args | request.held_out_args
        arguments.append(f"--environment.args={msgspec.json.encode(args).decode()}")
    environment: dict[str, str] = {}
    if request.config.engine.device == "cpu":
        arguments += ["--engine.threads", "1"]
        environment = process_environment("generation", 1)
    command = [sys.executable, "-m", "pipelinerl", "eval", *arguments, "--out", str(out)]
    return ChildProcess(command, log=out.with_suffix(".log"), environment=environment)


def _answers_of(process: ChildProcess, out: Path, run_dir: Path) -> Iterator[Answered]:
    if process.running:  # another process has failed, and raises below
        return
    if process.status:
        last = (process.log_lines() or [f"its process {process.how_it_ended()}"])[-1]
        raise PipelineRLError(f"evaluating the weights of {run_dir} failed: {last.removeprefix('error: ')}")
    for model in msgspec.json.decode((out / "summary.json").read_bytes())["models"]:
        reward, failed = model["estimates"]["reward"], sum(model["failed"].values())
        version, mean, low, high = model["version"], reward["mean"], reward["low"], reward["high"]
        yield Answered(version=version, reward=mean, low=low, high=high, failed=failed)

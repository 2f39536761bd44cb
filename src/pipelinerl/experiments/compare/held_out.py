"""The held-out rewards of a comparison's runs.

Schedules are compared by held-out rewards of a run's versions, measured after the run. A training reward belongs to the
weights that sampled the rollout, which are older by the schedule's lag. Held-out problems are answered by the weights of
each version, with the same versions, problems and random numbers for every schedule.

timed run ─▶ weights/step_* ─▶ `pipelinerl eval` in up to one process per core ─▶ held_out.json, and the weights are removed
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import (
    INVALID_DATA,
    ConfigError,
    PipelineRLError,
    RunDirectoryError,
    RunInterruptedError,
)
from pipelinerl.experiments.compare.settings import ComparisonRequest
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.process import counted_interrupts
from pipelinerl.resources.share import process_environment

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


def check_held_out(request: ComparisonRequest) -> None:
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


def answer_held_out(run_dir: Path, request: ComparisonRequest) -> list[Answered]:
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


def _start(run_dir: Path, versions: Sequence[int], request: ComparisonRequest, out: Path) -> ChildProcess:
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

"""Held-out rewards of a run's versions, measured after the run. Schedules are compared by these rewards.

A training reward belongs to the weights that sampled the rollout, which are older by the schedule's lag. Held-out problems
are answered by the weights of each version, with the same versions, problems and random numbers for every schedule.

timed run ─▶ weights/step_* ─▶ `pipelinerl eval` in one process per core ─▶ held_out.json, and the weights are removed
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import ConfigError, PipelineRLError, RunDirectoryError, RunInterruptedError
from pipelinerl.experiments.compare.request import Request
from pipelinerl.launch.hosts.interrupts import counted_interrupts
from pipelinerl.launch.hosts.resources import thread_environment
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.report.files import write_file

HELD_OUT_FILE = "held_out.json"
POLL_S = 0.1
STOP_S = 2.0
"""Time for an evaluation to end once it is told to. Its results are not used."""
_EVAL = "import sys; from pipelinerl.cli import main; sys.exit(main())"


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of weights `version` over the held-out problems, one attempt each, and its 95% bootstrap interval.

    `failed` attempts count as reward 0.
    """

    version: int
    reward: float
    low: float
    high: float
    failed: int = 0


# ---- the fields of an evaluation's `summary.json` that are read
class _Interval(msgspec.Struct):
    mean: float
    low: float
    high: float


class _Estimates(msgspec.Struct):
    reward: _Interval


class _Model(msgspec.Struct):
    version: int
    estimates: _Estimates
    failed: dict[str, int]


class _Summary(msgspec.Struct):
    models: tuple[_Model, ...]


class _Part(NamedTuple):
    """One evaluation process, and the folder of its results."""

    process: ChildProcess
    out: Path


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

    On CPUs the versions are distributed over one process per core. Raises PipelineRLError with the last line of output if
    an evaluation fails, and RunInterruptedError.
    """
    versions = request.evaluated_versions
    workers = min(len(versions), request.machine.cores) if request.config.engine.device == "cpu" else 1
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=run_dir, prefix=".held-out-")))
        interrupts = cleanup.enter_context(counted_interrupts(raising=True))
        processes: list[ChildProcess] = []
        cleanup.callback(stop_all, processes, STOP_S)
        parts = []
        for number in range(workers):
            parts.append(_start(run_dir, versions[number::workers], request, scratch / str(number)))
            processes.append(parts[-1].process)
        while any(process.running for process in processes):
            if interrupts.count:
                raise RunInterruptedError("stopped during an evaluation")
            if any(process.status for process in processes):
                break
            time.sleep(POLL_S)
        found = [model for part in parts for model in _models_of(part, run_dir)]
    answered = [
        Answered(
            version=model.version,
            reward=model.estimates.reward.mean,
            low=model.estimates.reward.low,
            high=model.estimates.reward.high,
            failed=sum(model.failed.values()),
        )
        for model in found
    ]
    return sorted(answered, key=lambda one: one.version)


def read_answers(run_dir: Path) -> list[Answered]:
    """Read what `write_answers` wrote, ascending by version; empty if not evaluated. Raises RunDirectoryError."""
    path = run_dir / HELD_OUT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Answered])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; delete the run's folder") from error


def write_answers(run_dir: Path, answered: Sequence[Answered]) -> None:
    write_file(run_dir / HELD_OUT_FILE, msgspec.json.format(msgspec.json.encode(answered)) + b"\n")


def _start(run_dir: Path, versions: Sequence[int], request: Request, out: Path) -> _Part:
    """Start evaluating `versions` of a run. The temperature is the run file's `evaluation.temperature`."""
    arguments = [*(f"{run_dir}@{version}" for version in versions), "--problems", str(request.held_out), "--attempts", "1"]
    for key, value in request.held_out_args.items():
        arguments += ["--env-arg", f"{key}={msgspec.json.encode(value).decode()}"]
    environment: dict[str, str] = {}
    if request.config.engine.device == "cpu":
        arguments += ["--threads", "1"]
        environment = thread_environment(1)
    command = [sys.executable, "-c", _EVAL, "eval", *arguments, "--out", str(out)]
    return _Part(ChildProcess(command, log=out.with_suffix(".log"), environment=environment), out)


def _models_of(part: _Part, run_dir: Path) -> tuple[_Model, ...]:
    if part.process.running:  # another process has failed, and raises below
        return ()
    if part.process.status:
        last = (part.process.log_lines() or [f"its process {part.process.how_it_ended()}"])[-1]
        raise PipelineRLError(f"evaluating the weights of {run_dir} failed: {last.removeprefix('error: ')}")
    return msgspec.json.decode((part.out / "summary.json").read_bytes(), type=_Summary).models

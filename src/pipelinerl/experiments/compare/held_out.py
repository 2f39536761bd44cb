"""The held-out rewards of a comparison's runs.

Schedules are compared by held-out rewards of a run's versions, measured after the run. A training reward belongs to the
weights that sampled the rollout, which are older by the schedule's lag. Held-out problems are answered by the weights of
each version, with the same versions, problems and random numbers for every schedule.

timed run ─▶ weights/step_* ─▶ `pipelinerl eval` in up to one process per core ─▶ held_out.json, and the weights are removed
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import INVALID_DATA, ConfigError, RunDirectoryError
from pipelinerl.experiments.compare.request import ComparisonRequest
from pipelinerl.experiments.runs import Command, run_commands
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.resources.roles import process_environment

HELD_OUT_FILE = "held_out.json"
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

    The temperature is the run file's `evaluation.temperature`. On CPUs the versions are distributed over one process per
    core, each with at least `WORTH_A_PROCESS` attempts. Raises PipelineRLError if an evaluation fails, RunInterruptedError.
    """
    versions, config = request.evaluated_versions, request.config
    flags = ["--problems", str(request.held_out), "--attempts", "1"]
    if request.held_out_args:
        args = config.environment.args | request.held_out_args
        flags.append(f"--environment.args={msgspec.json.encode(args).decode()}")
    processes, environment = 1, {}
    if config.engine.device == "cpu":
        flags += ["--engine.threads", "1"]
        environment = process_environment("generation", 1)
        processes = min(len(versions), request.machine.cores, 1 + len(versions) * request.held_out // WORTH_A_PROCESS)
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".held-out-") as scratch:
        outs = [Path(scratch) / str(number) for number in range(processes)]
        commands = []
        for number, out in enumerate(outs):
            models = [f"{run_dir}@{version}" for version in versions[number::processes]]
            arguments = ["eval", *models, *flags, "--out", str(out)]
            commands.append(Command(arguments, out.with_suffix(".log"), environment))
        run_commands(commands)
        found = [model for out in outs for model in msgspec.json.decode((out / "summary.json").read_bytes())["models"]]
    answered = []
    for model in sorted(found, key=lambda model: int(model["version"])):
        reward, failed = model["estimates"]["reward"], sum(model["failed"].values())
        mean, low, high = reward["mean"], reward["low"], reward["high"]
        answered.append(Answered(version=model["version"], reward=mean, low=low, high=high, failed=failed))
    return answered


def read_answers(run_dir: Path) -> list[Answered]:
    """Read the run's answers, ascending by version; empty if it is not evaluated. Raises RunDirectoryError."""
    path = run_dir / HELD_OUT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Answered])
    except FileNotFoundError:
        return []
    except (OSError, *INVALID_DATA) as error:
        raise RunDirectoryError(f"can't read {path}: {error}; delete the run's folder") from error

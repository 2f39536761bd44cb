"""What a run takes of the machine: the CPU threads of each role, and memory."""

from __future__ import annotations

import os
import resource
import sys
from typing import NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.interfaces import Schedule

GENERATION_NICENESS = 10
"""Of generation processes that share cores with the trainer. Engines that outrun it only fill the stream with older data."""
PREPROCESSING_THREADS = 1
"""Of a preprocessing process. Without a reference model it computes next to nothing."""
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class Threads(NamedTuple):
    """`generation`: of each process that generates tokens, a generation process or an engine server started here."""

    generation: int
    training: int


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(config: RunConfig, schedule: Schedule) -> bool:
    """Whether generation and training compute at the same time. Else each has the whole machine in its turn."""
    return not schedule.takes_turns() and config.launch.kind == "processes"


def engines_here(config: RunConfig) -> int:
    """How many processes of the run generate tokens: none if servers elsewhere do."""
    if config.engine.kind == "local":
        return config.engine.processes
    return 0 if config.engine.urls else config.engine.servers


def plan_threads(config: RunConfig, schedule: Schedule, cores: int) -> Threads:
    """Threads of each process: what the run file says, else shares of the cores, never more threads than cores.

    A schedule whose phases take turns gives each phase the whole machine: while one computes, the other sleeps. So does the
    embedded launcher, where there is one thread of control. Otherwise one process that generates has half the cores; of
    several, each has one (that is what they are for), and the trainer what they leave. Of a generation process that only
    talks to servers nothing is heard here: its one thread mostly waits.
    """
    engines = engines_here(config)
    if not side_by_side(config, schedule):
        generation, training = cores // max(1, engines), cores
    elif engines == 1:
        generation, training = cores // 2, cores - cores // 2
    else:
        generation, training = 1, cores - engines
    return Threads(config.engine.threads or max(1, generation), config.trainer.threads or max(1, training))


def generation_threads(config: RunConfig, schedule: Schedule, cores: int) -> int:
    """Of a generation process: one that only talks to engine servers computes nothing."""
    return plan_threads(config, schedule, cores).generation if config.engine.kind == "local" else 1


def trainer_goes_first(config: RunConfig, schedule: Schedule, cores: int) -> bool:
    """Whether what generates is to yield to the trainer: it runs at the same time, and on the same cores."""
    return config.engine.device == "cpu" and not schedule.takes_turns() and engines_here(config) + 1 > cores


def check_devices(config: RunConfig) -> None:
    """Raise UserError if a device that the run computes on is not there. Loads torch only if one is not the CPU.

    vLLM has an environment, and a PyTorch, of its own.
    """
    devices = {"trainer.device": config.trainer.device}
    if config.engine.kind != "vllm" and engines_here(config):
        devices["engine.device"] = config.engine.device
    for setting, device in devices.items():
        if device == "cpu":
            continue
        from pipelinerl.models.loading import require_device  # noqa: PLC0415 - loads torch into this process

        try:
            require_device(device)
        except UserError as error:
            raise UserError(f"{setting}: {error}") from error


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that keep every numerical library of a process to `threads` threads from its first import."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def peak_memory_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

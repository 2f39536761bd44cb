"""The processes of a run: their names (roles), used in messages, log names and command lines, their stages, and their shares
of the CPU threads of a machine. `placement` has the machine and GPUs of each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.schedule import Schedule
from pipelinerl.status.board import generation_stages
from pipelinerl.types import PREPROCESSOR, TRAINER

if TYPE_CHECKING:
    from pipelinerl.process.forks import ForkServer

TRAINING = "training"
PREPROCESSING = "preprocessing"


def generation_roles(config: RunConfig) -> list[str]:
    """The generation processes, numbered only if there are several."""
    processes = config.engine.processes
    return ["generation"] if processes == 1 else [f"generation-{index}" for index in range(processes)]


def server_roles(config: RunConfig) -> list[str]:
    """The engine servers that the run starts itself."""
    if config.engine.kind == "local" or config.engine.urls:
        return []
    return [f"server-{index}" for index in range(config.engine.servers)]


def rank_roles(config: RunConfig) -> list[str]:
    """The processes of a sharded trainer besides rank 0, which is `TRAINING`. They publish no status."""
    return [f"{TRAINING}-rank-{rank}" for rank in range(1, config.trainer.ranks)]


def worker_roles(config: RunConfig) -> list[str]:
    """The processes that run stages."""
    preprocessing = [PREPROCESSING] if config.launch.preprocessor == "process" else []
    return [*generation_roles(config), *preprocessing, TRAINING, *rank_roles(config)]


def stages_of(config: RunConfig, role: str) -> list[str]:
    """The names on the status board of the stages of one process. Engine servers have none."""
    if role in (roles := generation_roles(config)):
        return [*generation_stages(config.engine.processes)[roles.index(role)]]
    return {TRAINING: [TRAINER], PREPROCESSING: [PREPROCESSOR]}.get(role, [])


def on_gpus(config: RunConfig) -> bool:
    """Whether any of the processes computes on a CUDA device."""
    return config.engine.device.startswith("cuda") or config.trainer.device.startswith("cuda")


# ---- CPU threads

PREPROCESSING_THREADS = 1
"""For a preprocessing process. Without a reference model it computes almost nothing."""


class Share(NamedTuple):
    """The CPU threads of a process, and whether it yields to the trainer, which computes on the same cores."""

    threads: int
    yields: bool


def shares_of(config: RunConfig, schedule: Schedule, roles: Sequence[str], cores: int) -> dict[str, Share]:
    """The shares of processes that are on one machine with `cores` cores. Threads are as the run file sets them, or else:

    If generation and training alternate (by the schedule, or in the embedded launcher), each phase gets all cores, which
    several processes share. Otherwise a single process that generates tokens gets half the cores; with several, each gets
    one core, and the trainer gets the rest. A generation process that only talks to engine servers gets one thread, as it
    computes nothing. Engines yield to the trainer if both compute at the same time on the same cores.
    """
    computing = generation_roles(config) if config.engine.kind == "local" else server_roles(config)
    training = [TRAINING, *rank_roles(config)]
    engines, ranks = (len({*kind} & {*roles}) for kind in (computing, training))
    if not ranks or schedule.takes_turns or config.launch.kind == "embedded":
        generating, trained = cores // max(1, engines), cores
    elif engines == 1:
        generating, trained = cores // 2, cores - cores // 2
    else:
        generating, trained = 1, cores - engines
    behind = ranks > 0 and config.engine.device == "cpu" and not schedule.takes_turns and engines + 1 > cores
    shares = dict.fromkeys(roles, Share(PREPROCESSING_THREADS, False))
    for role in roles:
        if role in computing:
            shares[role] = Share(config.engine.threads or max(1, generating), behind)
        elif role in training:
            shares[role] = Share(config.trainer.threads or max(1, trained // ranks), False)
    return shares


def process_environment(threads: int) -> dict[str, str]:
    """Environment variables that limit the numerical libraries of a process to `threads` threads, from the first import.

    They also allocate huge pages, so that a decode step reads its weights faster (docs/benchmarks.md).
    """
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    pages = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return limits | {"GLIBC_TUNABLES": pages}


# ---- how they start

IMPORTED = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "torch.export._trace")
"""What takes most of the time that a process takes to start."""


def fork_server(config: RunConfig) -> AbstractContextManager[ForkServer | None]:
    """What starts the processes of a run; None if they are started by commands."""
    from pipelinerl.process.forks import ForkServer, can_fork  # noqa: PLC0415 - only the launcher forks

    if config.launch.kind != "processes" or on_gpus(config) or not can_fork():
        return nullcontext()
    return ForkServer(IMPORTED, process_environment(1), config.launch.startup_timeout_s)

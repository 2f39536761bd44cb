"""The CPU threads of each process of a run: its share of the machine, and whether it yields to the trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import Schedule
from pipelinerl.resources.roles import TRAINING, generation_roles, rank_roles, server_roles

PREPROCESSING_THREADS = 1
"""For a preprocessing process. Without a reference model it computes almost nothing."""


class Threads(NamedTuple):
    """CPU threads. `generation` is for each process that generates tokens, including engine servers that the run starts;
    `training` is for each rank of the trainer.
    """

    generation: int
    training: int


class Share(NamedTuple):
    """The CPU threads of a process, and whether it yields to the trainer, which computes on the same cores."""

    threads: int
    yields: bool


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(config: RunConfig, schedule: Schedule) -> bool:
    """Whether generation and training compute at the same time. Otherwise they alternate, each with the whole machine."""
    return not schedule.takes_turns() and config.launch.kind != "embedded"


def engines_here(config: RunConfig) -> int:
    """How many processes of this run generate tokens: none with external engine servers."""
    if config.engine.kind == "local":
        return config.engine.processes
    return 0 if config.engine.urls else config.engine.servers


def plan_threads(
    config: RunConfig, schedule: Schedule, cores: int, *, engines: int | None = None, ranks: int | None = None
) -> Threads:
    """Threads of each process: as the run file sets them, or by default shares of the cores of its machine.

    `engines`: how many processes on this machine generate tokens, `ranks`: how many train (None: all of the run).

    If generation and training alternate (by the schedule, or in the embedded launcher), each phase gets all cores, which
    several generating processes share. Otherwise a single generating process gets half the cores; with several, each gets
    one core, and the trainer gets the rest. A generation process that only talks to servers is not counted: it is mostly
    idle.
    """
    engines = engines_here(config) if engines is None else engines
    ranks = config.trainer.ranks if ranks is None else ranks
    if not ranks or not side_by_side(config, schedule):
        generation, training = cores // max(1, engines), cores
    elif engines == 1:
        generation, training = cores // 2, cores - cores // 2
    else:
        generation, training = 1, cores - engines
    return Threads(config.engine.threads or max(1, generation), config.trainer.threads or max(1, training // max(1, ranks)))


def shares_of(config: RunConfig, schedule: Schedule, roles: Sequence[str], cores: int) -> dict[str, Share]:
    """The shares of processes that are on one machine with `cores` cores.

    A generation process that only talks to engine servers gets one thread, as it computes nothing.
    """
    computing = {*(generation_roles if config.engine.kind == "local" else server_roles)(config)}
    training = {TRAINING, *rank_roles(config)}
    engines, ranks = len(computing.intersection(roles)), len(training.intersection(roles))
    threads = plan_threads(config, schedule, cores, engines=engines, ranks=ranks)
    behind = ranks > 0 and trainer_goes_first(config, schedule, cores, engines)
    shares = {role: Share(threads.training if role in training else PREPROCESSING_THREADS, False) for role in roles}
    return shares | {role: Share(threads.generation, behind) for role in roles if role in computing}


def trainer_goes_first(config: RunConfig, schedule: Schedule, cores: int, engines: int | None = None) -> bool:
    """Whether generation yields to the trainer, because both compute at the same time on the same cores.

    `engines`: how many processes generate tokens beside the trainer; None: all of the run.
    """
    engines = engines_here(config) if engines is None else engines
    return config.engine.device == "cpu" and not schedule.takes_turns() and engines + 1 > cores


def process_environment(role: str, threads: int) -> dict[str, str]:
    """Environment variables that limit the numerical libraries of a process to `threads` threads, from the first import.

    A process that generates tokens allocates huge pages: a decode step reads its weights faster (docs/benchmarks.md).
    """
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    pages = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return limits | ({"GLIBC_TUNABLES": pages} if role.startswith(("generation", "server-")) else {})

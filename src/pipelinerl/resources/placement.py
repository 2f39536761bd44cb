"""Decides on which machine and GPUs each process of a run is started. Pure: a function of the run file and the machines.

Processes that need most GPUs are placed first, so that a smaller one never takes the last room of a larger one. Each goes
where most GPUs, and then most CPUs, are free. A process that belongs to another (`Role.beside`) goes to the same machine if
it fits there. GPUs are a limit; CPUs are not, they only balance the machines. A GPU is shared only by processes whose device
in the run file has its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.resources.machine import usable_cores, usable_gpus
from pipelinerl.resources.roles import (
    PREPROCESSING,
    PREPROCESSING_THREADS,
    TRAINING,
    Share,
    generation_roles,
    rank_roles,
    server_roles,
    shares_of,
)
from pipelinerl.schedule import Schedule


class Node(NamedTuple):
    """A machine of the cluster, with the CPUs and GPUs that the run may use. `address`: where the others reach it."""

    name: str
    address: str
    cpus: int
    gpus: int = 0


class Role(NamedTuple):
    """A process to place. `cpus`: threads that it will use; None: half of its machine's.

    `beside`: the role whose machine it should share, if that has room; a process without it is spread. `at`: the GPU that
    the run file names, which others may use too.
    """

    name: str
    gpus: int = 0
    cpus: int | None = 1
    beside: str | None = None
    at: int | None = None


class Placement(NamedTuple):
    """Where a process runs: the machine's name, and the GPUs of that machine that it has, counted from 0."""

    role: str
    machine: str
    gpus: tuple[int, ...] = ()


def roles_of(config: RunConfig) -> list[Role]:
    """The processes of a run and what they need. A process on a GPU has one, of its own if its device has no number."""
    engine, trainer = config.engine, config.trainer
    (on_engine, engine_at), (on_trainer, trainer_at) = map(_gpu, (engine.device, trainer.device))
    roles = [Role(TRAINING, on_trainer, trainer.threads, at=trainer_at)]
    for rank, name in enumerate(rank_roles(config), start=1):  # on GPUs they are together, as they exchange most
        beside, at = roles[-1].name if on_trainer else None, None if trainer_at is None else trainer_at + rank
        roles.append(Role(name, on_trainer, trainer.threads, beside, at))
    if config.launch.preprocessor == "process":
        gpus, at = (on_trainer, trainer_at) if trainer.loads_reference else (0, None)
        roles.append(Role(PREPROCESSING, gpus, PREPROCESSING_THREADS, TRAINING, at))
    roles += [Role(name, on_engine * engine.vllm_workers, engine.threads, at=engine_at) for name in server_roles(config)]
    gpus, cpus, at = (on_engine, engine.threads, engine_at) if engine.kind == "local" else (0, 1, None)
    return roles + [Role(name, gpus, cpus, at=at) for name in generation_roles(config)]


def _gpu(device: str) -> tuple[int, int | None]:
    """The number of GPUs of a process on `device`, and the GPU that it names."""
    kind, _, number = device.partition(":")
    return int(kind == "cuda"), int(number) if number else None


def place(roles: Sequence[Role], machines: Sequence[Node], pins: Mapping[str, str]) -> list[Placement]:
    """A place for each role, in the order of `roles`.

    `pins`: role -> name or address of its machine, from the run file. Raises UserError, with numbers, if it is impossible.
    """
    pinned: dict[str, Node] = {}
    for role_name, wanted_name in pins.items():
        named = [machine for machine in machines if wanted_name in (machine.name, machine.address)]
        if not named:
            names = ", ".join(machine.name for machine in machines)
            raise UserError(f"launch.place: there is no machine {wanted_name} for {role_name}; the cluster has {names}")
        pinned[role_name] = named[0]
    if unknown := pinned.keys() - {role.name for role in roles}:
        names = ", ".join(role.name for role in roles)
        raise UserError(f"launch.place: this run has no process {min(unknown)}; it has {names}")
    free_gpus = {machine.name: list(range(machine.gpus)) for machine in machines}
    free_cpus = {machine.name: float(machine.cpus) for machine in machines}
    places: dict[str, Placement] = {}
    for role in sorted(roles, key=lambda role: (role.name not in pinned, role.at is None, -role.gpus)):
        wanted = [pinned[role.name]] if role.name in pinned else machines
        if role.at is not None:
            fitting = [machine for machine in wanted if role.at + role.gpus <= machine.gpus]
        else:
            fitting = [machine for machine in wanted if len(free_gpus[machine.name]) >= role.gpus]
        if not fitting:
            rooms = ", ".join(f"{len(free_gpus[machine.name])} of {machine.gpus} on {machine.name}" for machine in wanted)
            what = f"{role.gpus} free GPUs" if role.at is None else f"a GPU cuda:{role.at + role.gpus - 1}"
            using = ", ".join(f"{one.name} {one.gpus}" for one in roles if one.gpus)
            raise UserError(
                f"no machine has {what} for {role.name}: the run's processes need {sum(one.gpus for one in roles)} GPUs in "
                f"all ({using}); when it is placed, {rooms} are free; add machines, lower engine.processes, engine.servers "
                "or trainer.ranks, or (without Ray) share a GPU: --engine.device cuda:0 --trainer.device cuda:0"
            )
        near = places[role.beside].machine if role.beside in places else None
        ranked = [(one.name == near, len(free_gpus[one.name]), free_cpus[one.name]) for one in fitting]
        best = fitting[ranked.index(max(ranked))]
        taken = free_gpus[best.name][: role.gpus] if role.at is None else range(role.at, role.at + role.gpus)
        free_gpus[best.name] = [gpu for gpu in free_gpus[best.name] if gpu not in taken]
        free_cpus[best.name] -= best.cpus / 2 if role.cpus is None else role.cpus
        places[role.name] = Placement(role.name, best.name, tuple(taken))
    return [places[role.name] for role in roles]


def place_here(config: RunConfig) -> tuple[list[Placement], Node]:
    """A place on this machine for each process of a run, and the machine.

    Raises UserError, with numbers and what to do, if there are too few GPUs.
    """
    gpus = usable_gpus()
    if not gpus:  # of another maker than NVIDIA, perhaps
        import torch  # noqa: PLC0415 - takes seconds

        gpus = torch.cuda.device_count()
    machine = Node("this machine", "this machine", usable_cores(), gpus)
    return place(roles_of(config), [machine], {}), machine


def visible_gpus(config: RunConfig, places: Sequence[Placement], outer: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the processes that see only their own GPU; `outer`: the value for the launcher.

    `place` has chosen a GPU for these, or they are vLLM's, which takes the first that it sees. The others find
    theirs by the number in the run file.
    """
    numbered = {role.name for role in roles_of(config) if role.at is not None}
    if config.engine.kind == "vllm":
        numbered -= set(server_roles(config))
    names = outer.split(",") if outer else None
    return {
        place.role: ",".join(names[gpu] if names else str(gpu) for gpu in place.gpus)
        for place in places
        if place.gpus and place.role not in numbered
    }


def placement_lines(places: Sequence[Placement], machines: Sequence[Node]) -> list[str]:
    """The placement as text, one machine a line."""
    lines = ["placement:"]
    for machine in machines:
        here = [
            place.role + (f" (GPU {', '.join(map(str, place.gpus))})" if place.gpus else "")
            for place in places
            if place.machine == machine.name
        ]
        known = machine.name if machine.name == machine.address else f"{machine.name} ({machine.address})"
        has = f"{machine.cpus} CPUs, {machine.gpus} GPUs"
        lines.append(f"  {known}, {has}: {', '.join(here) or 'nothing'}")
    return lines


def shares_on(
    config: RunConfig, schedule: Schedule, places: Sequence[Placement], machines: Sequence[Node]
) -> dict[str, Share]:
    """The share that each process has of the CPUs of its machine."""
    shares: dict[str, Share] = {}
    for machine in machines:
        here = [place.role for place in places if place.machine == machine.name]
        shares |= shares_of(config, schedule, here, machine.cpus)
    return shares

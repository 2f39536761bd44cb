"""Where processes run: each once, no GPU twice, spread or together, and refused only if it is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError
from pipelinerl.launch.hosts import host as host_module
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.resources import placement
from pipelinerl.resources.placement import (
    Node,
    Placement,
    Role,
    place,
    place_here,
    placement_lines,
    roles_of,
    shares_on,
    visible_gpus,
)
from pipelinerl.resources.roles import Share
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule

RAY = ["--launch.kind=ray", "--weights.kind=collective"]


def cluster(*gpus: int, cpus: int = 8) -> list[Node]:
    return [Node(f"m{index}", f"10.0.0.{index}", cpus, count) for index, count in enumerate(gpus)]


def possible(sizes: Sequence[int], gpus: Sequence[int]) -> bool:
    """By trying everything."""
    return any(
        all(
            sum(size for size, on in zip(sizes, choice, strict=True) if on == index) <= room
            for index, room in enumerate(gpus)
        )
        for choice in product(range(len(gpus)), repeat=len(sizes))
    )


@given(st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=5), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_every_role_once_no_gpu_twice_and_refused_only_if_impossible(sizes: list[int], gpus: list[int]) -> None:
    roles = [Role(f"r{index}", size, beside="r0" if index % 2 else None) for index, size in enumerate(sizes)]
    machines = cluster(*gpus)
    if not possible(sizes, gpus):
        with pytest.raises(UserError, match=rf"need {sum(sizes)} GPUs in all"):
            place(roles, machines, {})
        return
    places = place(roles, machines, {})
    assert [found.role for found in places] == [role.name for role in roles]
    assert [len(found.gpus) for found in places] == sizes
    used = [(found.machine, gpu) for found in places for gpu in found.gpus]
    assert len(used) == len(set(used))
    room = {machine.name: machine.gpus for machine in machines}
    assert all(gpu < room[machine] for machine, gpu in used)


def test_ranks_on_gpus_are_beside_each_other_while_there_is_room() -> None:
    def machines_of_ranks(machines: list[Node], *flags: str) -> str:
        roles = roles_of(load_config(None, [*RAY, "--trainer.ranks=4", *flags]))
        on = {found.role: found.machine for found in place(roles, machines, {})}
        return " ".join(on[role.name] for role in roles if role.name.startswith("training"))

    assert machines_of_ranks(cluster(4, 4), "--trainer.device=cuda") == "m0 m0 m0 m0"
    assert machines_of_ranks(cluster(3, 2), "--trainer.device=cuda") == "m0 m0 m0 m1"
    assert machines_of_ranks(cluster(0, 0, 0)) == "m0 m1 m2 m0", "without GPUs they are spread"


def test_a_pinned_process_gets_its_machine_before_the_others_are_placed_or_is_refused() -> None:
    roles = [Role("training", 2), Role("server-0", 1), Role("server-1", 1)]
    places = place(roles, cluster(2, 2), {"server-0": "10.0.0.0"})
    on = {one.role: (one.machine, one.gpus) for one in places}
    assert on == {"training": ("m1", (0, 1)), "server-0": ("m0", (0,)), "server-1": ("m0", (1,))}
    with pytest.raises(UserError, match="no machine m7 for server-0; the cluster has m0, m1"):
        place(roles, cluster(2, 2), {"server-0": "m7"})
    with pytest.raises(UserError, match="this run has no process server-9; it has training, server-0"):
        place(roles, cluster(2, 2), {"server-9": "m0"})


def test_the_processes_of_a_run_and_what_they_need() -> None:
    flags = ["--engine.kind=http", "--engine.servers=2", "--engine.device=cuda", "--trainer.device=cuda"]
    config = load_config(None, [*RAY, *flags, "--launch.preprocessor=process", "--trainer.threads=4"])
    assert [(role.name, role.gpus, role.cpus) for role in roles_of(config)] == [
        ("training", 1, 4),
        ("preprocessing", 0, 1),
        ("server-0", 1, None),
        ("server-1", 1, None),
        ("generation", 0, 1),
    ]
    places = place(roles_of(config), cluster(2, 2), {})
    lines = placement_lines(places, cluster(2, 2))
    assert lines[0] == "placement:"
    assert lines[1].startswith("  m0 (10.0.0.0), 8 CPUs, 2 GPUs: training (GPU 0), preprocessing")


def test_cpus_are_shares_of_the_machine_that_a_process_is_on() -> None:
    config = load_config(None, [*RAY, "--engine.processes=3"])
    places = [
        Placement("training", "m0"),
        *(Placement(f"generation-{i}", name) for i, name in enumerate(("m0", "m1", "m1"))),
    ]
    shares = shares_on(config, make_schedule(config), places, cluster(0, 0))
    assert shares == {role: Share(4, False) for role in ("training", "generation-0", "generation-1", "generation-2")}
    small = shares_on(config, make_schedule(config), places, cluster(0, 0, cpus=1))
    assert [share.yields for share in small.values()] == [False, True, False, False], "only where the trainer is"


def gpus_of(flags: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Of the processes that have any, in a run on this machine with so many."""
    monkeypatch.setattr(placement, "usable_gpus", lambda: gpus)
    return {found.role: list(found.gpus) for found in place_here(load_config(None, flags.split()))[0] if found.gpus}


CUDA = "--engine.device=cuda --trainer.device=cuda"
PARALLEL = "--engine.kind=vllm --engine.python=python --engine.vllm_args=[--tensor-parallel-size=2]"
ONE = "--engine.device=cuda:0 --trainer.device=cuda:0"


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        (CUDA, 2, {"training": [0], "generation": [1]}),
        (ONE, 1, {"training": [0], "generation": [0]}),
        (
            "--engine.device=cuda --trainer.device=cuda:2 --trainer.ranks=2",
            4,
            {"training": [2], "training-rank-1": [3], "generation": [0]},
        ),
        (
            f"{CUDA} --engine.kind=vllm --engine.python=python --engine.servers=2",
            3,
            {"training": [0], "server-0": [1], "server-1": [2]},
        ),
        (f"{CUDA} {PARALLEL} --engine.servers=2", 5, {"training": [4], "server-0": [0, 1], "server-1": [2, 3]}),
        (f"--engine.device=cuda:1 {PARALLEL} --trainer.device=cuda", 3, {"training": [0], "server-0": [1, 2]}),
        (
            f"{CUDA} --launch.preprocessor=process --trainer.kl_coefficient=0.1 --preprocess.zero_advantage=keep",
            3,
            {"training": [0], "preprocessing": [1], "generation": [2]},
        ),
    ],
)
def test_on_this_machine_a_gpu_is_shared_only_if_it_is_named(
    flags: str, gpus: int, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus_of(flags, gpus, monkeypatch) == expected


@pytest.mark.parametrize(
    ("flags", "gpus", "message"),
    [
        (f"{CUDA} --engine.processes=8", 8, r"need 9 GPUs in all \(training 1, generation-0 1, .* 0 of 8 on this machine"),
        (f"{CUDA} --engine.kind=http --engine.servers=8", 8, r"need 9 GPUs .*\(training 1, server-0 1, .* engine.servers"),
        (CUDA, 1, r"need 2 .*share a GPU: --engine.device cuda:0 --trainer.device cuda:0$"),
        ("--engine.device=cuda --trainer.device=cuda:0", 1, r"has 1 free GPUs for generation: .* 0 of 1 on this machine"),
        ("--trainer.device=cuda:1 --trainer.ranks=4", 4, r"no machine has a GPU cuda:4 for training-rank-3.* of 4 on this"),
    ],
)
def test_more_processes_than_gpus_are_refused_with_numbers(
    flags: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        gpus_of(flags, gpus, monkeypatch)


@pytest.mark.parametrize(
    ("flags", "outer", "expected"),
    [
        (CUDA, None, {"training": "0", "generation": "1"}),
        (CUDA, "4,GPU-7f,6", {"training": "4", "generation": "GPU-7f"}),
        (ONE, None, {}),
        ("--engine.device=cuda:1 --trainer.device=cuda", None, {"training": "0"}),
        (
            "--engine.kind=vllm --engine.python=python --engine.servers=2 --engine.device=cuda:1",
            None,
            {"server-0": "1", "server-1": "1"},
        ),
        (f"--engine.device=cuda:1 {PARALLEL}", "4,7,9", {"server-0": "7,9"}),
    ],
)
def test_a_process_sees_only_the_gpu_that_was_chosen_for_it(
    flags: str, outer: str | None, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placement, "usable_gpus", lambda: 3)
    config = load_config(None, flags.split())
    assert visible_gpus(config, place_here(config)[0], outer) == expected
    started = {}

    def start(_: RunDirectory, role: str, *__: Any, environment: dict[str, str], **___: Any) -> Any:
        started[role] = environment.get("CUDA_VISIBLE_DEVICES")
        return SimpleNamespace(role=role, running=False, pid=1)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    monkeypatch.setattr(host_module, "LocalWorker", start)
    (tmp_path / "control").mkdir()
    session = Session(config, RunDirectory(tmp_path), StartPlan(), make_schedule(config), 0.0)
    with host_module.LocalHost(session, 0) as host:
        for role in ("training", "generation", "server-0", "server-1"):
            if role in {found.name for found in roles_of(config)}:
                host.start(role)
    assert {role: gpus for role, gpus in started.items() if gpus is not None} == expected
    assert host.placement[0] == "placement:"

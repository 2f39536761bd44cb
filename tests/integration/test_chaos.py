"""The chaos suite: its checks find what they should in records that were changed, and short runs with faults hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import main
from tests.chaos.invariants import check
from tests.chaos.plan import LAYOUTS
from tests.integration.runs import resume, run

HALF, GOAL, GROUP = 3, 6, 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sessions."""
    run_dir = tmp_path_factory.mktemp("chaos") / "r"
    run(run_dir, trainer__steps=HALF, trainer__batch_size=10, engine__slots=32)
    resume(run_dir, trainer__steps=GOAL)
    return run_dir


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "r")


Lines = list[Any]


def change(run_dir: Path, name: str, edit: Callable[[Lines], object]) -> None:
    path = run_dir / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


GROUPS, TRAINED, METRICS = "rollouts/rollouts.jsonl", "rollouts/trained.jsonl", "metrics.jsonl"


def first_completion(lines: Lines) -> dict[str, Any]:
    """Of the first group, which the first step trained on."""
    found: dict[str, Any] = lines[0]["rollouts"][0]["turns"][0]["completion"]
    return found


def lose_a_group(lines: Lines) -> None:
    """A group was handed over that nothing was trained on, and that does not wait: of the lowest index that is free."""
    indices = {line["index"] for line in lines}
    index = next(index for index in range(len(lines) + 1) if index not in indices)
    lost = json.loads(json.dumps(lines[0]).replace("g0.a", f"g{index}.a"))
    lines.append({**lost, "index": index})


CHANGES: dict[str, tuple[str, str, Callable[[Lines], object]]] = {
    "a step is not in the metrics": ("steps: metrics.jsonl", METRICS, lambda lines: lines.pop(2)),
    "a batch lacks a rollout": ("has 9 rollouts, not 10", TRAINED, lambda lines: lines[0]["samples"].pop()),
    "a rollout is trained on twice": (
        "once: ",
        TRAINED,
        lambda lines: lines[-1]["samples"].__setitem__(0, lines[0]["samples"][0]),
    ),
    "a group is handed over twice": ("was handed over 2 times", GROUPS, lambda lines: lines.insert(1, lines[0])),
    "a token was changed": (
        "samples: step 1: tokens or versions",
        GROUPS,
        lambda lines: first_completion(lines)["token_ids"].__setitem__(0, 0),
    ),
    "a log-prob is none": (
        "is not a log-probability",
        GROUPS,
        lambda lines: first_completion(lines)["logprobs"].__setitem__(0, 1.5),
    ),
    "a rollout that was trained on has no record": ("which is not in", GROUPS, lambda lines: lines.pop(0)),
    "a group is lost after it was handed over": (
        f"conservation: {GROUP} rollouts that were handed over have no end",
        GROUPS,
        lose_a_group,
    ),
    "a lag is wrong": ("versions: step 1", TRAINED, lambda lines: lines[0]["samples"][0].update(lag_max=3)),
    "the lag bound is lower": (
        "lag: ",
        "sessions.jsonl",
        lambda lines: [line["config"]["schedule"].update(max_lag=0) for line in lines],
    ),
    "a version has two checksums": (
        f"published: version {HALF} was published with two",
        "published.jsonl",
        lambda lines: lines[HALF].update(checksum="0" * 32),
    ),
    "an attempt of a group is missing": (
        "attempts are not its rollouts and failures",
        GROUPS,
        lambda lines: lines[0].update(started=GROUP + 1),
    ),
    "weights are of a past that a resume abandoned": (
        "past: ",
        "sessions.jsonl",
        lambda lines: lines[1].update(rollouts_bytes=10**9),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_check_finds_a_change(name: str, copied: Path) -> None:
    expected, file, edit = CHANGES[name]
    change(copied, file, edit)
    found = check(copied)
    assert any(expected in line for line in found), found


def test_a_whole_run_has_no_violation_and_its_summary_is_checked_too(copied: Path) -> None:
    assert check(copied) == []
    summary = json.loads((copied / "summary.json").read_text())
    summary["rollouts_queued"] += 1
    (copied / "summary.json").write_text(json.dumps(summary))
    assert any("are queued" in line for line in check(copied))


# ---- real runs


def chaos(out: Path, layout: str, seed: int, count: int, *more: str) -> list[dict[str, Any]]:
    """Run one seed; it must be whole. Returns what each fault did."""
    arguments = ["--layouts", layout, "--seed", str(seed), "--count", str(count), "--out", str(out), *more]
    assert main(arguments) == 0, (out / "chaos.json").read_text()
    (result,) = json.loads((out / "chaos.json").read_text())
    assert result["violations"] == []
    assert not list(out.glob(f"{layout}-*")), "a whole run leaves nothing"
    faults: list[dict[str, Any]] = result["faults"]
    return faults


@pytest.mark.slow
def test_a_run_that_is_killed_is_whole(tmp_path: Path) -> None:
    (fault,) = chaos(tmp_path, "embedded", 0, 1, "--faults", "kill", "environment")
    assert fault["effect"] == "ended"
    assert "SIGKILL" in fault["said"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "seed"), [("engines", 9), ("http", 34)])
def test_a_run_whose_processes_are_started_again_is_whole(layout: str, seed: int, tmp_path: Path) -> None:
    """In these seeds only generation processes and engine servers are killed."""
    assert [fault["effect"] for fault in chaos(tmp_path, layout, seed, 2, "--faults", "kill")] == ["restarted"] * 2


REDIS, RAY = pytest.mark.needs_redis, pytest.mark.needs_ray
NEEDS = {"links": [REDIS], "ray": [RAY]}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=NEEDS.get(name, [])) for name in LAYOUTS])
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_with_every_fault_are_whole(layout: str, seed: int, tmp_path: Path) -> None:
    chaos(tmp_path, layout, seed, 6, "--replay")

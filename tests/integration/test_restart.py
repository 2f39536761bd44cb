"""A run that loses a process which can't be replaced goes on from its latest checkpoint by itself."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import (
    alive,
    assert_gone_on,
    command,
    process_ids,
    start_processes,
    summary,
    until,
    version_of,
    wait,
    write_environment,
)

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive

GOAL = 40


def going(run_dir: Path, version: int, **settings: Any) -> subprocess.Popen[str]:
    """A run of `GOAL` steps with checkpoints every 4, once it has come to `version`."""
    defaults = {"trainer__steps": GOAL, "trainer__checkpoint_every": 4, "metrics__view": "plain"}
    process = start_processes(run_dir, **(defaults | settings))
    until(lambda: version_of(run_dir) >= version, process)
    return process


def kill(run_dir: Path, role: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send the signal to the process of this role. Returns its id."""
    found = process_ids(run_dir)
    pid = found[role] if role in found else rank_pid(run_dir, role)
    os.kill(pid, number)
    return pid


def rank_pid(run_dir: Path, role: str) -> int:
    """Ranks have no status on the board."""
    commands = {int(path.parent.name): path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    (pid,) = [pid for pid, words in commands.items() if {role.encode(), bytes(run_dir)} <= set(words)]
    return pid


def assert_went_on(run_dir: Path, process: subprocess.Popen[str], count: int) -> dict[str, Any]:
    """The run reached its goal after so many restarts, and said so. Returns its summary."""
    ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, GOAL)
    assert counts["restarts"]["run"]["count"] == count
    assert len(counts["restarts"]["run"]["recovery_s"]) == count
    assert ended.out.count("the run goes on from its latest checkpoint") == count
    return counts


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("training", {}),
        pytest.param("training", {"launch__preprocessor": "process", "engine__processes": 2}, marks=exhaustive),
        pytest.param("training-rank-1", {"trainer__ranks": 2}, marks=exhaustive),
        pytest.param("generation", {"weights__kind": "collective"}, marks=exhaustive),
        pytest.param("redis-server", {"stream__kind": "redis"}, marks=exhaustive),
        pytest.param("training", {"weights__kind": "collective", "weights__encoding": "delta"}, marks=exhaustive),
    ],
)
def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, role: str, settings: dict[str, Any]
) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 6, **settings)
    before = process_ids(run_dir)
    kill(run_dir, role)
    counts = assert_went_on(run_dir, process, 1)
    assert counts["resumed_from"] >= 4
    assert counts["restarts"]["run"]["steps_lost"] <= 5
    assert not any(alive(pid) for pid in before.values())


@exhaustive
def test_killed_again_and_again_it_goes_on_as_long_as_it_writes_checkpoints(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 2, launch__restarts=1)
    for version in (6, 14, 22):
        until(lambda version=version: version_of(run_dir) >= version, process)  # type: ignore[misc]
        pid = kill(run_dir, "training")
        until(lambda pid=pid: process_ids(run_dir).get("training", pid) != pid, process)  # type: ignore[misc]
    assert_went_on(run_dir, process, 3)


@exhaustive
def test_a_stopped_trainer_is_noticed_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 6, launch__watchdog_s=8)
    kill(run_dir, "training", signal.SIGSTOP)
    assert_went_on(run_dir, process, 1)


@exhaustive
def test_without_a_checkpoint_it_starts_again_from_the_beginning(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 3, trainer__checkpoint_every=0)
    kill(run_dir, "training")
    counts = assert_went_on(run_dir, process, 1)
    assert counts["resumed_from"] is None
    assert counts["restarts"]["run"]["steps_lost"] >= 3
    assert (run_dir / "before-1" / "metrics.jsonl").exists()


DIES = """
def problem(self, index):
    if index >= 20:
        os.kill(os.getpid(), 9)
    return super().problem(index)
"""


@exhaustive
def test_a_run_that_dies_at_the_same_place_ends_with_all_reports(tmp_path: Path) -> None:
    """With a broadcast of weights, a generation process can't be replaced."""
    kind = write_environment(tmp_path, DIES, ["import os"])
    settings = {"weights__kind": "collective", "environment__kind": kind, "trainer__checkpoint_every": 100}
    ended = wait(start_processes(tmp_path / "r", launch__restarts=2, trainer__steps=GOAL, **settings))
    assert ended.status == 4
    assert "3 sessions lost a process without a new checkpoint (launch.restarts: 2):" in ended.error
    assert ended.error.count("the generation process (pid") == 3
    assert summary(tmp_path / "r")["restarts"]["run"]["count"] == 2


@exhaustive
def test_an_error_that_a_process_reports_is_not_tried_again(tmp_path: Path) -> None:
    ended = wait(start_processes(tmp_path / "r", trainer__learning_rate=1e9, trainer__checkpoint_every=1))
    assert ended.status == 1
    assert not (tmp_path / "r" / "before-1").exists()
    assert summary(tmp_path / "r")["restarts"] == {}


@exhaustive
@pytest.mark.parametrize(("victim", "settings"), [("training", {}), ("redis-server", {"stream__kind": "redis"})])
def test_a_stopped_process_of_a_killed_launcher_keeps_the_next_session_out(
    victim: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """It may write until it has ended. When it goes on, it ends by itself."""
    run_dir = tmp_path / "r"
    process = going(run_dir, 6, **settings)
    pids = process_ids(run_dir)
    stopped = kill(run_dir, victim, signal.SIGSTOP)
    process.kill()
    wait(process)
    until(lambda: not any(alive(pid) for pid in pids.values() if pid != stopped))
    refused = command("train", "--resume", str(run_dir))
    assert refused.status == 2
    assert f"{run_dir} is in use, and of its processes these are stopped: {stopped}; continue them" in refused.error
    assert refused.error.count("\n") == 1
    os.kill(stopped, signal.SIGCONT)
    ended = command("train", "--resume", str(run_dir))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, GOAL)

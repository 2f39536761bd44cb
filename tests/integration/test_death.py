"""Processes that die, hang or are told to end: the run says who and how, ends at once, and leaves nothing behind.

With `launch.restarts` above 0, some are started again instead: see `test_restart`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import (
    Ended,
    alive,
    endless,
    process_ids,
    start_processes,
    status_of,
    summary,
    until,
    wait,
    write_environment,
)

pytestmark = pytest.mark.slow
CLEAN_STOP_S = 120.0
"""The time that a launcher gives its workers for their last checkpoint."""
PREPROCESSOR = {"launch__preprocessor": "process"}


def end_of(process: subprocess.Popen[str], timeout_s: float = 0.8 * CLEAN_STOP_S) -> Ended:
    """No worker was waited for until the time for a clean stop was over."""
    ended = wait(process, timeout_s)
    assert "Traceback" not in ended.out + ended.error
    return ended


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        ("generation-1", {"engine__processes": 2}),
        ("training", {}),
        ("preprocessing", PREPROCESSOR),
        ("server-1", {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8}),
    ],
)
def test_a_killed_process_ends_the_run_and_is_named(victim: str, settings: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with endless(run_dir, launch__restarts=0, **settings) as (process, pids):
        os.kill(pids[victim], signal.SIGKILL)
        ended = end_of(process)
    assert ended.status == 4
    assert f"the {victim} process (pid {pids[victim]}) was killed by SIGKILL" in ended.error
    assert summary(run_dir)["status"].startswith("failed: ")
    if victim == "generation-1":
        version = summary(run_dir)["version"]
        assert version >= 2
        assert (run_dir / "checkpoints" / f"step_{version:08d}").is_dir()


@pytest.mark.exhaustive
def test_a_worker_that_is_told_to_stop_by_somebody_else_ends_the_run(tmp_path: Path) -> None:
    with endless(tmp_path / "r") as (process, pids):
        os.kill(pids["training"], signal.SIGTERM)
        ended = end_of(process)
    assert ended.status == 4
    assert f"the training process (pid {pids['training']}) ended before the run did" in ended.error


def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with endless(run_dir) as (process, _):
        process.kill()
        end_of(process)
    assert not list((run_dir / "checkpoints").glob("step_*")), "the launcher could not record what had led to one"


STARTS_A_PROCESS = """
def __init__(self, tokenizer, seed):
    super().__init__(tokenizer, seed)
    child = subprocess.Popen(["sleep", "600"])
    open({path!r}, "w").write(str(child.pid))
"""


@pytest.mark.parametrize(
    ("victim", "stage", "settings"),
    [
        ("generation", "actor", {}),
        pytest.param("generation-1", "actor-1", {"engine__processes": 2}, marks=pytest.mark.exhaustive),
        pytest.param("preprocessing", "preprocessor", PREPROCESSOR, marks=pytest.mark.exhaustive),
        pytest.param("training", "trainer", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_worker_is_noticed_by_the_watchdog(
    victim: str, stage: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """When the patience with it is over, it is killed, with the processes that its environment started."""
    run_dir, child = tmp_path / "r", tmp_path / "child"
    settings = {"launch__watchdog_s": 8, "launch__restarts": 0, **settings}
    if victim == "generation":
        body = STARTS_A_PROCESS.format(path=str(child))
        settings["environment__kind"] = write_environment(tmp_path, body, imports=["import subprocess"])
    with endless(run_dir, **settings) as (process, pids):
        if victim == "generation":
            pids["child"] = int(child.read_text())
        os.kill(pids[victim], signal.SIGSTOP)
        ended = end_of(process)
    assert ended.status == 3
    assert "launch.watchdog_s is 8" in ended.error
    for said in ("engine-0", "engine-1", "actor-0") if victim == "generation-1" else ("engine", "actor", "trainer"):
        assert f"{said} (pid " in ended.error
    lines = [line for line in ended.error.splitlines() if line.strip().startswith(f"{stage} (pid ")]
    assert any("it has not reported" in line for line in lines), ended.error


@pytest.mark.slow
def test_code_of_an_environment_that_never_returns_ends_the_run_and_is_in_the_log(tmp_path: Path) -> None:
    body = "async def rollout(self, problem, client):\n    while True: pass"
    settings = {"environment__kind": write_environment(tmp_path, body), "launch__watchdog_s": 4, "launch__restarts": 0}
    ended = wait(start_processes(tmp_path / "r", **settings))
    assert ended.status == 3
    assert "SUSPECT" in ended.error
    assert 'task.py", line 9 in rollout' in (tmp_path / "r/logs/generation.log").read_text()


def test_a_second_ctrl_c_ends_now(tmp_path: Path) -> None:
    """Also a worker that does not react: here the training process is stopped, so that a clean end is impossible."""
    with endless(tmp_path / "r", launch__watchdog_s=1000) as (process, pids):
        os.kill(pids["training"], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        until(lambda: not alive(pids["generation"]), process)
        assert process.poll() is None, "the first one waits for the checkpoint"
        process.send_signal(signal.SIGINT)
        ended = end_of(process)
    assert ended.status == 130
    assert "training had no time to finish" in ended.error


@pytest.mark.parametrize("moments", [["starting"], pytest.param(["evaluates", "starting"], marks=pytest.mark.exhaustive)])
def test_ctrl_c_while_loading_or_evaluating(moments: list[str], tmp_path: Path) -> None:
    """Nothing is trained, so the same folder will do."""
    run_dir = tmp_path / "r"
    for moment in moments:
        process = start_processes(run_dir, evaluation__problems=100_000)

        def has_come(moment: str = moment) -> bool:
            status = status_of(run_dir, "actor")
            return status is not None and moment in f"{status.state}: {status.detail}"

        until(has_come, process)
        pids = process_ids(run_dir)
        process.send_signal(signal.SIGINT)
        assert end_of(process).status == 130
        assert not any(alive(pid) for pid in pids.values())

"""Processes that die, hang or are told to end: the run says who and how, ends at once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.runs import (
    Ended,
    no_leftovers,
    start_processes,
    status_of,
    summary,
    until,
    wait,
    worker_pids,
    write_environment,
)

pytestmark = pytest.mark.slow
AT_ONCE_S = 40.0
"""Generous on a busy machine: what is meant is seconds, not a timeout: the watchdog's minute, or two for a clean stop."""


def start_endless(run_dir: Path, **settings: object) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A run without an end, once it is training; with the process ids of its workers."""
    process = start_processes(run_dir, **{"trainer__steps": 100_000} | settings)

    def trains() -> bool:
        status = status_of(run_dir, "trainer")
        return status is not None and getattr(status.progress, "version", 0) >= 2

    until(trains, process)
    return process, worker_pids(run_dir)


def end_of(process: subprocess.Popen[str]) -> Ended:
    begin_s = time.monotonic()
    ended = wait(process)
    assert time.monotonic() - begin_s < AT_ONCE_S
    assert "Traceback" not in ended.out + ended.error
    return ended


@pytest.mark.parametrize("victim", ["generation", "training"])
def test_a_killed_worker_ends_the_run(victim: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir)
        pids.update(workers)
        os.kill(workers[victim], signal.SIGKILL)
        ended = end_of(process)
    assert ended.status == 4
    assert f"the {victim} process (pid {workers[victim]}) was killed by SIGKILL" in ended.error
    assert summary(run_dir)["status"].startswith("failed: ")
    if victim == "generation":
        version = summary(run_dir)["version"]
        assert version >= 2
        assert (run_dir / "checkpoints" / f"step_{version:08d}").is_dir()


@pytest.mark.parametrize("victim", ["generation", "training"])
def test_a_worker_that_is_told_to_stop_by_somebody_else_ends_the_run(victim: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir)
        pids.update(workers)
        os.kill(workers[victim], signal.SIGTERM)
        ended = end_of(process)
    assert ended.status == 4
    assert f"the {victim} process (pid {workers[victim]}) ended before the run did" in ended.error


def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir)
        pids.update(workers)
        process.kill()
        end_of(process)
    assert list((run_dir / "checkpoints").glob("step_*")), "the trainer had time for a checkpoint"


STARTS_A_PROCESS = """
def __init__(self, tokenizer, seed):
    super().__init__(tokenizer, seed)
    child = subprocess.Popen(["sleep", "600"])
    open({path!r}, "w").write(str(child.pid))
"""


@pytest.mark.parametrize("victim", ["generation", "training"])
def test_a_stopped_worker_is_noticed_by_the_watchdog(victim: str, tmp_path: Path) -> None:
    """When the patience with it is over, it is killed, with the processes that its environment started."""
    run_dir, child = tmp_path / "r", tmp_path / "child"
    settings = {"launch__watchdog_s": 2}
    if victim == "generation":
        body = STARTS_A_PROCESS.format(path=str(child))
        settings["environment__kind"] = write_environment(tmp_path, body, imports=["import subprocess"])
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir, **settings)
        pids.update(workers)
        if victim == "generation":
            pids["child"] = int(child.read_text())
        os.kill(workers[victim], signal.SIGSTOP)
        ended = end_of(process)
    assert ended.status == 3
    assert "launch.watchdog_s is 2" in ended.error
    for stage in ("engine", "actor", "trainer"):
        assert f"{stage} (pid " in ended.error
    stage = "trainer" if victim == "training" else "actor"
    (said,) = [line for line in ended.error.splitlines() if line.strip().startswith(f"{stage} (pid ")]
    assert "it has not reported" in said


def test_a_second_ctrl_c_ends_now(tmp_path: Path) -> None:
    """Also a worker that does not react: here the training process is stopped, so that a clean end is impossible."""
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir)
        pids.update(workers)
        os.kill(workers["training"], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None, "the first one waits for the checkpoint"
        process.send_signal(signal.SIGINT)
        ended = end_of(process)
    assert ended.status == 130
    assert "training had no time to finish" in ended.error


def test_ctrl_c_while_loading_or_evaluating(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = start_processes(run_dir, evaluation__problems=100_000)
    until(lambda: (status := status_of(run_dir, "actor")) is not None and "evaluates" in status.detail, process)
    with no_leftovers(run_dir) as pids:
        pids.update(worker_pids(run_dir))
        process.send_signal(signal.SIGINT)
        assert end_of(process).status == 130
    process = start_processes(run_dir)  # nothing was trained: the same folder will do
    until(lambda: (status := status_of(run_dir, "actor")) is not None and status.state == "starting", process)
    process.send_signal(signal.SIGINT)
    assert end_of(process).status == 130


def test_rollouts_that_wait_for_ever_are_named(tmp_path: Path) -> None:
    kind = write_environment(tmp_path, "async def rollout(self, problem, client):\n    await asyncio.Event().wait()")
    process = start_processes(tmp_path / "r", environment__kind=kind, launch__watchdog_s=1.5)
    ended = wait(process)
    assert ended.status == 3
    assert "the environment: " in ended.error
    assert "rollouts run environment code" in ended.error
    assert "Traceback" not in ended.out + ended.error

"""Several generation processes: one run, with all that is promised of one."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.metrics.timeline import read_timeline
from tests.integration.runs import (
    alive,
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    command,
    flags,
    groups,
    no_leftovers,
    start,
    start_processes,
    status_of,
    steps,
    summary,
    trained,
    until,
    wait,
)

pytestmark = pytest.mark.slow
TWO = {"engine__processes": 2}
STAGES = ("engine-0", "engine-1", "actor-0", "actor-1", "trainer")


def run_to_its_end(run_dir: Path, **settings: Any) -> dict[str, Any]:
    ended = command("train", *flags(run_dir, launch__kind="processes", **TWO | settings))
    assert ended.status == 0, ended.error
    assert ended.error == ""
    return checked(run_dir)


def assert_whole(run_dir: Path) -> dict[str, Any]:
    counts = summary(run_dir)
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert_provenance(run_dir)
    return counts


def checked(run_dir: Path) -> dict[str, Any]:
    counts = assert_whole(run_dir)
    assert counts["status"] == "finished"
    indices = [group.index for group in groups(run_dir)]
    assert len(indices) == len(set(indices))
    return counts


def start_endless(run_dir: Path, **settings: Any) -> tuple[Any, dict[str, int]]:
    """A run without an end, once it is training; with the process ids of its workers, by stage."""
    process = start_processes(run_dir, **TWO, trainer__steps=100_000, **settings)
    return process, workers_at(run_dir, process, 3, 2)


def workers_at(run_dir: Path, process: subprocess.Popen[str], version: int, processes: int) -> dict[str, int]:
    """Process ids of a run's workers, by stage, once it has come to that version and all of them have reported."""
    stages = ("trainer", *(f"actor-{index}" for index in range(processes)))

    def pids() -> list[int]:
        return [status.pid for stage in stages if (status := status_of(run_dir, stage)) is not None and alive(status.pid)]

    until(lambda: version_of(run_dir) >= version and len(pids()) == len(stages), process)
    return dict(zip(stages, pids(), strict=True))


def version_of(run_dir: Path) -> int:
    status = status_of(run_dir, "trainer")
    return getattr(status.progress, "version", 0) if status is not None else 0


def test_pipeline(tmp_path: Path) -> None:
    counts = run_to_its_end(tmp_path / "r", trainer__steps=12, schedule__max_lag=3, evaluation__problems=40)
    assert counts["rollouts_trained"] == 12 * 16
    assert counts["lag_max"] <= 3
    assert counts["eval_reward_before"] is not None
    assert counts["eval_reward_after"] is not None
    assert 0 < counts["engine_busy_fraction"] <= 1
    assert counts["peak_memory_bytes"].keys() == {"generation-0", "generation-1", "training"}
    timeline = read_timeline(tmp_path / "r")
    assert [look.time_s for look in timeline] == sorted(look.time_s for look in timeline)
    assert {look.worker for look in timeline} == {0, 1}
    generated = [max(look.tokens_generated for look in timeline if look.worker == worker) for worker in (0, 1)]
    assert min(generated) > 0
    assert sum(generated) <= counts["tokens_generated"]
    assert steps(tmp_path / "r")[-1].engine is not None


def test_conventional_starts_exactly_its_rounds(tmp_path: Path) -> None:
    """Three rounds of 3 steps, by two engines of fewer slots than their share."""
    settings = {"schedule__kind": "conventional", "schedule__steps_per_round": 3, "engine__slots": 8}
    counts = run_to_its_end(tmp_path / "r", trainer__steps=9, **settings)
    assert counts["rollouts_started"] == counts["rollouts_trained"] == 9 * 16
    assert counts["weight_updates"] == 4
    assert [{sample.lag_max for sample in record.samples} for record in trained(tmp_path / "r")] == [{0}, {1}, {2}] * 3


def test_async_changes_weights_between_rounds_only(tmp_path: Path) -> None:
    settings = {"schedule__kind": "async", "schedule__steps_per_round": 2}
    run_to_its_end(tmp_path / "r", trainer__steps=8, **settings)
    lags = [{sample.lag_max for sample in record.samples} for record in trained(tmp_path / "r")]
    assert lags == [{0}, {1}, {2}, {3}, {2}, {3}, {2}, {3}]
    for group in groups(tmp_path / "r"):
        for rollout in group.rollouts:
            assert {span.version for turn in rollout.turns for span in turn.completion.weight_versions} == {
                group.started_version
            }


def test_a_killed_generation_process_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """The second of them; the first is killed in `test_death.py`."""
    with no_leftovers(tmp_path / "r") as pids:
        process, workers = start_endless(tmp_path / "r")
        pids.update(workers)
        os.kill(workers["actor-1"], signal.SIGKILL)
        ended = wait(process)
    assert ended.status == 4
    assert f"the generation-1 process (pid {workers['actor-1']}) was killed by SIGKILL" in ended.error
    assert "Traceback" not in ended.error


def test_a_stopped_generation_process_is_noticed_by_the_watchdog(tmp_path: Path) -> None:
    with no_leftovers(tmp_path / "r") as pids:
        process, workers = start_endless(tmp_path / "r", launch__watchdog_s=2)
        pids.update(workers)
        os.kill(workers["actor-1"], signal.SIGSTOP)
        ended = wait(process)
    assert ended.status == 3
    for stage in STAGES:
        assert f"{stage} (pid " in ended.error
    said = [line for line in ended.error.splitlines() if line.strip().startswith("actor-1 (pid ")]
    assert any("it has not reported" in line for line in said)


def test_stopped_in_any_way_it_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """Two generation processes, everything is killed; three, Ctrl-C; one, to its end. Together they are one run.

    The stream is one, whoever writes it: what was handed over is trained on, by whom it was generated does not matter.
    """
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, workers = start_endless(run_dir, schedule__max_lag=4, trainer__checkpoint_every=2)
        pids.update(workers)
        for pid in (process.pid, *workers.values()):
            os.kill(pid, signal.SIGKILL)
        wait(process)
    with no_leftovers(run_dir) as pids:
        process = start("train", "--resume", str(run_dir), "--engine.processes=3")
        workers = workers_at(run_dir, process, version_of(run_dir) + 2, 3)
        pids.update(workers)
        process.send_signal(signal.SIGINT)
        ended = wait(process)
    assert ended.status == 130, ended.error
    assert_whole(run_dir)
    version = summary(run_dir)["version"] + 3
    ended = command("train", "--resume", str(run_dir), f"--trainer.steps={version}", "--engine.processes=1")
    assert ended.status == 0, ended.error
    counts = assert_whole(run_dir)
    assert counts["version"] == version
    assert counts["rollouts_trained"] == version * 16
    assert counts["lag_max"] <= 4

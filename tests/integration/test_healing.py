"""Processes of a run that die are started again while the others continue, and nothing is lost, doubled or miscounted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pipelinerl.report.series import read_timeline
from tests.integration.runs import (
    alive,
    assert_finished,
    assert_gone_on,
    assert_provenance,
    assert_whole,
    groups,
    in_training,
    process_ids,
    start,
    start_processes,
    status_of,
    steps,
    summary,
    trained,
    until,
    version_of,
    wait,
    write_environment,
)
from tests.integration.test_conservation import MISBEHAVES, TIMEOUTS
from tests.integration.test_provenance import EVERY_VERSION, assert_recomputed

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive


def assert_healed(run_dir: Path, process: subprocess.Popen[str], *, max_lag: int | None = 4) -> dict[str, Any]:
    """All that a run promises that reached its goal, and that no group was recorded twice. Returns its summary."""
    counts = assert_finished(run_dir, wait(process))
    goal = len(steps(run_dir))
    assert [record.version for record in trained(run_dir)] == list(range(1, goal + 1))
    indices = [group.index for group in groups(run_dir)]
    assert len(indices) == len(set(indices))
    timeline = read_timeline(run_dir)
    assert [look.time_s for look in timeline] == sorted(look.time_s for look in timeline)
    assert max_lag is None or counts["lag_max"] <= max_lag
    assert all(record["count"] >= len(record["recovery_s"]) > 0 for record in counts["restarts"].values())
    lost = sum(record["rollouts_lost"] for record in counts["restarts"].values())
    assert counts["rollouts_dropped"].get("lost_in_crash", 0) == lost
    for pid_left in Path("/dev/shm").glob("pipelinerl-weights-*"):  # noqa: S108 - looked at only
        assert alive(int(pid_left.name.split("-")[2]))
    return counts


def replaced(run_dir: Path, role: str, pid: int) -> Callable[[], bool]:
    """Whether the role has a new process that works."""
    stage = role.replace("generation", "actor").replace("preprocessing", "preprocessor")

    def found() -> bool:
        if role.startswith("server"):
            return process_ids(run_dir)[role] != pid
        status = status_of(run_dir, stage)
        return status is not None and status.state != "starting" and status.pid != pid

    return found


def kill(run_dir: Path, process: subprocess.Popen[str], role: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill the process of this role, and wait until a new one works."""
    pid = process_ids(run_dir)[role]
    os.kill(pid, number)
    until(replaced(run_dir, role, pid), process)
    assert not alive(pid)


DIES_AT = """
def problem(self, index):
    if index == {index} and ({always} or not os.path.exists({path!r})):
        open({path!r}, "a").write(str(os.getpid()) + "\\n")
        os.kill(os.getpid(), 9)
    return super().problem(index)
"""


def dies_at(folder: Path, index: int, *, always: bool = False, also: str = "") -> str:
    body = also + DIES_AT.format(index=index, always=always, path=str(folder / "died"))
    return write_environment(folder, body, imports=["import os"])


def test_a_process_that_dies_is_started_again_and_every_token_is_of_its_version(tmp_path: Path) -> None:
    """It dies as it starts a group; the new process starts that group first. The environment fails in every other way, too.

    The timeout leaves enough time for rollouts that do nothing wrong, on a busy machine too.
    """
    run_dir = tmp_path / "r"
    settings = {"environment__kind": dies_at(tmp_path, 12, also=MISBEHAVES), "engine__kv_on_update": "recompute"}
    settings |= TIMEOUTS | {"actor__rollout_timeout_s": 4.0}
    process = start_processes(run_dir, **settings, **EVERY_VERSION, schedule__max_lag=4)
    counts = assert_healed(run_dir, process)
    assert counts["rollouts_trained"] == 6 * 16
    assert counts["restarts"]["generation"]["count"] == 1
    assert counts["rollouts_dropped"]["lost_in_crash"] >= 4
    assert 12 in {group.index for group in groups(run_dir)}
    assert {"raised", "bad_rollout", "timeout"} <= counts["rollouts_dropped"].keys()
    assert assert_provenance(run_dir) >= 3
    assert_recomputed(run_dir)


@exhaustive
@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        ("generation", {}),
        ("generation-0", {"engine__processes": 2}),
        ("generation-1", {"engine__processes": 2, "schedule__kind": "conventional"}),
        ("generation-1", {"engine__processes": 2, "schedule__kind": "async"}),
        ("generation", {"stream__capacity": 4, "stream__when_full": "drop_oldest"}),
        ("preprocessing", {"launch__preprocessor": "process"}),
        ("server-0", {"engine__kind": "http"}),
        ("server-1", {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8}),
        ("generation", {"engine__kind": "http"}),
        ("preprocessing", {"launch__preprocessor": "process", "weights__kind": "collective"}),
    ],
)
def test_a_process_that_is_killed_is_started_again(victim: str, settings: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    rounds = "schedule__kind" in settings
    lag = {"schedule__steps_per_round": 2} if rounds else {"schedule__max_lag": 4}
    process = start_processes(run_dir, trainer__steps=100_000, **lag, **settings)
    with in_training(process, run_dir, workers=1 + settings.get("engine__processes", 1)):
        kill(run_dir, process, victim)
        version = version_of(run_dir)
        until(lambda: version_of(run_dir) >= version + 3, process)
        for ready in (run_dir / "control").glob("server-*.ready.json"):
            assert_asks_for_its_key(json.loads(ready.read_bytes())["url"])
        process.send_signal(signal.SIGINT)
        assert wait(process).status == 130
    counts = summary(run_dir)
    assert counts["restarts"][victim]["count"] == 1
    ended = start("train", "--resume", str(run_dir), f"--trainer.steps={counts['version'] + 2}")
    assert wait(ended).status == 0
    assert_gone_on(run_dir, counts["version"] + 2)


def assert_asks_for_its_key(url: str) -> None:
    """Other users of this machine reach its port, and so does the code of rewards."""
    for path in ("/generate", "/cancel", "/request_weight_update", "/init_process_group"):
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
            connection.request("POST", path, body=b"{}", headers={"Content-Type": "application/json"})
            assert connection.getresponse().status == 401, path


@exhaustive
def test_a_run_is_stopped_while_a_process_is_away(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = start_processes(run_dir, trainer__steps=100_000, schedule__max_lag=4)
    with in_training(process, run_dir) as pids:
        os.kill(pids["generation"], signal.SIGKILL)
        until(lambda: (found := status_of(run_dir, "actor")) is not None and found.pid == process.pid, process)
        process.send_signal(signal.SIGINT)
        assert wait(process).status == 130
    counts = assert_whole(run_dir)
    assert counts["restarts"]["generation"]["recovery_s"] == []
    goal = counts["version"] + 2
    assert wait(start("train", "--resume", str(run_dir), f"--trainer.steps={goal}")).status == 0
    assert_gone_on(run_dir, goal)


@exhaustive
@pytest.mark.parametrize("when", ["before", "online", "after"])
def test_an_evaluation_that_a_death_interrupts_is_repeated(when: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = start_processes(
        run_dir, engine__processes=2, evaluation__problems=300, evaluation__every=4, trainer__steps=10, schedule__max_lag=4
    )
    text = {"before": "before training", "online": "since version", "after": "after training"}[when]

    def evaluates() -> bool:
        status = status_of(run_dir, "actor-0")
        return status is not None and text in status.detail

    until(evaluates, process)
    kill(run_dir, process, "generation-0")
    counts = assert_healed(run_dir, process)
    assert counts["restarts"]["generation-0"]["count"] == 1
    assert counts["eval_reward_before"] is not None
    assert counts["eval_reward_after"] is not None
    lines = (run_dir / "evaluations.jsonl").read_text().splitlines()
    assert sum('"before"' in line for line in lines) == sum('"after"' in line for line in lines) == 1
    versions = [record["version"] for record in counts["eval_online"]]
    assert versions == sorted(set(versions))

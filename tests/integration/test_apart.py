"""A run with every part in a process of its own: engine servers over HTTP, preprocessor, Redis. All promises hold."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.load import load_config
from tests.integration.runs import (
    Ended,
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    command,
    flags,
    groups,
    no_leftovers,
    start_processes,
    status_of,
    steps,
    summary,
    until,
    wait,
)

pytestmark = pytest.mark.slow
REDIS = shutil.which("redis-server")
NEEDS_REDIS = pytest.mark.skipif(REDIS is None, reason="redis-server is not installed (apt-get install redis-server)")
PREPROCESSOR = {"launch__preprocessor": "process"}
SERVERS = {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8}
APART = PREPROCESSOR | SERVERS | {"stream__kind": "redis"}
STAGES = {"generation": "actor", "preprocessing": "preprocessor", "training": "trainer"}


def run_to_its_end(run_dir: Path, **settings: Any) -> dict[str, Any]:
    return checked(run_dir, command("train", *flags(run_dir, launch__kind="processes", **settings)))


def resume_to(run_dir: Path, goal: int) -> dict[str, Any]:
    counts = checked(run_dir, command("train", "--resume", str(run_dir), f"--trainer.steps={goal}"))
    assert counts["version"] == goal
    assert counts["rollouts_trained"] == goal * 16
    assert [step.version for step in steps(run_dir)] == list(range(1, goal + 1))
    return counts


def checked(run_dir: Path, ended: Ended) -> dict[str, Any]:
    """All that any run promises."""
    assert ended.status == 0, ended.error
    assert ended.error == ""
    counts = summary(run_dir)
    assert counts["status"] == "finished"
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert_provenance(run_dir)
    return counts


def version_of(run_dir: Path) -> int:
    status = status_of(run_dir, "trainer")
    return getattr(status.progress, "version", 0) if status is not None else 0


def start_endless(run_dir: Path, **settings: Any) -> tuple[Any, dict[str, int]]:
    """A run without an end, once it is training; with the ids of its processes by role."""
    process = start_processes(run_dir, trainer__steps=100_000, **settings)
    until(lambda: version_of(run_dir) >= 2, process)
    found = {role: status_of(run_dir, stage) for role, stage in STAGES.items()}
    pids = {role: status.pid for role, status in found.items() if status is not None}
    for path in (run_dir / "control").glob("server-*.ready.json"):
        pids[path.name.split(".")[0]] = msgspec.json.decode(path.read_bytes())["pid"]
    url = msgspec.json.decode((run_dir / "control" / "plan.json").read_bytes())["redis_url"]
    if url is not None:
        import redis

        with redis.Redis.from_url(url) as client:
            pids["redis-server"] = int(client.info("server")["process_id"])  # type: ignore[index,arg-type]
    return process, pids


@NEEDS_REDIS
def test_everything_apart_and_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    counts = run_to_its_end(run_dir, trainer__steps=8, evaluation__problems=20, schedule__max_lag=4, **APART)
    roles = {"generation", "preprocessing", "training", "server-0", "server-1"}
    assert counts["peak_memory_bytes"].keys() == roles
    assert counts["weight_updates"] >= 8
    assert counts["lag_max"] <= 4
    assert counts["eval_reward_after"] is not None
    assert assert_provenance(run_dir) > 0, "some tokens that were trained on span an update"


@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        ("preprocessing", PREPROCESSOR),
        ("server-1", SERVERS),
        pytest.param("redis-server", {"stream__kind": "redis"}, marks=NEEDS_REDIS),
    ],
)
def test_whatever_is_killed_ends_the_run_and_is_named(victim: str, settings: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, found = start_endless(run_dir, **settings)
        pids.update(found)
        os.kill(found[victim], signal.SIGKILL)
        ended = wait(process)
    assert ended.status == 4
    said = f"{victim} process (pid {found[victim]})" if victim != "redis-server" else f"redis-server (pid {found[victim]})"
    assert f"{said} was killed by SIGKILL" in ended.error
    assert "Traceback" not in ended.out + ended.error
    assert summary(run_dir)["status"].startswith("failed: ")


@NEEDS_REDIS
def test_everything_ends_with_a_killed_launcher_and_can_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, found = start_endless(run_dir, trainer__checkpoint_every=1, **APART)
        pids.update(found)
        process.kill()
        wait(process)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found.values()))
    newest = max(int(re.sub(r"\D", "", path.name)) for path in (run_dir / "checkpoints").glob("step_*"))
    resume_to(run_dir, newest + 2)
    indices = [group.index for group in groups(run_dir)]
    assert len(indices) == len(set(indices))


def test_a_preprocessor_with_a_reference_model_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """In a process of its own, between two streams; these are in Redis, if it is installed."""
    settings = {"trainer__kl_coefficient": 0.01, "preprocess__zero_advantage": "keep", "preprocess__overlong": "drop"}
    if REDIS is not None:
        settings["stream__kind"] = "redis"
    run_dir = tmp_path / "r"
    counts = run_to_its_end(run_dir, actor__max_tokens=60, **PREPROCESSOR, **settings)
    assert counts["rollouts_dropped"].keys() <= {"overlong"}
    resume_to(run_dir, 7)
    moved = command("train", "--resume", str(run_dir), "--trainer.steps=8", "--launch.preprocessor=with_trainer")
    assert (moved.status, moved.error.count("\n")) == (2, 1)
    assert "launch.preprocessor process" in moved.error, "where the streams lie can't change"


def test_a_stopped_preprocessor_is_noticed_by_the_watchdog(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with no_leftovers(run_dir) as pids:
        process, found = start_endless(run_dir, launch__watchdog_s=2, **PREPROCESSOR)
        pids.update(found)
        os.kill(found["preprocessing"], signal.SIGSTOP)
        ended = wait(process)
    assert ended.status == 3
    (said,) = [line for line in ended.error.splitlines() if line.strip().startswith("preprocessor (pid ")]
    assert "it has not reported" in said


def test_weights_by_broadcast_to_two_generation_processes(tmp_path: Path) -> None:
    counts = run_to_its_end(tmp_path / "r", weights__kind="collective", engine__processes=2)
    assert counts["weight_updates"] >= 5


def test_rounds_are_exact_with_servers_and_a_preprocessor(tmp_path: Path) -> None:
    settings = {"schedule__kind": "conventional", "schedule__steps_per_round": 2, "trainer__steps": 4}
    counts = run_to_its_end(tmp_path / "r", **PREPROCESSOR, **SERVERS, **settings)
    assert counts["rollouts_started"] == counts["rollouts_trained"] == 4 * 16


def test_servers_that_do_not_start_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    ended = command("train", *flags(tmp_path / "r", launch__kind="processes", model__path=tmp_path / "m", **SERVERS))
    assert ended.status == 2
    assert "can't load the" in ended.error
    assert "Traceback" not in ended.error


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = {"engine__kind": "http", "engine__urls": "[http://127.0.0.1:9]", "launch__startup_timeout_s": 25}
    ended = command("train", *flags(tmp_path / "r", launch__kind="processes", **settings))
    assert ended.status != 0
    assert "http://127.0.0.1:9" in ended.error
    assert "Traceback" not in ended.error


def test_the_example_is_whole(tmp_path: Path) -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "apart.yaml")
    assert (config.engine.kind, config.stream.kind, config.launch.preprocessor) == ("http", "redis", "process")

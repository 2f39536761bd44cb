"""A run with every part in a process of its own: engine servers over HTTP, a preprocessor. All promises hold."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import assert_finished, assert_gone_on, assert_provenance, command, flags, run_processes, steps
from tests.redis_server import redis_for_tests

pytestmark = pytest.mark.slow
DELTAS = {"weights__kind": "collective", "weights__encoding": "delta", "trainer__learning_rate": 1e-6}
WEIGHTS: dict[str, dict[str, Any]] = {"files": DELTAS | {"engine__servers": 2, "engine__slots": 8}, "redis": {}}


@pytest.mark.parametrize("stream", ["files", pytest.param("redis", marks=pytest.mark.needs_redis)])
def test_everything_apart_and_on_from_its_checkpoint(stream: str, tmp_path: Path) -> None:
    """With a reference model. Weights are broadcast as deltas, or in a file. The next session prepares with the trainer."""
    with redis_for_tests(tmp_path / "redis") if stream == "redis" else nullcontext() as url:
        goes_on(tmp_path / "r", stream, url)


def goes_on(run_dir: Path, stream: str, url: str | None) -> None:
    settings = {"launch__preprocessor": "process", "engine__kind": "http", "stream__kind": stream} | WEIGHTS[stream]
    settings |= {"stream__url": url} if url else {}
    settings |= {"trainer__kl_coefficient": 0.01, "preprocess__zero_advantage": "keep", "preprocess__overlong": "drop"}
    settings |= {"trainer__steps": 6, "actor__max_tokens": 60, "evaluation__problems": 4, "schedule__max_lag": 4}
    counts = run_processes(run_dir, **settings)
    servers = {f"server-{number}" for number in range(settings.get("engine__servers", 1))}
    assert counts["peak_memory_bytes"].keys() == {"generation", "preprocessing", "training", *servers}
    assert counts["weight_updates"] >= 6
    assert counts["lag_max"] <= 4
    assert counts["eval_reward_after"] is not None
    assert counts["rollouts_dropped"].keys() <= {"overlong", "stale"}
    assert assert_provenance(run_dir) > 0, "some tokens that were trained on span an update"
    if stream == "redis":
        changes = ["--trainer.steps=8", "--launch.preprocessor=with_trainer"]
        assert_finished(run_dir, command("train", "--resume", str(run_dir), *changes))
        assert_gone_on(run_dir, 8)
        shutil.rmtree(run_dir / "checkpoints")  # it starts again from the beginning: without the groups that Redis has
        assert_finished(run_dir, command("train", "--resume", str(run_dir), "--trainer.steps=2"))
        assert [step.version for step in steps(run_dir)] == [1, 2]
    else:
        assert {step.update.encoding for step in steps(run_dir) if step.update is not None} == {"full", "delta"}


def test_servers_that_do_not_start_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    settings = {"launch__kind": "processes", "model__path": tmp_path / "m", "engine__kind": "http"}
    ended = command("train", *flags(tmp_path / "r", **settings))
    assert ended.status == 2
    assert "can't load the" in ended.error
    assert "Traceback" not in ended.error

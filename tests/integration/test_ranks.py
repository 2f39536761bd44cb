"""Runs with a sharded trainer: to their end, resumed on other numbers of ranks, and with ranks that die or stop anywhere."""

from __future__ import annotations

import signal
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.checkpoint import latest_checkpoint, load_checkpoint
from pipelinerl.errors import ConfigError
from pipelinerl.launch.run import train
from tests import forks
from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    resume,
    small_run,
    start_processes,
    steps,
    summary,
    until,
    wait,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TWO: dict[str, Any] = {"trainer__ranks": 2, "trainer__checkpoint_every": 1}
DELTAS = {"weights__kind": "collective", "weights__encoding": "delta", "trainer__learning_rate": 1e-6}
KL = {"trainer__kl_coefficient": 0.1, "preprocess__zero_advantage": "keep"}

FAULTY = """
import os, signal, sys
from pathlib import Path

if "pipelinerl.process.forked" in sys.orig_argv:  # from which the run's processes are forked
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from pipelinerl.trainer.sharding import model
    from pipelinerl.trainer.optimizer import Optimizer

    def failing(owner, name, at_call):
        whole, calls = getattr(owner, name), 0

        def called(*arguments, **options):
            nonlocal calls
            result = whole(*arguments, **options)
            if {role!r} in sys.argv and list(Path({run_dir!r}, "checkpoints").glob("step_*")):
                calls += 1
                if calls == at_call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, called)

    failing({fails})
"""
PHASES = {
    "forward": "FSDPParamGroup, 'post_forward', 2",
    "backward": "FSDPParamGroup, 'post_backward', 2",
    "gather": "model, '_gather', 2",
    "save": "Optimizer, 'state', 1",
}
ALL_DEATHS = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in product(["training-rank-1", "training"], PHASES)]


@pytest.mark.parametrize("others", [[2], pytest.param([3, 1], marks=pytest.mark.exhaustive)])
def test_a_stopped_run_writes_a_checkpoint_on_all_ranks_and_continues_to_its_goal(others: list[int], tmp_path: Path) -> None:
    """With deltas: a receipt has the checksum of all weights, so they were those that the trainer gathered."""
    run_dir = tmp_path / "r"
    endless = TWO | {"trainer__steps": 100_000, "trainer__checkpoint_every": 0}
    process = start_processes(run_dir, **endless, **KL, **DELTAS)
    until(lambda: (run_dir / "metrics.jsonl").exists() and len(steps(run_dir)) >= 3, process)
    process.send_signal(signal.SIGINT)
    assert wait(process).status == 130
    path = latest_checkpoint(run_dir)
    assert path is not None
    load_checkpoint(path)
    counts = summary(run_dir)
    assert set(counts["peak_memory_bytes"]) == {"generation", "training", "training-rank-1"}
    assert_conserved(counts)
    goal = counts["version"]
    for ranks in others:
        goal += 2
        counts = resume(run_dir, trainer__ranks=ranks, trainer__steps=goal)
        assert (counts["status"], counts["optimizer_steps"]) == ("finished", goal)
        assert_conserved(counts)
    assert_trained_once(run_dir)
    assert_provenance(run_dir)
    assert [step.version for step in steps(run_dir)] == list(range(1, goal + 1))
    assert all(step.grad_norm for step in steps(run_dir))
    updates = [step.update for step in steps(run_dir)]
    assert {update.encoding for update in updates if update is not None} == {"full", "delta"}
    assert updates[-1] is not None
    assert updates[-1].encoding == "delta"


@pytest.mark.parametrize(("role", "phase"), [("training-rank-1", "forward"), *ALL_DEATHS[1:]])
def test_a_killed_rank_ends_the_run(role: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kills itself once there is a checkpoint."""
    run_dir = tmp_path / "r"
    code = textwrap.dedent(FAULTY).format(run_dir=str(run_dir), role=role, fails=PHASES[phase])
    (tmp_path / "faulty.py").write_text(code)
    monkeypatch.setenv(forks.PREPARE, str(tmp_path / "faulty.py"))
    settings = TWO | {"trainer__steps": 100_000, "launch__watchdog_s": 40, "launch__restarts": 0}
    ended = wait(start_processes(run_dir, **settings))
    assert "Traceback" not in ended.out + ended.error
    assert ended.status == 4
    assert f"the {role} process (pid " in ended.error
    assert "was killed by SIGKILL" in ended.error
    path = latest_checkpoint(run_dir)
    assert path is not None
    version = load_checkpoint(path).state.version
    if phase == "save":
        monkeypatch.delenv(forks.PREPARE)
        counts = resume(run_dir, trainer__ranks=1 if role == "training" else 3, trainer__steps=version + 2)
        assert counts["optimizer_steps"] == version + 2
        assert_conserved(counts)
        assert_trained_once(run_dir)


def test_the_embedded_launcher_refuses_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks: `embedded` is one process"):
        train(small_run(tmp_path / "r", trainer__ranks=2))

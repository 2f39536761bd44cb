"""Several generation processes: one run, with all that is promised of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipelinerl.report.series import read_timeline
from pipelinerl.resources.memory import BETWEEN
from tests.integration.runs import (
    assert_gone_on,
    assert_whole,
    command,
    endless,
    in_training,
    start,
    steps,
    version_of,
    wait,
)

pytestmark = pytest.mark.slow


def test_stopped_in_any_way_it_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """One generation process, everything is killed at once; three, Ctrl-C; two, to its end. Together they are one run.

    The stream is one, whoever writes it: what was handed over is trained on, by whom it was generated does not matter.
    """
    run_dir = tmp_path / "r"
    settings = {"schedule__max_lag": 4, "trainer__checkpoint_every": 2, "evaluation__problems": 8}
    with endless(run_dir, **settings) as (process, pids):
        for pid in (process.pid, *pids.values()):
            os.kill(pid, signal.SIGKILL)
        assert wait(process).status == -signal.SIGKILL
    process = start("train", "--resume", str(run_dir), "--engine.processes=3")
    with in_training(process, run_dir, version_of(run_dir) + 2, workers=4):
        process.send_signal(signal.SIGINT)
        ended = wait(process)
    assert ended.status == 130
    assert "--resume" in ended.error
    assert "Traceback" not in ended.out + ended.error
    stopped = assert_whole(run_dir)
    assert stopped["status"] == "interrupted"
    assert (run_dir / "checkpoints" / f"step_{stopped['version']:08d}").is_dir()
    goal = stopped["version"] + 3
    ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}", "--engine.processes=2")
    assert ended.status == 0, ended.error
    counts = assert_gone_on(run_dir, goal)
    assert counts["lag_max"] <= 4
    assert counts["eval_reward_before"] is not None
    assert counts["eval_reward_after"] is not None
    assert 0 < counts["engine_busy_fraction"] <= 1
    assert counts["peak_memory_bytes"].keys() == {"generation-0", "generation-1", "training"}
    assert counts["predicted_memory_bytes"].keys() == counts["peak_memory_bytes"].keys() | {BETWEEN}
    timeline = read_timeline(run_dir)
    assert [look.time_s for look in timeline] == sorted(look.time_s for look in timeline)
    generated = {worker: [look.tokens_generated for look in timeline if look.worker == worker] for worker in range(3)}
    assert min(map(max, generated.values())) > 0
    assert steps(run_dir)[-1].engine is not None

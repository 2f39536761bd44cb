"""`pipelinerl sweep` with real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.sweep import make_grid
from tests.unit.experiments.test_sweep import write_finished

SMALL = [
    *("--trainer.batch_size", "16", "--actor.group_size", "8", "--engine.slots", "16", "--actor.max_tokens", "48"),
    *("--engine.threads", "1", "--trainer.threads", "1"),
    *("--launch.kind", "embedded", "--evaluation.problems", "4", "--metrics.plot=false"),
]


@pytest.mark.slow
def test_a_sweep_of_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = [*SMALL, "--trainer.steps", "1"]
    write_finished(out, "01/seed-0", 0.5, 0.5)
    (out / "request.json").write_text(json.dumps(make_grid(None, flags, 2).to_json()))
    assert main(["sweep", *flags, "--seeds", "2", "--out", str(out)]) == 0, capsys.readouterr().err
    (setting,) = json.loads((out / "sweep.json").read_text())["settings"]
    assert [run["status"] for run in setting["runs"]] == ["finished", "finished"]
    made = json.loads((out / "01/seed-1/summary.json").read_text())
    assert setting["runs"][1]["reward"] == made["eval_reward_after"]
    assert made["seed"] == 1

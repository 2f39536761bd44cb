"""`pipelinerl sweep` with real runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.sweep import make_grid
from tests.integration.runs import command, start, until, wait

SMALL = [
    *("--trainer.batch_size", "16", "--actor.group_size", "8", "--engine.slots", "16", "--actor.max_tokens", "48"),
    *("--engine.threads", "1", "--trainer.threads", "1"),
    *("--launch.kind", "embedded", "--evaluation.problems", "4", "--metrics.plot=false"),
]


@pytest.mark.slow
def test_a_sweep_of_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = [*SMALL, "--trainer.steps", "1"]
    arguments = ["sweep", *flags, "--seeds", "2", "--out", str(out)]
    first = out / "01/seed-0"
    first.mkdir(parents=True)
    (out / "request.json").write_text(json.dumps(make_grid(None, flags, 2).to_json()))
    summary = {"status": "finished", "reward_last": 0.5, "eval_reward_after": 0.5}
    (first / "summary.json").write_text(json.dumps(summary))
    assert main(arguments) == 0, capsys.readouterr().err
    (setting,) = json.loads((out / "sweep.json").read_text())["settings"]
    assert [run["status"] for run in setting["runs"]] == ["finished", "finished"]
    made = json.loads((out / "01/seed-1/summary.json").read_text())
    assert setting["runs"][1]["reward"] == made["eval_reward_after"]
    assert made["seed"] == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_sweep_is_interrupted_and_goes_on_and_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = command("sweep", *SMALL, "--environment.kind", "gcd,lcm", "--out", str(out))
    assert refused.status == 2
    assert "environment.kind lcm: " in refused.error
    assert not out.exists()
    arguments = [
        *("sweep", *SMALL, "--trainer.learning_rate", "1e-3,1e38", "--trainer.steps", "5", "--trainer.warmup_steps", "0"),
        *("--trainer.checkpoint_every", "1", "--stream.kind", "files", "--out", str(out)),
    ]
    process = start(*arguments)
    first = out / "01-learning_rate=1e-3/seed-0"
    metrics = first / "metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.stat().st_size > 0, process)
    process.send_signal(signal.SIGINT)
    ended = wait(process)
    assert ended.status == 130
    assert ended.error.endswith(f"stopped; to continue, run the same command with --out {out}\n")
    ended = command(*arguments)
    assert ended.status == 0, ended.error
    best, diverged = json.loads((out / "sweep.json").read_text())["settings"]
    assert best["runs"][0]["status"] == "finished"
    assert json.loads((first / "summary.json").read_text())["resumed_from"] is not None
    assert diverged["runs"][0]["status"].startswith("diverged: ")
    assert diverged["reward"] is None
    written = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    ended = command(*arguments)
    assert ended.status == 0
    assert "[1/" not in ended.error
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == written

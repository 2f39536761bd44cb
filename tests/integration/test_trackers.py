"""Real runs with the trackers' own clients, offline: what they have afterwards, and after a resume."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import msgspec
import pytest

from pipelinerl.report.trackers import Sent
from tests.integration import runs


def sent(run_dir: Path, tracker: str) -> Sent:
    return msgspec.json.decode((run_dir / "trackers" / f"{tracker}.json").read_bytes(), type=Sent)


def trained_twice(run_dir: Path, tracker: str) -> str:
    """A run of two steps, resumed to the third, with the tracker. Returns the id of the tracked run, the same in both."""
    evaluated = {"evaluation__problems": 4, "evaluation__every": 2}
    runs.run(run_dir, trainer__steps=2, metrics__trackers=f"[{tracker}]", **evaluated)
    first = sent(run_dir, tracker)
    runs.resume(run_dir, trainer__steps=3)
    second = sent(run_dir, tracker)
    assert first.place[0] < second.place[0]
    assert second.place == tuple((run_dir / f"{name}.jsonl").stat().st_size for name in ("metrics", "evaluations"))
    assert first.id == second.id
    assert "Traceback" not in (run_dir / "logs" / "trackers.log").read_text()
    return str(first.id)


@pytest.mark.exhaustive
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "run"
    name = trained_twice(run_dir, "wandb")
    folders = sorted((run_dir / "wandb").glob(f"offline-run-*-{name}"))
    assert len(folders) == 2, "`wandb sync` makes them one run"
    stored = [(folder / f"run-{name}.wandb").read_bytes() for folder in folders]
    assert all(b"reward_mean" in data and b"learning_rate" in data and b"summary/reward_last" in data for data in stored)
    assert list(folders[0].rglob("samples/held_out*.table.json"))


@pytest.mark.exhaustive
def test_trackio_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    name = trained_twice(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "pipelinerl.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    assert {row[0] for row in rows} == {name}
    assert {1, 2, 3} <= {row[1] for row in rows if "loss" in json.loads(row[2])}
    texts = "".join(str(row[2]) for row in rows)
    assert all(key in texts for key in ("evaluation/reward_mean", "samples/held_out", "summary/reward_last"))
    assert "trainer.steps" in str(configs[0][0])


@pytest.mark.exhaustive
def test_mlflow_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.chdir(tmp_path)  # its artifacts are in the working directory
    name = trained_twice(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(address)
    run = client.get_run(name)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["trainer.steps"] == "2", "parameters are those of the first session"
    assert [point.step for point in client.get_metric_history(name, "loss")] == [1, 2, 3]
    assert client.get_metric_history(name, "evaluation/reward_mean")
    assert "summary/reward_last" in run.data.metrics
    assert {item.path for item in client.list_artifacts(name)} == {"samples", "summary.json"}


@pytest.mark.exhaustive
def test_a_callback_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.report.trackers.FINISH_S", 1.0)
    file = tmp_path / "mine.py"
    file.write_text("import time\n\ndef note(record):\n    time.sleep(1000)\n")
    summary = runs.run(tmp_path / "run", trainer__steps=2, metrics__callback=f"{file}:note")
    assert summary["status"] == "finished"

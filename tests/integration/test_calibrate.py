"""Calibration with its real training process, as `pipelinerl lab calibrate` does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError
from pipelinerl.experiments.planner.calibrate import calibrate, training_process
from pipelinerl.experiments.planner.calibration import read_calibration, write_calibration

SLOTS = 6
SMALL = ["--engine.slots", str(SLOTS), "--actor.group_size", "2", "--trainer.batch_size", "8", "--actor.max_tokens", "20"]


def config(*settings: str) -> RunConfig:
    return load_config(None, [*SMALL, *settings])


@pytest.mark.slow
def test_a_training_process_that_fails_says_why(tmp_path: Path) -> None:
    broken = config().model_copy(update={"model": config().model.model_copy(update={"path": "/nowhere"})})
    with (
        training_process(broken, tmp_path / "stream", tmp_path, 1) as training,
        pytest.raises(PipelineRLError, match="rollouts"),
    ):
        training.wait_for("ready")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", pytest.param("conventional", marks=pytest.mark.exhaustive)])
def test_a_whole_calibration(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.experiments.planner.calibrate.ACTOR_SECONDS", 0.2)
    monkeypatch.setattr("pipelinerl.experiments.planner.calibrate.DECODE_SECONDS", 0.0)
    said: list[str] = []
    found = calibrate(config("--schedule.kind", kind), said.append)
    assert found.side_by_side == (kind == "pipeline")
    assert (found.slots, found.batch_size, found.group_size) == (SLOTS, 8, 2)
    assert sum(found.lengths.values()) >= 8
    assert 0 <= found.training.used_share <= 1
    assert found.training.token_s > 0
    assert found.generation.tokens_per_s > 0
    assert said
    write_calibration(tmp_path / "calibration.json", found)
    assert read_calibration(tmp_path / "calibration.json") == found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_calibration_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.experiments.planner.calibrate.ACTOR_SECONDS", 0.2)
    monkeypatch.setattr("pipelinerl.experiments.planner.calibrate.DECODE_SECONDS", 0.0)
    found = calibrate(config("--trainer.ranks", "2", "--trainer.threads", "1"))
    assert found.training.ranks == 2
    assert found.training.token_s > 0

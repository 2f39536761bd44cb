"""Calibration with its real run, as `pipelinerl lab calibrate` does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.experiments.planner.calibration import calibrate, read_calibration
from pipelinerl.report import write_json

SMALL = ["--engine.slots", "6", "--actor.group_size", "2", "--trainer.batch_size", "8", "--actor.max_tokens", "20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["--schedule.kind", "conventional"], marks=pytest.mark.exhaustive),
        pytest.param(["--trainer.ranks", "2", "--trainer.threads", "1"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_whole_calibration(tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.experiments.planner.calibration.DECODE_SECONDS", 0.0)
    said: list[str] = []
    config = load_config(None, [*SMALL, *settings])
    found = calibrate(config, said.append, steps=16)
    assert found.schedule == ("conventional:1" if "conventional" in settings else "pipeline")
    assert found.slots == 6
    assert sum(found.lengths.values()) >= 8
    assert 0 <= found.used_share <= 1
    assert (found.ranks, found.train_token_s > 0) == (config.trainer.ranks, True)
    assert found.tokens_per_s > 0
    assert said
    write_json(tmp_path / "calibration.json", found)
    assert read_calibration(tmp_path / "calibration.json") == found

"""The figure of a run is drawn from any records, and an empty run is told apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import EngineRecord, StepRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.report.curves import draw_curves, smoothed

ENGINE = EngineRecord(version=1, in_progress=8, tokens_generated=900, tokens_per_s=450.0)
FIRST = {"reward_mean": 0.25, "ess": 1.0, "lag_mean": 0.0, "lag_max": 0, "completion_length_mean": 25.0}
SECOND = {"reward_mean": 0.5, "completion_length_mean": 40.0, "sampled_length_mean": 42.0, "engine": ENGINE}
STEPS = [
    StepRecord(version=1, time_s=4.0, samples=8, tokens_trained=200, **FIRST),
    StepRecord(version=2, time_s=6.0, samples=6, tokens_trained=300, **SECOND),
    StepRecord(version=3, time_s=6.0, samples=8, tokens_trained=10, lag_mean=1.5, lag_max=2, metrics={"a/reward": 0.5}),
]
ONLINE = {"version": 2, "version_min": 1, "version_max": 3, "metrics": {"a/reward": 0.5, "hard/reward": 0.25}}
EVALUATIONS = [
    EvaluationRecord(when="online", time_s=5.0, problems=9, reward_mean=0.4, **ONLINE),
    EvaluationRecord(when="before", version=0, time_s=1.0, problems=9, reward_mean=0.2, reward_standard_error=0.1),
    EvaluationRecord(when="after", version=3, time_s=8.0, problems=1, reward_mean=0.9),
    EvaluationRecord(when="after", version=3, time_s=9.0, problems=0),
]


def write(run_dir: Path, *records: StepRecord | EvaluationRecord) -> None:
    sink = JsonlSink(run_dir)
    for record in records:
        sink.write(record)
    sink.close()


def test_a_moving_mean_looks_back_and_skips_what_was_not_measured() -> None:
    nan = math.nan
    assert smoothed([1.0, 3.0, nan, 5.0, 1.0, 5.0, 4.0])[:2] == [1.0, 2.0]
    assert smoothed([1.0, 3.0, nan, 5.0, 1.0, 5.0, 4.0])[5:] == [3.5, 3.75]  # of 3, 5, 1, 5 and of 5, 1, 5, 4
    assert [math.isnan(value) for value in smoothed([nan, nan, 2.0])] == [True, True, False]


@pytest.mark.parametrize("records", [[*STEPS, *EVALUATIONS], STEPS[:1]], ids=["all", "one step"])
def test_a_png_is_drawn(tmp_path: Path, records: list[StepRecord | EvaluationRecord]) -> None:
    write(tmp_path, *records)
    draw_curves(tmp_path, tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(header[16:20], "big") > 1000


def test_nothing_to_draw(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=r"nothing to draw: .*metrics\.jsonl"):
            draw_curves(tmp_path, tmp_path / "curves.png")
        (tmp_path / "metrics.jsonl").touch()

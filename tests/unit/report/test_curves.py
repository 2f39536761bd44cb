"""The numbers behind the plots, and that damaged or empty runs are told apart from drawable ones."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import EngineRecord, StepRecord
from pipelinerl.metrics.sinks import METRICS_FILE, JsonlSink
from pipelinerl.report.curves import draw_curves, prepare, smoothed

ENGINE = EngineRecord(version=1, in_progress=8, tokens_generated=900, tokens_per_s=450.0)
FIRST = {"reward_mean": 0.25, "ess": 1.0, "lag_mean": 0.0, "lag_max": 0, "completion_length_mean": 25.0}
SECOND = {"reward_mean": 0.5, "completion_length_mean": 40.0, "sampled_length_mean": 42.0, "engine": ENGINE}
STEPS = [
    StepRecord(version=1, time_s=4.0, samples=8, tokens_trained=200, **FIRST),
    StepRecord(version=2, time_s=6.0, samples=6, tokens_trained=300, **SECOND),
    StepRecord(version=3, time_s=6.0, samples=8, tokens_trained=10, lag_mean=1.5, lag_max=2),
]
EVALUATIONS = [
    EvaluationRecord(when="before", version=0, time_s=1.0, problems=9, reward_mean=0.2, reward_standard_error=0.1),
    EvaluationRecord(when="after", version=3, time_s=8.0, problems=1, reward_mean=0.9),
    EvaluationRecord(when="after", version=3, time_s=9.0, problems=0),
]


def write(run_dir: Path, *records: StepRecord | EvaluationRecord) -> None:
    sink = JsonlSink(run_dir)
    for record in records:
        sink.write(record)
    sink.close()


def is_nan(values: list[float]) -> list[bool]:
    return [math.isnan(value) for value in values]


def test_a_moving_mean_looks_back_and_skips_what_was_not_measured() -> None:
    nan = math.nan
    assert smoothed([1.0, 3.0, nan, 5.0, 1.0, 5.0, 4.0])[:2] == [1.0, 2.0]
    assert smoothed([1.0, 3.0, nan, 5.0, 1.0, 5.0, 4.0])[5:] == [3.5, 3.75]  # of 3, 5, 1, 5 and of 5, 1, 5, 4
    assert is_nan(smoothed([nan, nan, 2.0])) == [True, True, False]


def test_the_numbers_that_are_drawn() -> None:
    curves = prepare(STEPS, EVALUATIONS)
    assert curves.version == [1, 2, 3]
    assert curves.time_s == [4.0, 6.0, 6.0]
    assert curves.samples == [8, 14, 22]
    assert curves.reward[:2] == [0.25, 0.5]
    assert is_nan(curves.reward) == [False, False, True]
    assert is_nan(curves.ess) == [False, True, True]
    assert (curves.lag_mean[2], curves.lag_max[2]) == (1.5, 2)
    assert curves.trained_tokens_per_s[1] == 150.0
    assert is_nan(curves.trained_tokens_per_s) == [True, False, True]  # the first step; no time passed
    assert is_nan(curves.generated_tokens_per_s) == [True, False, True]
    assert curves.generated_tokens_per_s[1] == 450.0
    assert curves.trained_length_mean[:2] == [25.0, 40.0]
    assert is_nan(curves.sampled_length_mean) == [True, False, True]
    assert [(one.when, one.time_s, one.reward, one.standard_error) for one in curves.held_out] == [
        ("before", 1.0, 0.2, 0.1),
        ("after", 8.0, 0.9, 0.0),
    ]


def test_environments_are_those_with_a_reward_among_the_metrics() -> None:
    def with_metrics(*metrics: dict[str, float]) -> list[StepRecord]:
        return [msgspec.structs.replace(step, metrics=found) for step, found in zip(STEPS, metrics, strict=True)]

    curves = prepare(with_metrics({"a/reward": 0.5, "a/boxed": 1.0}, {"b/reward": 0.25}, {}), [])
    assert list(curves.by_environment) == ["a", "b"]
    assert curves.by_environment["a"][0] == 0.5
    assert is_nan(curves.by_environment["b"]) == [True, False, True]
    alone = prepare(with_metrics({"a/reward": 0.5}, {"guesses": 2.0}, {}), [])
    assert alone.by_environment == {}
    assert list(alone.by_metric) == ["a/reward", "guesses"]


@pytest.mark.parametrize("records", [[*STEPS, *EVALUATIONS], STEPS[:1]], ids=["all", "one step"])
def test_a_png_is_drawn(tmp_path: Path, records: list[StepRecord | EvaluationRecord]) -> None:
    write(tmp_path, *records)
    draw_curves(tmp_path, tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(header[16:20], "big") > 1000


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no optimizer step"):
        draw_curves(tmp_path, tmp_path / "curves.png")
    (tmp_path / METRICS_FILE).touch()
    with pytest.raises(RunDirectoryError, match=r"nothing to draw: .*metrics\.jsonl"):
        draw_curves(tmp_path, tmp_path / "curves.png")

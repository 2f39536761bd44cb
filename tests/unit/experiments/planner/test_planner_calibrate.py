"""Measuring: that records and measurements become the right costs, and calibrations are read back. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner import calibration
from pipelinerl.experiments.planner.calibration import (
    LengthDistribution,
    decode_round,
    decode_times,
    first_groups,
    fit_steps,
    full_rate,
    read_calibration,
    short_run,
    training_costs,
)
from pipelinerl.launch.stages.generation import load_local_engine
from pipelinerl.metrics.records import TimelineRecord
from tests.unit.experiments.parts import CALIBRATION, group, turn
from tests.unit.record_parts import step

SLOTS = 6


def config(*settings: str) -> RunConfig:
    return load_config(None, ["--engine.slots", str(SLOTS), "--actor.max_tokens", "20", *settings])


def test_the_run_has_whole_rounds_and_nothing_that_only_costs_time(tmp_path: Path) -> None:
    short = short_run(config("--launch.kind", "embedded"), tmp_path, 16)
    assert (short.trainer.steps, short.evaluation.problems, short.launch.kind) == (16, 0, "processes")
    rounds = config("--schedule.kind", "conventional", "--schedule.steps_per_round", "12")
    assert short_run(rounds, tmp_path, 16).trainer.steps == 24


def test_no_long_completions_are_lost() -> None:
    groups = [group(index, [turn(3)]) for index in (1, 0, 3)]
    assert [one.index for one in first_groups(groups)] == [0, 1]


def test_the_rate_is_of_engines_that_are_as_full_as_they_get() -> None:
    def look(worker: int, time_s: float, in_progress: int, tokens: int) -> TimelineRecord:
        values = {"queued": 0, "tokens_generated": tokens, "version": 0}
        return TimelineRecord(worker=worker, time_s=time_s, in_progress=in_progress, **values)

    first = [look(0, 0.0, 4, 0), look(0, 1.0, 10, 40), look(0, 2.0, 9, 140), look(0, 3.0, 10, 150), look(0, 4.0, 10, 250)]
    assert full_rate([*first, look(1, 1.0, 10, 0), look(1, 3.0, 10, 160)]) == (9.75, (100 + 10 + 100 + 160) / 5)
    assert full_rate([look(0, 0.0, 0, 0), look(0, 1.0, 6, 50), look(0, 2.0, 4, 130), look(0, 3.0, 6, 200)]) == (5.0, 75.0)
    with pytest.raises(PipelineRLError, match="measure a longer run"):
        full_rate(first[:1])


def test_steps_of_two_sizes_tell_fixed_from_token_costs() -> None:
    steps = [(tokens, 0.05 + 0.001 * tokens) for tokens in (100, 400, 110, 390, 105, 410)]
    assert fit_steps([*steps, (100, 9.0)]) == pytest.approx((0.05, 0.001), rel=0.2)  # one was disturbed
    assert fit_steps(steps) == pytest.approx((0.05, 0.001))
    assert fit_steps([(50, 1.0), (100, 3.0)]) == pytest.approx((0.0, 0.03))  # nothing fixed is below 0
    assert fit_steps([(50, 1.0), (50, 1.0)]) == pytest.approx((0.0, 0.02))
    with pytest.raises(UserError, match="no step of the run had a gradient"):
        fit_steps([(0, 1.0)])


def test_costs_of_training_come_from_the_records_of_steps() -> None:
    times = {"train_s": 0.5, "wait_s": 0.25, "completion_length_mean": 10.0}
    costs = training_costs([step(n, float(n), tokens_trained=20 * n, **times) for n in range(1, 5)])
    assert costs["prepare_s"] == 0.25 / 8
    assert costs["used_share"] == pytest.approx(200 / 320)


def test_decode_steps_are_those_of_all_sequences_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config()
    model, engine = load_local_engine(run)
    steps: list[int] = []
    own_step = engine.step

    def watched() -> object:
        before = engine.progress().tokens_generated
        result = own_step()
        steps.append(engine.progress().tokens_generated - before)
        return result

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr("pipelinerl.launch.stages.generation.load_local_engine", lambda _: (model, engine))
    found = decode_times(run, LengthDistribution({4: 3, 60: 1}), 6, seconds=0.0)
    assert list(found) == [1, 2, 4, SLOTS]
    assert all(step_s > 0 for step_s in found.values())
    timed = calibration.MIN_ROUNDS * (calibration.DECODE_STEPS + 1)
    assert all(steps.count(active) >= timed for active in found)
    assert (engine.in_progress, engine.queued) == (0, 0)


def test_a_slot_too_short_to_measure_in() -> None:
    run = config("--engine.max_length", "18", "--actor.max_tokens", "8")
    _, engine = load_local_engine(run)
    with pytest.raises(UserError, match=r"engine\.max_length 18"):
        decode_round(engine, run, [6], 32, np.random.default_rng(0))


@pytest.mark.parametrize(
    "change", [{"lengths": {}}, {"lengths": {0: 1}}, {"lengths": {3: -1}}, {"decode_s": {4: 0.1, 1: 0.1}}, {"slots": "many"}]
)
def test_only_a_calibration_is_read_back(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(UserError, match="can't read"):
        read_calibration(path)
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(CALIBRATION) | change))
    with pytest.raises(UserError, match="pipelinerl lab calibrate"):
        read_calibration(path)

"""Run directories and calibrations as the simulation sees them, and the command."""

from __future__ import annotations

import json

import msgspec
import pytest

from pipelinerl.cli import lab as command
from pipelinerl.config.keys import render
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.scenario import read_measured, read_workload, run_scenario
from pipelinerl.experiments.planner.simulate import simulate
from pipelinerl.report import write_json
from tests.unit.experiments.parts import CALIBRATION, group, invoke, turn, write_rollouts
from tests.unit.record_parts import evaluation, step, write_records

SETTINGS = ["--engine.slots", "8", "--actor.group_size", "2", "--trainer.batch_size", "8", "--trainer.steps", "5"]


GROUPS = [
    group(0, [turn(4)], [turn(6)], rewards=(1, 0)),
    group(2, [turn(9)], [turn(5, prompt=9)], rewards=(1, 1)),
    group(1, [turn(3)], rewards=[1]),  # its other attempt failed
    group(3, [turn(7)], [turn(8, reason="length")], rewards=(0, 1)),
]


@pytest.fixture
def run_dir(tmp_path):
    config = load_config(None, [*SETTINGS, "--run_dir", str(tmp_path)])
    (tmp_path / "config.yaml").write_text(render(config))
    write_rollouts(tmp_path, GROUPS)
    times = {"train_s": 0.5, "wait_s": 1.5, "completion_length_mean": 20.0}
    steps = [step(version, 10.0 + 2.0 * version, **times) for version in range(1, 11)]
    write_records(tmp_path, evaluation("before", 0, 11.0), *steps)  # ready at 10, evaluates until 11
    summary = {"engine_busy_fraction": 0.875, "lag_mean": 1.5, "lag_max": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_what_a_run_measured(run_dir):
    measured = read_measured(run_dir, load_config(run_dir / "config.yaml", []))
    expected = {
        "steps": 10,
        "samples_per_s": 80 / 19,
        "samples_per_s_later": 64 / 16,
        "trained_tokens_per_s_later": 64 * 20 / 16,
        "lag_mean": 1.5,
        "lag_max": 3,
        "engine_busy_fraction": 0.875,
        "trainer_busy_fraction": 1 - (10 * 1.5 - 1) / 19,
    }
    assert measured == pytest.approx(expected)


def test_what_a_run_generated(run_dir):
    config = load_config(run_dir / "config.yaml", [])
    workload = read_workload(run_dir, config)
    assert workload.group(0).lengths == (4, 6)
    assert workload.group(0).used == (True, True)
    assert workload.group(2).used == (False, False)  # equal rewards
    assert workload.group(3).dropped == (False, False)
    assert workload.group(1) in [workload.group(index) for index in (0, 2, 3)]  # its own lacks an attempt
    assert workload.prompt_tokens == pytest.approx((5 * 5 + 9) / 6)

    drops = load_config(run_dir / "config.yaml", ["--preprocess.zero_advantage", "drop", "--preprocess.overlong", "drop"])
    assert read_workload(run_dir, drops).group(2).dropped == (True, True)
    assert read_workload(run_dir, drops).group(3).dropped == (False, True)
    keeps = load_config(run_dir / "config.yaml", ["--preprocess.zero_advantage", "keep"])
    assert read_workload(run_dir, keeps).group(2).used == (True, True)


def test_a_scenario_is_the_run_file_s_at_the_costs_of_the_calibration():
    settings = {"engine.slots": 32, "engine.processes": 3, "actor.group_size": 2, "trainer.batch_size": 10}
    settings |= {"trainer.ranks": 5, "trainer.steps": 5, "schedule.max_lag": 2, "stream.when_full": "drop_oldest"}
    config = load_config(None, settings)
    made = run_scenario(config, CALIBRATION)
    assert (made.engines, made.slots, made.group_size, made.batch_size, made.steps) == (3, 32, 2, 10, 5)
    assert (made.when_full, made.schedule.max_lag) == ("drop_oldest", 2)
    assert simulate(made).lag_max <= 2
    assert run_scenario(config, CALIBRATION, steps=9).steps == 9
    costs = made.costs
    assert len(costs.decode_step_s) == 33
    assert costs.decode_step_s[3] == pytest.approx(0.0012)
    assert costs.decode_step_s[32] == pytest.approx(0.005)  # twice as many as were measured take turns
    assert (costs.rollout_s, costs.train_step_s) == (0.0004, 0.064)
    assert costs.train_token_s == pytest.approx(0.00002)


def test_doubts():
    config = load_config(None, SETTINGS)
    assert CALIBRATION.doubts(config) == []
    other = load_config(None, ["--model.path", "m", "--engine.slots", "17", "--schedule.kind", "conventional"])
    machine = msgspec.structs.replace(CALIBRATION.machine, cores=2)
    found = msgspec.structs.replace(CALIBRATION, machine=machine, load_average=3.5).doubts(other)
    keys = ("model demo, the run has m", "slots 16, the run has 17", "the run has conventional:1", "average 3.5, 2")
    assert [key in doubt for key, doubt in zip(keys, found, strict=True)] == [True] * 4


@pytest.fixture
def calibration(tmp_path):
    write_json(tmp_path / "cal.json", CALIBRATION)
    return ["--calibration", tmp_path / "cal.json"]


def simulate_command(*arguments):
    return invoke(command.add_to, "lab", "simulate", *arguments)


def test_predicts_a_run_file_and_compares_with_a_run(calibration, run_dir, capsys):
    out = run_dir / "out.json"
    assert simulate_command(*calibration, *SETTINGS, "--engine.processes", 2, "--json", out) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_bytes())
    assert "pipeline, 2 engines of 8 slots, 5 steps" in printed
    assert "of the untrained model, from the calibration" in printed
    assert (written["prediction"]["rollouts_trained"], written["measured"]) == (40, None)

    assert simulate_command("--compare", run_dir, *calibration, "--json", out) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_bytes())
    predicted, measured = written["prediction"], written["measured"]
    assert predicted["steps"] == measured["steps"] == 10  # as many as the run took
    for shown in ("predicted", "measured", "87.5%", f"{predicted['samples_per_s'] / measured['samples_per_s'] - 1:+.1%}"):
        assert shown in printed


def test_a_run_that_would_never_end(calibration, run_dir):
    (run_dir / "rollouts" / "rollouts.jsonl").write_bytes(msgspec.json.encode(GROUPS[1]) + b"\n")
    with pytest.raises(UserError, match="this run would never end"):
        simulate_command("--compare", run_dir, *calibration, "--preprocess.zero_advantage", "drop")

"""Commands that make runs and look at them: `lab compare`, `lab calibrate`, `lab study` and `sweep`, with real runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pipelinerl.cli import main
from pipelinerl.config.load import load_config
from pipelinerl.experiments.planner.calibration import calibrate, read_calibration
from pipelinerl.experiments.study import RECOMPUTED, STALE, StudyRecord
from pipelinerl.experiments.sweep import make_grid
from pipelinerl.launch.run import train
from pipelinerl.report import write_json
from tests.integration.runs import command, flags, run, trained
from tests.unit.experiments.test_sweep import write_finished
from tests.unit.experiments.watch.test_watch_report import data_of

pytestmark = pytest.mark.slow

SMALL = [
    *("--trainer.batch_size", "16", "--actor.group_size", "4", "--engine.slots", "16", "--actor.max_tokens", "32"),
    *("--engine.threads", "1", "--trainer.threads", "1"),
]


def test_a_comparison_is_made_and_made_only_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    schedules = ["--schedules", "pipeline,conventional:2", "--seeds", "1", "--no-tune"]
    held_out = ["--held-out", "8", "--evaluate-every", "4"]
    arguments = ["lab", "compare", *schedules, *held_out, "--out", str(out), *SMALL, "--trainer.steps", "6"]
    ended = command(*arguments)
    assert ended.status == 0, ended.error
    contents = json.loads((out / "compare.json").read_text())
    assert contents["ratio_samples_per_s"]["median"] > 0
    assert contents["ratio_samples_per_s"]["baseline"] == "conventional:2"
    assert contents["limit"]["s_max"]["baseline"] == "conventional:2"
    assert 0 < contents["limit"]["share"]["median"] < 1
    assert sum(part["median"] for part in contents["limit"]["core_share"].values()) == pytest.approx(1)
    assert "times as fast as conventional:2 (S_max)" in ended.out
    assert all(one["execution"]["status"] == "finished" for one in contents["runs"])
    run_dir = out / contents["runs"][1]["execution"]["run"]
    lags = [json.loads(line)["lag_max"] for line in (run_dir / "metrics.jsonl").open()]
    assert set(lags[0::2]) <= {0, None}  # None: all of a group earned the same, nothing to train
    answers = [one["held_out"] for one in contents["runs"]]
    assert [[point["version"] for point in points] for points in answers] == [[0, 4, 6], [0, 4, 6]]
    # the same weights, problems and random numbers
    assert [{**points[0], "time_s": 0} for points in answers[1:]] == [{**answers[0][0], "time_s": 0}]
    assert not list(out.glob("*/seed-0/weights"))
    assert all(one["quantities"]["saving_s"] > 0 for one in contents["runs"])
    first, second = (str(out / one["execution"]["run"]) for one in contents["runs"])
    assert main(["report", first, second, "--out", str(tmp_path / "page.html")]) == 0
    assert main(["replay", first]) == 0, "also with the evaluations that were made after the run"

    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert main([*arguments, "--target", "0.1"]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before


def test_the_example_of_equal_lengths_has_equal_lengths(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "compare_equal_lengths.yaml"
    settings = {"trainer__steps": 3, "actor__max_tokens": 240, "environment__args__tokens": 9}
    train(load_config(example, flags(tmp_path / "run", **settings)))
    lengths = {sample.tokens for record in trained(tmp_path / "run") for sample in record.samples}
    assert lengths == {9}


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
    assert found.slots == 16
    assert sum(found.lengths.values()) >= 8
    assert 0 <= found.used_share <= 1
    assert (found.ranks, found.train_token_s > 0) == (config.trainer.ranks, True)
    assert found.tokens_per_s > 0
    assert said
    write_json(tmp_path / "calibration.json", found)
    assert read_calibration(tmp_path / "calibration.json") == found


SHORT = ("--lag", "3", "--problems", "8", "--attempts", "4", "--max-tokens", "30")


def test_a_study_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    run_dir, out = tmp_path / "r", tmp_path / "out"
    run(run_dir, trainer__steps=6, trainer__checkpoint_every=1, trainer__keep_checkpoints=100)
    capsys.readouterr()
    assert main(["lab", "study", "kv-cache", str(run_dir), *SHORT, "--out", str(out)]) == 0
    found = msgspec.json.decode((out / "kv-cache.json").read_bytes(), type=StudyRecord)
    printed = capsys.readouterr()
    assert "weights 3 to 6: lag 3" in printed.err
    assert [(start.version, start.target) for start in found.starts] == [(0, 3), (1, 4), (3, 6)]
    assert found.edges == (0, 10, 20, 30)
    for start in found.starts:
        for policy in start.policies.values():
            assert policy.engine_gap < 1e-4
            assert policy.kl.low <= policy.kl.mean <= policy.kl.high
        lagged = [start.policies[f"lag {lag}"] for lag in range(4)]
        assert [policy.lag_mean for policy in lagged] == [0, 1, 2, 3]
        assert lagged[0].kl.mean == 0.0
        assert all(older.kl.mean > newer.kl.mean for newer, older in pairwise(lagged))
        prefix = start.policies["prefix of lag 1"]
        assert (prefix.lag_mean, prefix.tokens < lagged[0].tokens) == (0, True)
        assert 0 < prefix.kl.mean < lagged[1].kl.mean
        # Until the first switch a mixed policy is the oldest weights: with the same random numbers, the same tokens.
        oldest, stale, recomputed = (
            [kl.mean for kl in policy.by_position]
            for policy in (lagged[-1], start.policies[STALE], start.policies[RECOMPUTED])
        )
        for mixed in (stale, recomputed):
            assert mixed[:2] == pytest.approx(oldest[:2], rel=1e-3)
            assert mixed[2] != pytest.approx(oldest[2], rel=1e-2)
        assert stale[2] != pytest.approx(recomputed[2], rel=1e-3)
        difference = start.policies[STALE].kl.mean - start.policies[RECOMPUTED].kl.mean
        assert start.differences["stale - recomputed"].mean == pytest.approx(difference, abs=1e-12)

    first = found.starts[0].policies[STALE]
    along, by_lag = data_of((out / "kv-cache.html").read_text())["sections"][0]["charts"]
    assert along["lines"][STALE] == [kl.mean for kl in first.by_position]
    assert by_lag["lines"]["conventional, lag k"][0] == 0.0
    assert sum("stale - lag 3" in line for line in printed.out.splitlines()) == 3


def test_a_sweep_of_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    own = ["--launch.kind", "embedded", "--evaluation.problems", "4", "--metrics.plot=false", "--trainer.steps", "1"]
    settings = [*SMALL, *own]
    write_finished(out, "01/seed-0", 0.5, 0.5)
    (out / "request.json").write_text(json.dumps(make_grid(None, settings, 2).to_json()))
    assert main(["sweep", *settings, "--seeds", "2", "--out", str(out)]) == 0, capsys.readouterr().err
    (setting,) = json.loads((out / "sweep.json").read_text())["settings"]
    assert [run["status"] for run in setting["runs"]] == ["finished", "finished"]
    made = json.loads((out / "01/seed-1/summary.json").read_text())
    assert setting["runs"][1]["reward"] == made["eval_reward_after"]
    assert made["seed"] == 1

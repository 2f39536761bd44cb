"""`pipelinerl lab compare` and `pipelinerl report` as commands, with real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl import load_config
from pipelinerl.cli import main
from pipelinerl.launch.run import train
from tests.integration.runs import command, flags, trained

SMALL = [
    *("--trainer.steps", "6", "--trainer.batch_size", "16", "--actor.group_size", "4", "--engine.slots", "16"),
    *("--engine.threads", "1", "--trainer.threads", "1", "--actor.max_tokens", "32"),
]


@pytest.mark.slow
def test_a_comparison_is_made_and_made_only_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    schedules = ["--schedules", "pipeline,conventional:2", "--seeds", "1", "--no-tune"]
    held_out = ["--held-out", "8", "--evaluate-every", "4"]
    arguments = ["lab", "compare", *schedules, *held_out, "--out", str(out), *SMALL]
    ended = command(*arguments)
    assert ended.status == 0, ended.error
    contents = json.loads((out / "compare.json").read_text())
    assert contents["ratio_samples_per_s"]["median"] > 0
    assert contents["ratio_samples_per_s"]["baseline"] == "conventional:2"
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


@pytest.mark.slow
def test_the_example_of_equal_lengths_has_equal_lengths(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "compare_equal_lengths.yaml"
    settings = {"trainer__steps": 3, "actor__max_tokens": 240, "environment__args__tokens": 9}
    train(load_config(example, flags(tmp_path / "run", **settings)))
    lengths = {sample.tokens for record in trained(tmp_path / "run") for sample in record.samples}
    assert lengths == {9}

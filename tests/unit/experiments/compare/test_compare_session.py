"""A comparison from its request to its results, with runs that only write what real ones would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.load import config_to_yaml, load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError, PipelineRLError, RunDirectoryError, RunInterruptedError, TrainingDivergedError
from pipelinerl.experiments.compare.compare import compare
from pipelinerl.experiments.compare.held_out import Answered
from pipelinerl.experiments.compare.request import ComparisonRequest, make_request
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.metrics.summary import summarize
from pipelinerl.resources.machine import Machine
from tests.unit.experiments.watch.test_watch_report import data_of

MACHINE = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={"torch": "0"})
SECONDS = {"pipeline": 1.0, "conventional": 2.0, "async": 1.5}


def request(*flags: str, **changed: Any) -> ComparisonRequest:
    arguments = {"schedules": "pipeline,conventional:2,conventional:4", "seeds": 2, "tune": False, "held_out": 0} | changed
    config = load_config(None, ["--trainer.steps", "16", "--trainer.batch_size", "32", *flags])
    return make_request(config, MACHINE, **arguments)


class Runs:
    """Stands in for `train`: writes a run's records; a step takes as long as its schedule and settings say."""

    def __init__(self, fail: Callable[[RunConfig], Exception | None] = lambda config: None) -> None:
        self.made: list[str] = []
        self.fail = fail

    def __call__(self, config: RunConfig) -> None:
        assert config.run_dir is not None
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True)
        self.made.append("/".join(run_dir.parts[-2:]))
        (run_dir / "config.yaml").write_text(config_to_yaml(config))
        step_s = SECONDS[config.schedule.kind] / config.engine.processes * (1.0 + config.seed / 10)
        steps = [
            StepRecord(
                version=n,
                time_s=5.0 + n * step_s,
                samples=config.trainer.batch_size,
                reward_mean=0.1 + 0.05 * n,
                ess=0.99,
                lag_max=config.schedule.steps_per_round - 1,
                completion_length_mean=10.0,
                train_s=0.5 * step_s,
                wait_s=0.5 * step_s,
            )
            for n in range(1, config.trainer.steps + 1)
        ]
        sink = JsonlSink(run_dir)
        for record in steps:
            sink.write(record)
        sink.close()
        error = self.fail(config)
        if error is not None:
            raise error
        summary = summarize(config, steps, [], {}, wall_s=9.0, status="finished")
        (run_dir / "summary.json").write_bytes(msgspec.json.encode(summary))


class Evaluations:
    """Stands in for evaluations: all schedules are as good at the same version, 0.1 + 0.04 a step."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, run_dir: Path, asked: ComparisonRequest) -> list[Answered]:
        self.made.append("/".join(run_dir.parts[-2:]))
        rewards = {version: 0.1 + 0.04 * version for version in asked.evaluated_versions}
        return [Answered(version=n, reward=reward, low=reward - 0.02, high=reward + 0.02) for n, reward in rewards.items()]


def run(
    out: Path,
    asked: ComparisonRequest | None = None,
    runs: Runs | None = None,
    evaluations: Evaluations | None = None,
    **options: Any,
) -> dict[str, Any]:
    made = evaluations or Evaluations()
    return compare(asked or request(), out, train=runs or Runs(), evaluate=made, say=print, **options).contents


def test_the_results(tmp_path: Path) -> None:
    contents = run(tmp_path / "out", target=0.5)
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written == contents
    # A conventional step takes twice as long here, and learning per step is the same.
    for key in ("ratio_time_to_reward", "ratio_samples_per_s"):
        assert (written[key]["median"], written[key]["min"], written[key]["max"]) == (2.0, 2.0, 2.0)
        assert written[key]["baseline"] == "conventional:2"
    assert written["target_reward"] == 0.5
    assert [(one["schedule"], one["seed"]) for one in written["runs"]] == [
        *(("pipeline", 0), ("pipeline", 1)),
        *(("conventional:2", 0), ("conventional:2", 1)),
        *(("conventional:4", 0), ("conventional:4", 1)),
    ]
    first = written["runs"][0]
    assert first["reached"] == {"version": 10, "time_s": 10.0, "samples": 320}  # mean of 0.1 + 0.05 n over 6..10
    assert first["measured"]["samples_per_s"] == 32.0
    data = data_of((tmp_path / "out" / "report.html").read_text())
    assert [one["title"] for one in data["sections"]][:3] == ["Findings", "Schedules", "Every run"]
    assert any("2.00 times sooner" in text for text in data["sections"][0]["texts"])
    assert {(one["label"], one["colour"]) for one in data["runs"]} >= {("pipeline, seed 0", 0), ("pipeline, seed 1", 0)}
    # Without a target: from 0.25 (mean of steps 1..5) to 0.8 (12..16), of which nine tenths are 0.745.
    assert run(tmp_path / "out")["target_reward"] == 0.74


def test_held_out_rewards_decide_and_lag_does_not(tmp_path: Path) -> None:
    """Training rewards of the schedules are shifted by their lag; their versions are equally good."""

    class Lagging(Runs):
        def __call__(self, config: RunConfig) -> None:
            super().__call__(config)
            path = Path(config.run_dir or "") / "metrics.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()]
            lag = 3 if config.schedule.kind == "pipeline" else 0
            for record in records:
                record["reward_mean"] = 0.1 + 0.04 * max(0, record["version"] - lag)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            (path.parent / WEIGHTS_FOLDER).mkdir()

    asked, evaluations = request(held_out=8, evaluate_every=3), Evaluations()
    assert asked.evaluated_versions == [0, 3, 6, 9, 12, 15, 16]
    contents = run(tmp_path / "out", asked, Lagging(), evaluations, target=0.5)
    assert contents["reward"] == "held-out"
    assert len(evaluations.made) == 6
    # 0.5 is reached by version 10, between those evaluated; a step of pipeline takes half as long.
    assert {(one["reached"]["version"], one["reached"]["samples"]) for one in contents["runs"]} == {(10, 320)}
    assert contents["ratio_time_to_reward"]["median"] == 2.0
    first = contents["runs"][0]
    assert [one["version"] for one in first["held_out"]] == asked.evaluated_versions
    assert not (tmp_path / "out" / "pipeline" / "seed-0" / WEIGHTS_FOLDER).exists()
    page = (tmp_path / "out" / "report.html").read_text()
    shown = data_of(page)["news"]["pipeline, seed 0"]["evaluations"]
    assert [(one["version"], one["minutes"]) for one in shown] == [(n, n / 60) for n in asked.evaluated_versions]
    assert "reached a held-out reward of 0.5 2.00 times sooner" in page
    again = Evaluations()
    assert run(tmp_path / "out", asked, evaluations=again, target=0.5) == contents
    assert again.made == []
    unasked = run(tmp_path / "out", asked)
    assert unasked["target_reward"] == 0.67  # nine tenths of the way from 0.1 to 0.74


def test_an_evaluation_that_was_stopped_is_made_without_its_run(tmp_path: Path) -> None:
    class Stopped(Evaluations):
        def __call__(self, run_dir: Path, asked: ComparisonRequest) -> list[Answered]:
            raise RunInterruptedError("stopped")

    with pytest.raises(RunInterruptedError, match=r"run the same command with --out .*"):
        run(tmp_path / "out", request(held_out=8), evaluations=Stopped())
    runs, evaluations = Runs(), Evaluations()
    run(tmp_path / "out", request(held_out=8), runs, evaluations)
    assert len(runs.made) == 5
    assert "pipeline/seed-0" not in runs.made
    assert evaluations.made[0] == "pipeline/seed-0"


def test_settings_are_tried_and_the_fastest_is_used(tmp_path: Path) -> None:
    contents = run(tmp_path / "out", request(tune=True))
    for schedule, tuned in contents["trials"].items():
        full = [one for one in tuned["trials"] if one["full"]]
        assert sorted(one["settings"]["processes"] for one in full) == [1, 2], schedule
        (used,) = [one for one in full if one["settings"] == tuned["used"]]
        assert used["tokens_per_s"] == max(one["tokens_per_s"] for one in tuned["trials"]), schedule
        assert tuned["used"]["processes"] == 2
    assert all(one["settings"]["processes"] == 2 for one in contents["runs"])
    assert "processes: 2" in (tmp_path / "out" / "pipeline" / "seed-1" / "config.yaml").read_text()
    assert not list(tmp_path.glob("out/trials/*/*/*/rollouts"))


def test_a_page_that_cannot_be_written_leaves_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "out", target=0.5)
    for name in ("report.html", "compare.json"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "report.html").mkdir()
    contents = run(tmp_path / "out", target=0.5)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == contents
    assert capsys.readouterr().out.count("warning: report.html is missing: ") == 1


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    def stop(config: RunConfig) -> Exception | None:
        here = config.schedule.steps_per_round == 4 and config.seed == 0
        return RunInterruptedError("stopped before its goal; go on with --resume") if here else None

    first, second, third = Runs(stop), Runs(), Runs()
    with pytest.raises(RunInterruptedError, match=r"run the same command with --out .*") as stopped:
        run(tmp_path / "out", runs=first)
    assert "--resume" not in str(stopped.value)
    assert len(first.made) == 3
    assert not (tmp_path / "out" / "compare.json").exists()
    contents = run(tmp_path / "out", runs=second)
    assert second.made[0] == "conventional-4/seed-0"  # once more, from the start
    assert len(second.made) == 4
    assert contents == run(tmp_path / "out", runs=third)
    assert third.made == []


def test_changed_arguments_are_named(tmp_path: Path) -> None:
    run(tmp_path / "out")
    with pytest.raises(RunDirectoryError) as error:
        run(tmp_path / "out", request("--trainer.learning_rate", "0.1", seeds=3, tune=True))
    for difference in ("seeds was 2, now 3", "tune was false, now true", "config.trainer.learning_rate was 0.0003, now 0.1"):
        assert difference in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_folder(tmp_path: Path) -> None:
    run(tmp_path / "out")
    (tmp_path / "out" / "executions.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError, match=r"executions\.jsonl, line 1"):
        run(tmp_path / "out")
    (tmp_path / "out" / "request.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="damaged"):
        run(tmp_path / "out")


def test_a_run_that_diverges_is_a_result_that_reaches_nothing(tmp_path: Path) -> None:
    def diverge(config: RunConfig) -> Exception | None:
        here = config.schedule.steps_per_round == 4 and config.seed == 1
        return TrainingDivergedError("the loss is <nan>") if here else None

    evaluations = Evaluations()
    contents = run(tmp_path / "out", request(held_out=8), Runs(diverge), evaluations, target=0.5)
    assert len(evaluations.made) == 5
    row = next(one for one in contents["schedules"] if one["schedule"] == "conventional:4")
    assert (row["runs"], row["reached"], row["diverged"]) == (2, 1, 1)
    assert row["ratio_samples_per_s"]["median"] is None
    assert contents["ratio_samples_per_s"]["median"] == 2.0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "conventional:4: 1 of 2 runs diverged." in page
    assert "the loss is \\u003cnan>" in page
    again = Runs()
    run(tmp_path / "out", request(held_out=8), again, target=0.5)
    assert again.made == []


def test_a_run_that_fails_is_tried_again_and_the_others_are_made(tmp_path: Path) -> None:
    def fail(config: RunConfig) -> Exception | None:
        here = config.schedule.kind == "pipeline" and config.seed == 0
        return PipelineRLError("no memory is left") if here else None

    runs, again = Runs(fail), Runs()
    with pytest.raises(PipelineRLError, match=r"1 of 6 runs failed; .*pipeline/seed-0 failed: no memory is left"):
        run(tmp_path / "out", runs=runs)
    assert len(runs.made) == 6
    run(tmp_path / "out", runs=again)
    assert again.made == ["pipeline/seed-0"]


def test_a_schedule_that_does_not_go_with_the_run_file_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conventional:2: trainer\.ess_threshold"):
        run(tmp_path / "out", request("--trainer.ess_threshold", "0.5"))
    assert not (tmp_path / "out").exists()

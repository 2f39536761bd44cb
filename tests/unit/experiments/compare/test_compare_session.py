"""A comparison from its request to its results, with runs that only write what real ones would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.checkpoint import WEIGHTS_FOLDER
from pipelinerl.config.load import config_to_yaml, load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError, PipelineRLError, RunDirectoryError, RunInterruptedError, TrainingDivergedError
from pipelinerl.experiments.compare.compare import ComparisonRequest, answer_held_out, compare, make_request
from pipelinerl.experiments.runs import Command
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import summarize
from pipelinerl.resources.machine import Machine
from tests.unit.experiments.watch.test_watch_report import data_of
from tests.unit.record_parts import write_records

MACHINE = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={"torch": "0"})
SECONDS = {"pipeline": 1.0, "conventional": 2.0, "async": 1.5}


def request(*flags: str, **changed: Any) -> ComparisonRequest:
    arguments = {"schedules": "pipeline,conventional:2,conventional:4", "seeds": 2, "tune": False, "held_out": 8} | changed
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
        write_records(run_dir, *steps)
        error = self.fail(config)
        if error is not None:
            raise error
        summary = summarize(config, steps, [], {}, wall_s=9.0, status="finished")
        (run_dir / "summary.json").write_bytes(msgspec.json.encode(summary))


class Evaluations:
    """Stands in for evaluations: all schedules are as good at the same version, 0.1 + 0.04 a step."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, run_dir: Path, asked: ComparisonRequest) -> dict[int, list[EvaluatedProblem]]:
        self.made.append("/".join(run_dir.parts[-2:]))
        return {
            version: [EvaluatedProblem(problem_id="p", reward=0.1 + 0.04 * version)] for version in asked.evaluated_versions
        }


def run(
    out: Path,
    asked: ComparisonRequest | None = None,
    runs: Runs | None = None,
    evaluations: Evaluations | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    compare(asked or request(), out, train=runs or Runs(), answer=evaluations or Evaluations(), target=target)
    return json.loads((out / "compare.json").read_text())  # type: ignore[no-any-return]


def test_the_results(tmp_path: Path) -> None:
    """Training rewards of the schedules are shifted by their lag, and decide nothing; their versions are equally good."""

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

    out, asked, evaluations = tmp_path / "out", request(evaluate_every=3), Evaluations()
    assert asked.evaluated_versions == [0, 3, 6, 9, 12, 15, 16]
    written = run(out, asked, Lagging(), evaluations, target=0.5)
    # A conventional step takes twice as long here, and learning per step is the same.
    for key in ("ratio_time_to_reward", "ratio_samples_per_s"):
        assert [written[key][name] for name in ("median", "min", "max")] == pytest.approx([2.0, 2.0, 2.0])
        assert written[key]["baseline"] == "conventional:2"
    assert written["target_reward"] == 0.5
    assert [(one["schedule"], one["seed"]) for one in written["runs"]] == [
        *(("pipeline", 0), ("pipeline", 1)),
        *(("conventional:2", 0), ("conventional:2", 1)),
        *(("conventional:4", 0), ("conventional:4", 1)),
    ]
    first = written["runs"][0]
    names = ("time_to_reward_s", "samples_to_reward", "samples_per_s")  # version 10, between those evaluated
    assert [first["quantities"][name] for name in names] == [10.0, 320, 32.0]
    assert [one["version"] for one in first["held_out"]] == asked.evaluated_versions
    assert not (out / "pipeline" / "seed-0" / WEIGHTS_FOLDER).exists()
    data = data_of((out / "report.html").read_text())
    assert [one["title"] for one in data["sections"]] == ["Findings", "Schedules"]
    assert any("reached a held-out reward of 0.5 2.00 times sooner" in text for text in data["sections"][0]["texts"])
    assert {(one["label"], one["colour"]) for one in data["runs"]} >= {("pipeline, seed 0", 0), ("pipeline, seed 1", 0)}
    shown = data["news"]["pipeline, seed 0"]["evaluations"]
    assert [(one["version"], one["minutes"]) for one in shown] == [(n, n / 60) for n in asked.evaluated_versions]
    again = Evaluations()
    assert run(out, asked, evaluations=again, target=0.5) == written
    assert (len(evaluations.made), again.made) == (6, [])
    assert run(out, asked)["target_reward"] == 0.67  # nine tenths of the way from 0.1 to 0.74


def test_without_held_out_problems_rates_are_compared(tmp_path: Path) -> None:
    evaluations = Evaluations()
    written = run(tmp_path / "out", request(held_out=0), evaluations=evaluations)
    assert evaluations.made == []
    assert (written["target_reward"], written["ratio_time_to_reward"]["median"]) == (None, None)
    assert written["ratio_samples_per_s"]["median"] == pytest.approx(2.0)


@pytest.mark.parametrize(("problems", "cores", "processes"), [(8, 4, 1), (50, 4, 3), (1000, 64, 4)])
def test_every_version_is_answered_once_by_as_many_processes_as_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: int, cores: int, processes: int
) -> None:
    started: list[list[int]] = []

    def answer(commands: Sequence[Command]) -> None:
        for command in commands:
            words = command.arguments
            started.append([int(word.partition("@")[2]) for word in words if word.startswith(f"{tmp_path}@")])
            out = Path(words[-1])
            for version in started[-1]:
                (out / f"r@{version}").mkdir(parents=True)
                line = {"problem_id": "p", "reward": version / 10, "number": 0, "attempt": 0, "passed": False}
                (out / f"r@{version}" / "attempts.jsonl").write_text(json.dumps(line) + "\n")
            models = [{"version": version, "folder": f"r@{version}"} for version in started[-1]]
            (out / "summary.json").write_text(json.dumps({"models": models}))

    monkeypatch.setattr("pipelinerl.experiments.compare.compare.run_commands", answer)
    machine = msgspec.structs.replace(MACHINE, cores=cores)
    asked = request(held_out=problems, evaluate_every=6)
    answered = answer_held_out(tmp_path, msgspec.structs.replace(asked, machine=machine))
    assert len(started) == processes
    assert sorted(version for versions in started for version in versions) == asked.evaluated_versions == [0, 6, 12, 16]
    assert {version: one.reward for version, (one,) in answered.items()} == {0: 0.0, 6: 0.6, 12: 1.2, 16: 1.6}


def test_an_evaluation_that_was_stopped_is_made_without_its_run(tmp_path: Path) -> None:
    class Stopped(Evaluations):
        def __call__(self, run_dir: Path, asked: ComparisonRequest) -> dict[int, list[EvaluatedProblem]]:
            raise RunInterruptedError("stopped")

    with pytest.raises(RunInterruptedError, match=r"run the same command with --out .*"):
        run(tmp_path / "out", request(), evaluations=Stopped())
    runs, evaluations = Runs(), Evaluations()
    run(tmp_path / "out", request(), runs, evaluations)
    assert len(runs.made) == 5
    assert "pipeline/seed-0" not in runs.made
    assert evaluations.made[0] == "pipeline/seed-0"


def test_settings_are_tried_and_the_fastest_is_used(tmp_path: Path) -> None:
    contents = run(tmp_path / "out", request(tune=True))
    used_by = {row["schedule"]: row["settings"] for row in contents["schedules"]}
    for schedule, trials in contents["trials"].items():
        full = [one for one in trials if one["full"]]
        assert sorted(one["settings"]["processes"] for one in full) == [1, 2], schedule
        (used,) = [one for one in full if one["settings"] == used_by[schedule]]
        assert used["tokens_per_s"] == max(one["tokens_per_s"] for one in trials), schedule
    assert all(one["settings"]["processes"] == 2 for one in contents["runs"])
    assert "processes: 2" in (tmp_path / "out" / "pipeline" / "seed-1" / "config.yaml").read_text()


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
    assert run(tmp_path / "out", runs=third) == contents
    assert third.made == []


def test_changed_arguments_and_damaged_files_are_named(tmp_path: Path) -> None:
    run(tmp_path / "out")
    with pytest.raises(RunDirectoryError) as error:
        run(tmp_path / "out", request("--trainer.learning_rate", "0.1", seeds=3, tune=True))
    for difference in ("seeds was 2, now 3", "tune was false, now true", "config.trainer.learning_rate was 0.0003, now 0.1"):
        assert difference in str(error.value)
    assert "\n" not in str(error.value)
    for name, message in (("executions.jsonl", r"executions\.jsonl, line 1"), ("request.json", "damaged")):
        (tmp_path / "out" / name).write_text("{\n")
        with pytest.raises(RunDirectoryError, match=message):
            run(tmp_path / "out")


def test_a_run_that_diverges_is_a_result_that_reaches_nothing(tmp_path: Path) -> None:
    def diverge(config: RunConfig) -> Exception | None:
        here = config.schedule.steps_per_round == 4 and config.seed == 1
        return TrainingDivergedError("the loss is nan") if here else None

    evaluations = Evaluations()
    contents = run(tmp_path / "out", request(), Runs(diverge), evaluations, target=0.5)
    assert len(evaluations.made) == 5
    row = next(one for one in contents["schedules"] if one["schedule"] == "conventional:4")
    assert (row["runs"], row["reached"], row["diverged"]) == (2, 1, 1)
    assert row["ratio_samples_per_s"]["median"] is None
    assert contents["runs"][-1]["execution"]["status"] == "diverged: the loss is nan"
    assert "conventional:4: 1 of 2 runs diverged." in (tmp_path / "out" / "report.html").read_text()
    again = Runs()
    run(tmp_path / "out", request(), again, target=0.5)
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

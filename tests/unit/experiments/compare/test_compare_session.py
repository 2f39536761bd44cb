"""A comparison from its request to its results, with runs that only write what real ones would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from pipelinerl.metrics.summary import summarize
from pipelinerl.resources.machine import Machine
from tests.unit.experiments.watch.test_watch_report import data_of
from tests.unit.record_parts import answered, step, write_records

MACHINE = Machine(cpu="a processor", cores=2, memory_gib=4.0, system="Linux", versions={"torch": "0"})
SECONDS = {"pipeline": 1.0, "conventional": 2.0, "async": 1.5}


def request(*flags: str, **changed: Any) -> ComparisonRequest:
    arguments = {"schedules": "pipeline,conventional:2,conventional:4", "seeds": 2, "tune": False, "held_out": 8} | changed
    config = load_config(None, ["--trainer.steps", "16", "--trainer.batch_size", "32", *flags])
    return make_request(config, MACHINE, **arguments)


class Runs:
    """Stands in for `train`: writes a run's records; a step takes as long as its schedule and settings say."""

    def __init__(self, errors: Mapping[str, Exception] | None = None) -> None:
        self.made: list[str] = []
        self.errors = errors or {}

    def __call__(self, config: RunConfig) -> None:
        assert config.run_dir is not None
        run_dir = Path(config.run_dir)
        (run_dir / WEIGHTS_FOLDER).mkdir(parents=True)
        self.made.append("/".join(run_dir.parts[-2:]))
        (run_dir / "config.yaml").write_text(config_to_yaml(config))
        step_s = SECONDS[config.schedule.kind] / config.engine.processes * (1.0 + config.seed / 10)
        fields = {"samples": config.trainer.batch_size, "completion_length_mean": 10.0}
        fields |= {"train_s": 0.5 * step_s, "wait_s": 0.5 * step_s}
        versions = range(1, config.trainer.steps + 1)
        steps = [step(n, 5.0 + n * step_s, reward_mean=0.1 + 0.05 * n, **fields) for n in versions]
        write_records(run_dir, *steps)
        if self.made[-1] in self.errors:
            raise self.errors[self.made[-1]]
        summary = summarize(config, steps, [], {}, wall_s=9.0, status="finished")
        (run_dir / "summary.json").write_bytes(msgspec.json.encode(summary))


class Evaluations:
    """Stands in for evaluations: all schedules are as good at the same version, 0.1 + 0.04 a step."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made: list[str] = []
        self.error = error

    def __call__(self, run_dir: Path, asked: ComparisonRequest) -> dict[int, list[EvaluatedProblem]]:
        self.made.append("/".join(run_dir.parts[-2:]))
        if self.error is not None:
            raise self.error
        return {version: [answered(0.1 + 0.04 * version)] for version in asked.evaluated_versions}


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
    """Training rewards decide nothing."""
    out, asked, evaluations = tmp_path / "out", request(evaluate_every=3), Evaluations()
    assert asked.evaluated_versions == [0, 3, 6, 9, 12, 15, 16]
    written = run(out, asked, evaluations=evaluations, target=0.5)
    # A conventional step takes twice as long here, and learning per step is the same.
    for key in ("ratio_time_to_reward", "ratio_samples_per_s"):
        assert [written[key][name] for name in ("median", "min", "max")] == pytest.approx([2.0, 2.0, 2.0])
        assert written[key]["baseline"] == "conventional:2"
    assert written["target_reward"] == 0.5
    schedules = ("pipeline", "conventional:2", "conventional:4")
    assert [(one["schedule"], one["seed"]) for one in written["runs"]] == [(name, n) for name in schedules for n in (0, 1)]
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
    with pytest.raises(RunInterruptedError, match=r"run the same command with --out .*"):
        run(tmp_path / "out", evaluations=Evaluations(RunInterruptedError("stopped")))
    runs, evaluations = Runs(), Evaluations()
    run(tmp_path / "out", runs=runs, evaluations=evaluations)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "message", "made"),
    [
        ("conventional-4/seed-0", RunInterruptedError("go on with --resume"), "run the same command with --out", 3),
        ("pipeline/seed-0", PipelineRLError("no memory"), "1 of 6 runs failed; .*pipeline/seed-0 failed: no memory", 6),
    ],
)
def test_it_goes_on_with_the_run_that_was_stopped_or_failed(
    name: str, error: Exception, message: str, made: int, tmp_path: Path
) -> None:
    first, second, third = Runs({name: error}), Runs(), Runs()
    with pytest.raises(PipelineRLError, match=message) as ended:
        run(tmp_path / "out", runs=first)
    assert "--resume" not in str(ended.value)
    contents = run(tmp_path / "out", runs=second)
    assert (len(first.made), second.made[0], len(second.made)) == (made, name, 6 - (made - 1))
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
    evaluations, again = Evaluations(), Runs()
    diverging = Runs({"conventional-4/seed-1": TrainingDivergedError("the loss is nan")})
    contents = run(tmp_path / "out", request(), diverging, evaluations, target=0.5)
    assert len(evaluations.made) == 5
    row = next(one for one in contents["schedules"] if one["schedule"] == "conventional:4")
    assert (row["runs"], row["reached"], row["diverged"]) == (2, 1, 1)
    assert row["ratio_samples_per_s"]["median"] is None
    assert contents["runs"][-1]["execution"]["status"] == "diverged: the loss is nan"
    assert "conventional:4: 1 of 2 runs diverged." in (tmp_path / "out" / "report.html").read_text()
    assert run(tmp_path / "out", runs=again, target=0.5) == contents
    assert again.made == []


def test_a_schedule_that_does_not_go_with_the_run_file_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conventional:2: trainer\.ess_threshold"):
        run(tmp_path / "out", request("--trainer.ess_threshold", "0.5"))
    assert not (tmp_path / "out").exists()

"""The grid of a sweep and its results, without runs that train."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.runs import Folder, planned_runs
from pipelinerl.experiments.sweep import (
    Grid,
    SweepResults,
    make_grid,
    results,
    section,
    split_flags,
    split_values,
)
from pipelinerl.report import in_terminal
from tests.integration.runs import try_in_this_process

RATES = ["--trainer.learning_rate", "1e-4,3e-4", "--actor.group_size=8"]


def test_commas_separate_values_only_outside_of_brackets_and_quotes() -> None:
    assert split_values("1e-4, 3e-4") == ["1e-4", "3e-4"]
    assert split_values("[0.9,0.99],[0.9,0.95]") == ["[0.9,0.99]", "[0.9,0.95]"]
    assert split_values("{a: [1,2], b: 3}") == ["{a: [1,2], b: 3}"]
    assert split_values("'one, two',three") == ["'one, two'", "three"]
    assert split_values("don't,won't") == ["don't", "won't"]
    assert split_flags([*RATES, "--metrics.plot"]) == (
        ["--actor.group_size=8", "--metrics.plot"],
        {"trainer.learning_rate": ["1e-4", "3e-4"]},
    )


def test_the_grid_has_every_combination_and_seed() -> None:
    grid = make_grid(None, [*RATES, "--trainer.batch_size", "64,128", "--seed", "5"], 2)
    runs = planned_runs(grid.settings, grid.seeds)
    found = [(run.setting.config.trainer.learning_rate, run.setting.config.trainer.batch_size, run.seed) for run in runs]
    first = [(rate, batch, 5) for rate in (1e-4, 3e-4) for batch in (64, 128)]
    assert found == first + [(rate, batch, 6) for rate, batch, _ in (*first[1:], first[0])], "the order rotates"
    run = runs[-2]
    assert run.name == "04-learning_rate=3e-4,batch_size=128/seed-6"
    config = run.config(Path("/sweeps"))
    assert (config.seed, config.run_dir, config.actor.group_size) == (6, f"/sweeps/{run.name}", 8)


@pytest.mark.parametrize(
    ("flags", "seeds", "refusal"),
    [
        ([], 1, "nothing to sweep over"),
        (["--trainer.learning_rate", "1e-4,,3e-4"], 2, "'1e-4,,3e-4' is not allowed here"),
        (["--trainer.learning_rate", "1e-4,fast"], 1, "'fast' is not allowed here"),
        (["--trainer.learning_rte", "1e-4,3e-4"], 1, "did you mean `--trainer.learning_rate`?"),
        (["--trainer.learning_rate", "1e-4,0.0001"], 1, "are the same setting"),
        ([*RATES, "--trainer.learning_rate", "1,2"], 1, "in one flag"),
        (["--run_dir", "runs/one"], 2, "--out"),
        (["--seed", "1,2"], 1, "--seeds K"),
        (["--actor.max_tokens", "64,4000"], 1, "engine.max_length"),
    ],
)
def test_a_wrong_grid_is_refused(flags: list[str], seeds: int, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal.replace("?", r"\?")) as refused:
        make_grid(None, flags, seeds)
    assert "\n" not in str(refused.value)


def test_a_dry_run_checks_every_setting_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.launch.checks.dry_run", lambda config: [f"{config.trainer.learning_rate:g} is fine"])
    assert main(["sweep", "--dry-run", *RATES, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown == "trainer.learning_rate 1e-4:\n0.0001 is fine\n\ntrainer.learning_rate 3e-4:\n0.0003 is fine\n\n"
    assert not (tmp_path / "out").exists()


def write_finished(out: Path, name: str, reward: float, evaluated: float | None = None, status: str = "finished") -> None:
    """What a finished run of a sweep left."""
    (out / name).mkdir(parents=True)
    summary = {"status": status, "reward_last": reward, "eval_reward_after": evaluated}
    (out / name / "summary.json").write_text(json.dumps(summary))
    with (out / "executions.jsonl").open("a") as lines:
        lines.write(json.dumps({"run": name, "status": status, "began": "", "load_before": None}) + "\n")


def found(out: Path, rewards: Sequence[Sequence[float | str | None]], grid: Grid) -> SweepResults:
    """Results of runs with these rewards, by setting; a text is how a run failed, None: it has not run."""
    for setting, of_setting in zip(grid.settings, rewards, strict=True):
        for seed, value in zip(grid.seeds, of_setting, strict=True):
            if isinstance(value, str):
                write_finished(out, f"{setting.folder}/seed-{seed}", 1.0, 1.0, value)
            elif value is not None:
                write_finished(out, f"{setting.folder}/seed-{seed}", 0.0, value)
    return results(grid, Folder(out, lambda _: None))


def test_settings_are_ranked_and_failures_never_improve_them(tmp_path: Path) -> None:
    grid = make_grid(None, ["--trainer.learning_rate", "1e-5,1e-4,1e-3,1e-2"], 3)
    rewards = [[0.2, 0.3, 0.4], [0.5, 0.5, 0.8], [0.9, "diverged: loss", 0.9], [0.7, None, None]]
    ranked = found(tmp_path, rewards, grid)
    assert [one.setting["trainer.learning_rate"] for one in ranked.settings] == ["1e-2", "1e-4", "1e-5", "1e-3"]
    means = [one.reward and (one.reward.mean, one.reward.low) for one in ranked.settings]
    assert means == [
        pytest.approx((0.7, math.nan), nan_ok=True),
        pytest.approx((0.6, 0.17), abs=1e-3),
        pytest.approx((0.3, 0.052), abs=1e-3),
        None,
    ]
    differences = [one.minus_best and one.minus_best.mean for one in ranked.settings]
    assert differences == [None, pytest.approx(-0.2), pytest.approx(-0.5), None]  # seed 0 alone: the best has no other yet
    text = in_terminal(section(ranked))
    assert "1 diverged" in text
    assert "2 not run yet" in text
    paired = found(tmp_path / "two", [[0.1, 0.5, 0.8], [0.2, 0.6, 0.9]], make_grid(None, RATES, 3)).settings[1].minus_best
    assert paired is not None
    assert (paired.low, paired.high) == (pytest.approx(-0.1), pytest.approx(-0.1))


def test_finished_runs_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try_in_this_process(monkeypatch)
    out, flags = tmp_path / "out", ["--trainer.learning_rate", "1e-4,3e-4", "--evaluation.problems", "0"]
    grid = make_grid(None, flags, 2)
    for run in planned_runs(grid.settings, grid.seeds):
        write_finished(out, run.name, (grid.settings.index(run.setting) + 1) / 4)
    assert main(["sweep", *flags, "--seeds", "2", "--out", str(out)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    (out / "request.json").write_text(json.dumps(grid.to_json()))
    assert main(["sweep", *flags, "--seeds", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "the best: pipelinerl train --evaluation.problems=0 --trainer.learning_rate=3e-4\n" in shown.out
    assert "[1/4] trainer.learning_rate 1e-4, seed 0: finished, training reward 0.250\n" in shown.err
    written = json.loads((out / "sweep.json").read_text())
    assert written["ranked_by"] == "training"
    assert [one["reward"]["mean"] for one in written["settings"]] == [0.5, 0.25]
    assert main(["sweep", *flags, "--seeds", "3", "--out", str(out)]) == 2
    assert "another sweep (seeds was [0,1], now [0,1,2])" in capsys.readouterr().err

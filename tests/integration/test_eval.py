"""`pipelinerl eval` on the demo's model: what it measures and writes, interruptions, and answers by a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import EnvironmentSetupError, RunInterruptedError, TooManyFailuresError
from pipelinerl.experiments.evaluate.evaluate import AttemptRecord, EvaluationSummary
from pipelinerl.metrics.reading import read_lines
from tests.integration.runs import run, write_environment
from tests.integration.test_serve import serving
from tests.unit.experiments.evaluate.test_evaluate import run_command

GCD = ("--environment.kind", "gcd", "--actor.max_tokens", "240", "--engine.slots", "16")
SMALL = ("--problems", "12", "--attempts", "4")


def summary_of(out: Path) -> EvaluationSummary:
    return msgspec.json.decode((out / "summary.json").read_bytes(), type=EvaluationSummary)


def attempts_of(folder: Path) -> dict[tuple[int, int], AttemptRecord]:
    records = read_lines(folder / "attempts.jsonl", AttemptRecord)
    found = {(record.number, record.attempt): record for record in records}
    assert len(found) == len(records)
    return found


@pytest.mark.slow
def test_a_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run_command("demo", *GCD, *SMALL, "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert "pass@4" in printed.out
    assert "demo: 48 of 48 attempts" in printed.err
    summary = summary_of(out)
    (result,) = summary.models
    attempts = attempts_of(out / "demo")
    assert attempts.keys() == {(number, k) for number in range(12) for k in range(4)}
    assert result.estimates is not None
    mean = sum(record.reward for record in attempts.values()) / 48
    assert 0 < mean < 1
    assert result.estimates.reward.mean == result.estimates.passes[1].mean == pytest.approx(mean)
    assert result.estimates.reward.low <= mean <= result.estimates.reward.high
    assert (summary.status, result.problems, result.attempts, result.failed) == ("finished", 12, 48, {})
    rates = read_lines(out / "demo" / "pass_rates.jsonl", dict[str, Any])
    passes = [sum(attempts[number, k].passed for k in range(4)) for number in range(12)]
    expected = [{"id": attempts[n, 0].problem_id, "attempts": 4, "passes": passes[n]} for n in range(12)]
    assert rates == expected

    again = tmp_path / "again"
    assert run_command("demo", *GCD, *SMALL, "--out", str(again)) == 0
    for name in ("summary.json", "demo/attempts.jsonl", "demo/pass_rates.jsonl"):
        assert (out / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.slow
def test_the_checkpoints_of_a_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, out = tmp_path / "r", tmp_path / "out"
    run(run_dir, trainer__steps=2, trainer__checkpoint_every=1)
    first = ("--environment.kind", "gcd", "--training")
    assert run_command(f"{run_dir}@0", f"{run_dir}@all", "demo", *first, *SMALL, "--out", str(out)) == 0
    base, one, two, demo = summary_of(out).models
    assert [model.version for model in (base, one, two, demo)] == [0, 1, 2, None]
    assert base.minus_first is None
    assert demo.minus_first is not None
    assert demo.minus_first.reward.low == demo.minus_first.reward.high == 0.0  # the same model, the same random numbers
    trained = attempts_of(out / "r@2")
    assert trained != attempts_of(out / "r@0")
    assert {span.version for record in trained.values() for span in record.weight_versions} == {2}
    assert {record.problem_id for record in trained.values()} == {f"gcd/{index}" for index in range(12)}
    capsys.readouterr()
    assert run_command(str(run_dir), *SMALL, "--out", str(tmp_path / "last")) == 0  # all else as in the run
    assert [path.name for path in sorted((tmp_path / "last").iterdir())] == ["r@2", "report.html", "summary.json"]
    assert summary_of(tmp_path / "last").settings["config"]["actor"]["max_tokens"] == 240


def task(folder: Path, body: str) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    return "--environment.kind", write_environment(folder, body, ["import signal"])


def test_ctrl_c_leaves_what_was_done(tmp_path: Path) -> None:
    body = """
        isolate_reward = False
        scored = 0
        def reward(self, problem, text):
            type(self).scored += 1
            if self.scored == 20:
                signal.raise_signal(signal.SIGINT)
            return super().reward(problem, text)
    """
    out = tmp_path / "out"
    arguments = ("demo", "demo", *task(tmp_path, body), "--engine.slots", "8", *SMALL, "--out", str(out))
    with pytest.raises(RunInterruptedError, match="the results so far are in"):
        run_command(*arguments)
    summary = summary_of(out)
    (result,) = summary.models
    assert summary.status == "interrupted"
    assert 0 < result.attempts == len(attempts_of(out / "demo")) < 48
    assert 0 < result.problems < 12
    rates = read_lines(out / "demo" / "pass_rates.jsonl", dict[str, Any])
    assert sum(rate["attempts"] for rate in rates) == result.attempts
    assert sum(rate["attempts"] == 4 for rate in rates) == result.problems


def test_environments_that_can_not_be_evaluated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(EnvironmentSetupError, match="no held-out problems: define `held_out`, or give --training"):
        run_command("demo", *task(tmp_path, "def held_out(self, count): return []"), "--out", str(out))
    broken = "def problem(self, index): return 1 // index"
    with pytest.raises(EnvironmentSetupError, match=r"problem\(0\).*ZeroDivisionError"):
        run_command("demo", *task(tmp_path / "broken", broken), "--training", "--out", str(out))
    assert not out.exists()
    failing = "isolate_reward = False\ndef reward(self, problem, text): raise KeyError('answer')"
    with pytest.raises(TooManyFailuresError, match="all 4 attempts failed, the last with raised: KeyError: 'answer'"):
        run_command("demo", *task(tmp_path / "failing", failing), "--problems", "2", "--attempts", "2", "--out", str(out))
    assert {record.failure for record in attempts_of(out / "demo").values()} == {"raised: KeyError: 'answer'"}


@pytest.mark.slow
def test_a_server_answers_as_the_embedded_engine_does(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine.slots", "16") as server:
        url = ("--engine.kind", "http", "--engine.urls", f"[{server.url}]")
        assert run_command("demo", *GCD, *SMALL, *url, "--out", str(tmp_path / "served")) == 0
    assert run_command("demo", *GCD, *SMALL, "--out", str(tmp_path / "here")) == 0
    served, here = (attempts_of(tmp_path / name / "demo") for name in ("served", "here"))
    assert {key: record.token_ids for key, record in served.items()} == {
        key: record.token_ids for key, record in here.items()
    }
    assert summary_of(tmp_path / "served").models[0].estimates == summary_of(tmp_path / "here").models[0].estimates

"""`pipelinerl try` and `pipelinerl.try_run`: one group of the demo's model, and what the report says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipelinerl
from pipelinerl.cli import main

REWARDS = """
def length(completion, example):
    return {"reward": len(completion), "commas": completion.count(",")}

def fussy(completion, example):
    if len(completion) > 6:
        raise ValueError("too long")
    return 1.0

def same(completion, example):
    return 0.5

def rank(completions, example):
    return [float(n) for n in range(len(completions))]
"""
DATA = [{"prompt": f"{a},{b}:", "answer": "2"} for a in range(10, 60) for b in range(60, 70)]


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "rewards.py"


def tried(reward: str, problem: int = 0, **settings: Any) -> Any:
    config = {"actor.group_size": 4, "actor.max_tokens": 16, "evaluation.problems": 0} | settings
    return pipelinerl.try_run(config, model="demo", reward=reward, data=DATA, problem=problem)


def test_the_demo_is_tried_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["try", "--problem", "1", "--actor.group_size", "3"]) == 0
    first = capsys.readouterr().out
    assert "gcd, problem 1 (gcd/1), demo" in first
    assert "attempt 2: reward " in first
    assert "<eos>" in first, "special tokens are shown"
    assert first.count("the prompt, as the model sees it:") == 1
    assert main(["try", "--problem", "1", "--actor.group_size", "3"]) == 0
    assert capsys.readouterr().out == first, "the group that a run begins with does not depend on chance"
    assert not list(tmp_path.iterdir())


def test_attempts_are_returned_with_their_rewards(rewards: Path) -> None:
    trial = tried(f"{rewards}:length")
    assert [rollout.reward for rollout in trial.group.rollouts] == [one.reward for one in trial.attempts]
    assert len({rollout.reward for rollout in trial.group.rollouts}) > 1
    for said in ("the rewards differ, from ", "commas 3", "CUT at its token limit (actor.max_tokens: 16)", "overlong: keep"):
        assert said in str(trial)
    trial = tried(f"{rewards}:same", **{"environment.args": {"group_reward": f"{rewards}:rank"}})
    assert [one.reward for one in trial.attempts] == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.slow
def test_an_error_of_an_attempt_is_its_line_with_the_answer(rewards: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = tried(f"{rewards}:fussy")
    failed = [one for one in trial.attempts if one.failure]
    assert 0 < len(failed) < 4
    for one in failed:
        assert one.failure == "raised: RuntimeError: reward: rewards.py, line 7: ValueError: too long"
        assert len(one.completion) > 6
    assert f"{len(failed)} of 4 attempts FAILED" in str(trial)
    assert "every reward is 1: a group of equal rewards teaches nothing" in str(trial)
    assert not [one for one in caplog.records if one.name.startswith("pipelinerl")]
    trial = tried(f"{rewards}:same", **{"engine.max_length": 20})
    assert not trial.group.rollouts
    assert all("20 (engine.max_length)" in one.failure for one in trial.attempts)

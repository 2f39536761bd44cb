"""Several environments in one: shares, names, and a pure function of the index."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import COUNTDOWN, TOKENIZER, one_line, rollout

TWO = {"gcd": {"kind": "gcd", "weight": 3}, "numbers": {"kind": COUNTDOWN, "args": {"numbers": 3}}}


def mixture(environments=TWO, seed=0):
    return make_environment("mixture", {"environments": environments}, TOKENIZER, seed)


def test_shares_are_exact_and_no_environment_skips_a_problem():
    environment = mixture()
    inner = {name: make_environment(part["kind"], part.get("args", {}), TOKENIZER, 0) for name, part in TWO.items()}
    problems = [environment.problem(index) for index in range(40)]
    for start in range(0, 40, 4):
        shares = Counter(problem.payload["environment"] for problem in problems[start : start + 4])
        assert shares == {"gcd": 3, "numbers": 1}
    for name, count in (("gcd", 30), ("numbers", 10)):
        seen = {problem.id for problem in problems if problem.payload["environment"] == name}
        assert seen == {f"{name}/{inner[name].problem(index).id}" for index in range(count)}


def test_held_out_problems_come_from_each_in_proportion():
    held_out = mixture().held_out(40)
    assert Counter(problem.payload["environment"] for problem in held_out) == {"gcd": 30, "numbers": 10}
    assert len({problem.id for problem in held_out}) == len(held_out)
    assert mixture(seed=9).held_out(10) == held_out[:10]


@pytest.fixture
def own(tmp_path):
    """An environment with three held-out examples, whose reward, its metric and its group reward are lengths."""
    (tmp_path / "rewards.py").write_text(GROUPS)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(30)))
    args = {
        "data": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path}/rewards.py:reward",
        "group_reward": f"{tmp_path}/rewards.py:compare",
        "isolate": False,
    }
    return {"kind": "function", "args": args}


def test_when_one_has_no_more_held_out_problems_the_others_continue(own):
    short = mixture({"own": own, "gcd": {"kind": "gcd"}})
    assert Counter(problem.payload["environment"] for problem in short.held_out(20)) == {"own": 3, "gcd": 17}
    assert len(mixture({"own": own}).held_out(20)) == 3


GROUPS = """
def compare(completions, example):
    return [float(len(text)) for text in completions]

def reward(completion, example):
    return {"reward": 1.0, "length": len(completion)}
"""


def test_each_environment_scores_its_own_groups_and_its_metrics_have_its_name(own):
    environment = mixture({"gcd": {"kind": "gcd"}, "own": own})
    for index in range(2):
        problem = environment.problem(index)
        rollouts = [rollout(environment, problem, answer) for answer in ("1", "333")]
        scored = asyncio.run(environment.score_group(problem, rollouts))
        if problem.payload["environment"] == "gcd":
            assert scored == rollouts
            assert scored[0].metrics == {"gcd/reward": 0.0}
        else:
            assert [one.reward for one in scored] == [2.0, 4.0]
            assert [one.metrics for one in scored] == [
                {"own/reward": 2.0, "own/length": 1.0, "own/group_reward": 1.0},
                {"own/reward": 4.0, "own/length": 3.0, "own/group_reward": 3.0},
            ]


@pytest.mark.parametrize(
    ("environments", "complaint"),
    [
        ({}, "environments: {} is not allowed here; this takes a mapping"),
        ({"a": {"kind": "gcd", "wieght": 2}}, r"environments: .* \(at a.wieght: Extra inputs are not permitted\)"),
        ({"a/b": {"kind": "gcd"}}, "'a/b' can't be a name"),
        (
            {"a": {"kind": "gdc"}},
            r"environment\.args\.environments\.a: environment\.kind 'gdc' is unknown\. Did you mean 'gcd'",
        ),
    ],
)
def test_a_mixture_that_can_not_be_built(environments, complaint):
    with one_line(EnvironmentSetupError, match=complaint):
        mixture(environments)

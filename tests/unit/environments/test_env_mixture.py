"""Several environments in one: shares, names, and a pure function of the index."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.environments import make_environment
from pipelinerl.environments.combine import spread, whole_weights
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import TOKENIZER, one_line, rollout

TWO = {"gcd": {"kind": "gcd", "weight": 3}, "numbers": {"kind": "countdown", "args": {"numbers": 3}}}


def mixture(environments=TWO, seed=0):
    return make_environment("mixture", {"environments": environments}, TOKENIZER, seed)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [1]),
        ([3, 1], [3, 1]),
        ([2, 2], [1, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.5, 0.25, 0.25], [2, 1, 1]),
        ([1, 0.01], [100, 1]),
    ],
)
def test_weights_in_whole_numbers(weights, counts):
    assert whole_weights(weights) == counts


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_turns_are_spread_evenly(counts):
    places = spread(counts)
    for part, count in enumerate(counts):
        turns = [position for position, place in enumerate(places) if place == part]
        assert len(turns) == count
        ideal = len(places) / count
        assert all(abs((b - a) - ideal) <= len(counts) for a, b in pairwise(turns))


def test_shares_are_exact_and_no_environment_skips_a_problem():
    environment, inner = (
        mixture(),
        {name: make_environment(part["kind"], part.get("args", {}), TOKENIZER, 0) for name, part in TWO.items()},
    )
    problems = [environment.problem(index) for index in range(40)]
    for start in range(0, 40, 4):
        shares = Counter(problem.payload["environment"] for problem in problems[start : start + 4])
        assert shares == {"gcd": 3, "numbers": 1}
    for name, count in (("gcd", 30), ("numbers", 10)):
        seen = {problem.id for problem in problems if problem.payload["environment"] == name}
        assert seen == {f"{name}/{inner[name].problem(index).id}" for index in range(count)}


def test_the_order_of_the_environments_depends_on_the_seed():
    orders = [[mixture(seed=seed).problem(index).payload["environment"] for index in range(40)] for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_held_out_problems_come_from_each_in_proportion():
    held_out = mixture().held_out(40)
    assert Counter(problem.payload["environment"] for problem in held_out) == {"gcd": 30, "numbers": 10}
    assert len({problem.id for problem in held_out}) == len(held_out)
    assert mixture(seed=9).held_out(10) == held_out[:10]
    short = mixture({"guess": {"kind": "guess_number", "args": {"highest": 20}}, "gcd": {"kind": "gcd"}})
    assert Counter(problem.payload["environment"] for problem in short.held_out(20)) == {"guess": 2, "gcd": 18}
    only = mixture({"guess": {"kind": "guess_number", "args": {"highest": 20}}})
    assert len(only.held_out(20)) == 2


def test_metrics_have_the_name_of_their_environment():
    environment = mixture({"guess": {"kind": "guess_number"}, "gcd": {"kind": "gcd"}})
    problems = {problem.payload["environment"]: problem for problem in map(environment.problem, range(2))}
    number = problems["guess"].payload["problem"]["number"]
    found = rollout(environment, problems["guess"], "0", str(number))
    assert found.reward == 0.5
    assert found.metrics == {"guess/reward": 0.5, "guess/guesses": 2}
    answer = problems["gcd"].payload["problem"]["answer"]
    assert rollout(environment, problems["gcd"], f">{answer:02d}").metrics == {"gcd/reward": 1.0}


GROUPS = """
def compare(completions, example):
    return [float(len(text)) for text in completions]

def reward(completion, example):
    return 1.0
"""


def test_each_environment_scores_its_own_groups(tmp_path):
    (tmp_path / "rewards.py").write_text(GROUPS)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(10, 30)))
    args = {
        "data": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path}/rewards.py:reward",
        "group_reward": f"{tmp_path}/rewards.py:compare",
        "isolate": False,
    }
    environment = mixture({"gcd": {"kind": "gcd"}, "own": {"kind": "function", "args": args}})
    for index in range(2):
        problem = environment.problem(index)
        rollouts = [rollout(environment, problem, answer) for answer in ("1", "333")]
        scored = asyncio.run(environment.score_group(problem, rollouts))
        if problem.payload["environment"] == "gcd":
            assert scored == rollouts
        else:
            assert [one.reward for one in scored] == [2.0, 4.0]
            assert [one.metrics for one in scored] == [
                {"own/reward": 2.0, "own/group_reward": 1.0},
                {"own/reward": 4.0, "own/group_reward": 3.0},
            ]


def test_a_mixture_of_mixtures():
    environment = mixture({"inner": {"kind": "mixture", "args": {"environments": TWO}}})
    problem = environment.problem(0)
    name = problem.payload["problem"]["environment"]
    assert problem.id.startswith(f"inner/{name}/")
    assert set(rollout(environment, problem, "").metrics) == {"inner/reward", f"inner/{name}/reward"}


@pytest.mark.parametrize(
    ("environments", "complaint"),
    [
        ({}, "environments: {} is not allowed here; this takes a mapping"),
        ({"a": {"kind": "gcd", "wieght": 2}}, r"environments: .* \(at a.wieght: Extra inputs are not permitted\)"),
        ({"a": {"kind": "gcd", "weight": 0}}, r"must be greater than 0, but are \[0\]"),
        ({"a": {"kind": "gcd", "weight": 0.33333}, "b": {"kind": "gcd"}}, "round them"),
        ({"a": {"kind": "gcd", "weight": 1e-300}, "b": {"kind": "gcd"}}, "round them"),
        ({"a/b": {"kind": "gcd"}}, "'a/b' can't be a name"),
        (
            {"a": {"kind": "gdc"}},
            r"environment\.args\.environments\.a: environment\.kind 'gdc' is unknown\. Did you mean 'gcd'",
        ),
        (
            {"a": {"kind": "math", "args": {"path": "no.jsonl", "judge": "numbers"}}},
            r"environments\.a: can't read no\.jsonl",
        ),
    ],
)
def test_a_mixture_that_can_not_be_built(environments, complaint):
    with one_line(EnvironmentSetupError, match=complaint):
        mixture(environments)

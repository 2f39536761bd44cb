"""Countdown: problems that can be solved, and a verifier that executes nothing."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.environments import make_environment
from pipelinerl.types import Problem
from pipelinerl.user_code import import_code
from tests.unit.environments.env_client import COUNTDOWN, TOKENIZER, rollout

read_expression = import_code(f"{Path(__file__).parents[3]}/examples/expressions.py").read_expression


@pytest.mark.parametrize(
    "text",
    ["", "()", "1+", "+1", "-1", "1 2", "(1", "1)", "1**2", "2^3", "1.5", "x+1", "__import__('os')", "1;2", "9" * 7,
     "(" * 21 + "1" + ")" * 21, "1+" * 150 + "1", "1//2"],
)  # fmt: skip
def test_anything_else_is_no_expression(text):
    assert read_expression(text) is None


@given(st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda it: f"({it[0]} {it[1]} {it[2]})"),
    max_leaves=8,
))  # fmt: skip
def test_the_value_is_the_one_that_python_finds(text):
    found = read_expression(text)
    assert found is not None
    try:
        expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})  # noqa: S307 - made above
    except ZeroDivisionError:
        expected = None
    assert found.value == expected


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("(3 + 4) * 5", 1.0),
        ("5 * (4 + 3)", 1.0),
        ("5 * 7", 0.0),  # 7 is not among the numbers
        ("(3 + 4) * 5 * 4 / 4", 0.0),  # 4 three times
        ("3 + 4 + 5", 0.1),
        ("3", 0.1),
        ("35", 0.0),
        ("hm", 0.0),
        ("5 / (3 - 3)", 0.0),
        ("5 / (4 - 4 + 0)", 0.0),
        (r"first \boxed{1}; \boxed{(3 + 4) * 5}", 1.0),
        (r"\boxed{(3 + 4) * 5 = 35}", 1.0),
        ("<answer> (3 + 4) * 5 </answer> or so", 1.0),
        ("I think\n(3 + 4) * 5 = 35.\n", 1.0),
        (r"(3 + 4) \times 5", 1.0),
        ("(3 + 4) × 5", 1.0),  # noqa: RUF001
        ("", 0.0),
    ],
)
def test_rewards(text, reward):
    problem = Problem(id="", payload={"numbers": (3, 4, 5), "target": 35})
    assert make_environment(COUNTDOWN, {}, TOKENIZER, 0).reward(problem, text) == reward


def test_every_problem_can_be_solved_and_none_is_trivial():
    environment = make_environment(COUNTDOWN, {"numbers": 3, "highest": 20, "format_reward": 0.2}, TOKENIZER, 5)
    for problem in map(environment.problem, range(60)):
        numbers, target = problem.payload["numbers"], problem.payload["target"]
        assert len(numbers) == 3
        assert all(1 <= number <= 20 for number in numbers)
        assert target not in numbers
        assert 1 <= target <= 100
        made = [
            shape.format(*order, one, two)
            for order in permutations(numbers)
            for one in "+-*/"
            for two in "+-*/"
            for shape in ("({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})")
        ]
        assert target in {found.value for found in map(read_expression, made) if found is not None}
    wrong = rollout(environment, problem, f"\\boxed{{{numbers[0]}}}")
    assert wrong.reward == 0.2
    prompt = TOKENIZER.decode(wrong.turns[0].prompt_ids)
    assert prompt.startswith(f"Use the numbers {numbers[0]}, ")
    assert f" to make {target}. " in prompt

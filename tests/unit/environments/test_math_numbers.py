"""Maths problems whose answers are numbers: the verifier of numbers, and `judge: numbers`."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.environments import make_environment
from pipelinerl.environments.tasks.numbers import answer_in, number_of
from tests.unit.environments.env_client import TOKENIZER


def maths(seed=0, **args):
    return make_environment("math", {"judge": "numbers", **args}, TOKENIZER, seed)


# ------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("first 7, then 8 apples", 8),
        ("#### 42", 42),
        ("#### 42\nand then I said 7", 42),
        ("#### 41\nno: #### 42", 42),
        ("#### $1,234,567.00", 1234567),
        ("#### 5 dollars and 3 cents", 5),
        ("#### none", None),
        (r"so \boxed{42}. Or 7?", 42),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4)),
        (r"\boxed{x = 12\text{ cm}}", 12),
        (r"\boxed{1{,}000}", 1000),
        (r"\boxed{7", 7),
        (r"is 75\%", 75),
        ("75%", 75),
        ("is $3.50.", Fraction(7, 2)),
        ("about .5 of it", Fraction(1, 2)),
        ("2 1/2 hours", Fraction(5, 2)),
        ("5/0", None),
        ("-3", -3),
        ("is $-3", -3),
        ("is \u22123", -3),
        ("(-3)", -3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("x - 3", 3),
        ("(a)-3", 3),
        ("- 3 eggs", 3),
        ("eggs:\n- 3", 3),
        ("1,2,3", 3),
        ("H2O", None),
        ("version 1.2.3", Fraction(6, 5)),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text, value):
    assert answer_in(text)[0] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" $1,200. ", 1200),
        ("-3/4", Fraction(-3, 4)),
        ("18 dollars", 18),
        ("50%", 50),
        ("a 42", None),
        ("1 or 2", None),
        ("", None),
    ],
)
def test_a_text_that_is_one_number(text, value):
    assert number_of(text) == value


@given(
    whole=st.integers(-(10**12), 10**12),
    decimals=st.integers(0, 3),
    before=st.sampled_from(["", "It is ", "x = ", "12 + 5 = ", "#### ", "\\boxed{", "cost: $"]),
    after=st.sampled_from(["", ".", " apples", "%", "!"]),
)
def test_however_a_number_is_written_it_has_its_value(whole, decimals, before, after):
    value = Fraction(whole, 10**decimals)
    digits = f"{abs(whole) // 10**decimals:,}"
    tail = f".{abs(whole) % 10**decimals:0{decimals}d}" if decimals else ""
    assert answer_in(f"{before}{'-' if whole < 0 else ''}{digits}{tail}{after}")[0] == value


@given(st.text())
def test_no_text_breaks_it_and_the_place_of_an_answer_is_marked_or_not(text):
    answer_in(text)
    number_of(text)
    assert [answer_in(text)[1] for text in ("so it is 7\n#### 7", r"\boxed{7}", "it is 7")] == [True, True, False]


# -------------------------------------------------------------------------------------------------- problems


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def questions(count, first=0):
    return [{"question": f"How much is {n} + 1?", "answer": f"We add.\n#### {n + 1:,}"} for n in range(first, first + count)]


def test_the_split_is_a_tenth_and_does_not_depend_on_the_order_of_the_file(tmp_path):
    rows = questions(200)
    path, reversed_path = write(tmp_path / "p.jsonl", rows), write(tmp_path / "r.jsonl", rows[::-1])
    environment, other = maths(0, path=path), maths(1, path=reversed_path)
    held_out = {problem.payload["question"] for problem in environment.held_out(1000)}
    assert 5 < len(held_out) < 40
    assert {problem.payload["question"] for problem in other.held_out(1000)} == held_out
    trained = [environment.problem(index).payload["question"] for index in range(200 - len(held_out))]
    assert sorted([*trained, *held_out]) == sorted(row["question"] for row in rows)


def test_a_held_out_file_wins_over_the_training_file(tmp_path):
    path = [write(tmp_path / "a.jsonl", questions(3)), write(tmp_path / "b.jsonl", questions(3, first=3))]
    held_out = write(tmp_path / "h.jsonl", questions(2, first=2))
    environment = maths(0, path=path, held_out_path=held_out)
    assert [problem.id for problem in environment.held_out(9)] == ["h/1", "h/2"]
    assert sorted(environment.problem(index).id for index in range(4)) == ["a/1", "a/2", "b/2", "b/3"]

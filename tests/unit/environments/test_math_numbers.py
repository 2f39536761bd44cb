"""Maths problems whose answers are numbers: the verifier of numbers, and `judge: numbers`."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.environments import make_environment
from pipelinerl.environments.maths.numbers import answer_in, marks_answer, number_of
from pipelinerl.environments.single_turn import is_held_out
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import TOKENIZER, rollout


def maths(seed=0, **args):
    return make_environment("math", {"judge": "numbers", **args}, TOKENIZER, seed)


# ------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("first 7, then 8 apples", 8),
        ("#### 42", 42),
        ("####42", 42),
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
        (r"costs \$5", 5),
        (r"is 75\%", 75),
        ("75%", 75),
        ("is $3.50.", Fraction(7, 2)),
        ("0.5", Fraction(1, 2)),
        ("about .5 of it", Fraction(1, 2)),
        ("3/4 of it", Fraction(3, 4)),
        ("2 1/2 hours", Fraction(5, 2)),
        ("5/0", None),
        ("-3", -3),
        ("x = -3", -3),
        ("x=-3", -3),
        ("is -$3", -3),
        ("is $-3", -3),
        ("is \u22123", -3),
        ("(-3)", -3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("10 -3", 3),
        ("x - 3", 3),
        ("(a)-3", 3),
        ("- 3 eggs", 3),
        ("eggs:\n- 3", 3),
        ("1,2,3", 3),
        ("12,34", 34),
        ("**42**", 42),
        ("H2O", None),
        ("version 1.2.3", Fraction(6, 5)),
        ("9" * 5000, None),
        ("", None),
        ("no number", None),
    ],
)
def test_the_answer_of_a_text(text, value):
    assert answer_in(text) == value


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


@settings(deadline=None)
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
    assert answer_in(f"{before}{'-' if whole < 0 else ''}{digits}{tail}{after}") == value


@settings(deadline=None)
@given(st.text())
def test_no_text_breaks_it(text):
    answer_in(text)
    number_of(text)


# -------------------------------------------------------------------------------------------------- problems


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def questions(count, first=0):
    return [{"question": f"How much is {n} + 1?", "answer": f"We add.\n#### {n + 1:,}"} for n in range(first, first + count)]


def test_every_problem_once_an_epoch_in_an_order_of_its_own(tmp_path):
    path = write(tmp_path / "p.jsonl", questions(40))
    environment, again = maths(3, path=path), maths(3, path=path)
    size = sum(not is_held_out(row["question"]) for row in questions(40))
    epochs = [[environment.problem(index).id for index in range(epoch * size, (epoch + 1) * size)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == size for epoch in epochs)
    assert [again.problem(index).id for index in reversed(range(size))] == epochs[0][::-1]  # whatever was asked before
    other = maths(4, path=path)
    assert [other.problem(index).id for index in range(size)] != epochs[0]


def test_the_split_is_fixed_and_disjoint(tmp_path):
    rows = questions(200)
    path, reversed_path = write(tmp_path / "p.jsonl", rows), write(tmp_path / "r.jsonl", rows[::-1])
    environment, other = maths(0, path=path), maths(1, path=reversed_path)
    held_out = {problem.payload["question"] for problem in environment.held_out(1000)}
    assert 5 < len(held_out) < 40
    assert {problem.payload["question"] for problem in other.held_out(1000)} == held_out
    trained = {environment.problem(index).payload["question"] for index in range(200)}
    assert trained.isdisjoint(held_out)
    assert trained | held_out == {row["question"] for row in rows}
    assert len(environment.held_out(3)) == 3


def test_a_held_out_file_wins_over_the_training_file(tmp_path):
    path = [write(tmp_path / "a.jsonl", questions(3)), write(tmp_path / "b.jsonl", questions(3, first=3))]
    held_out = write(tmp_path / "h.jsonl", questions(2, first=2))
    environment = maths(0, path=path, held_out_path=held_out)
    assert [problem.id for problem in environment.held_out(9)] == ["h/1", "h/2"]
    assert sorted(environment.problem(index).id for index in range(4)) == ["a/1", "a/2", "b/2", "b/3"]


def test_rewards_and_plain_prompts(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"q": "How much is 2 * 600?", "a": 1200}, {"q": "And 1/4?", "a": "0.25"}])
    environment = maths(
        path=path,
        held_out_path=write(tmp_path / "h.jsonl", [{"q": "{question}?", "a": "1"}]),
        question_field="q",
        answer_field="a",
        text="Q: {question} A:",
    )
    by_answer = {environment.problem(index).payload["answer"]: environment.problem(index) for index in range(2)}
    problem = by_answer["1200"]
    assert environment.prompt(problem) == "Q: How much is 2 * 600? A:"
    assert rollout(environment, problem, "2 * 600 = 1,200. #### $1,200.00").reward == 1.0
    assert rollout(environment, problem, "about 1201").reward == 0.0
    assert rollout(environment, problem, "").reward == 0.0
    assert rollout(environment, by_answer["0.25"], r"\boxed{\frac14} or \boxed{\frac{1}{4}}").reward == 1.0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("because", r"p\.jsonl:2: 'because' is not a number, but `judge` is `numbers`"),
        ("We add.\n#### nothing", r"p\.jsonl:2: 'nothing' is not a number"),
        (True, r"p\.jsonl:2: `answer` has no final answer"),
    ],
)
def test_an_answer_that_is_no_number_is_named(tmp_path, answer, complaint):
    path = write(tmp_path / "p.jsonl", [questions(1)[0], {"question": "Why?", "answer": answer}])
    with pytest.raises(EnvironmentSetupError, match=complaint):
        maths(path=path)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("so it is 7\n#### 7", True),
        ("#### seven", False),
        ("it is 7", False),
        (r"\boxed{7}", True),
        (r"\boxed{x}", False),
        ("#### 7 and then\n####", False),
    ],
)
def test_an_answer_is_marked_where_the_system_message_says(text: str, marked: bool) -> None:
    assert marks_answer(text) is marked


def test_a_marked_wrong_answer_is_worth_the_format_reward(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", ['{"question": "6 * 7?", "answer": "#### 42"}', '{"question": "q", "answer": "1"}'])
    other = write(tmp_path / "other.jsonl", ['{"question": "else", "answer": "1"}'])
    environment = maths(0, path=path, held_out_path=other, format_reward=0.1)
    problem = next(p for p in (environment.problem(0), environment.problem(1)) if p.payload["question"] == "6 * 7?")
    assert rollout(environment, problem, "#### 41").reward == 0.1
    assert rollout(environment, problem, "it is 41").reward == 0.0
    assert rollout(environment, problem, "it is 42").reward == 1.0
    assert rollout(environment, problem, r"\boxed{41}").reward == 0.1

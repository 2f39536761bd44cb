"""Maths problems: data as data sets have it, answers of any kind, and what their length costs."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.environments.tasks.judge import Judge, quick_verdict
from pipelinerl.environments.tasks.maths import Maths, final_answer
from pipelinerl.environments.user.pool import FunctionPool
from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError
from tests.unit.environments.env_client import TOKENIZER, one_line, rollout, saying


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def one_problem(tmp_path, answer="42", **arguments):
    path = write(tmp_path / "p.jsonl", [{"problem": "What is it?", "answer": answer}])
    held_out = write(tmp_path / "h.jsonl", [{"problem": "And that?", "answer": "1"}])
    environment = Maths(TOKENIZER, 0, path=path, held_out_path=held_out, **{"judge": "numbers", **arguments})
    return environment, environment.problem(0)


# ------------------------------------------------------------------------------------------------------- data


NO_ANSWERS = ("", "####", "two\nlines", "long " * 100, True, None, ["4"])


@pytest.mark.parametrize(
    ("given", "final"),
    [
        ("We add.\n#### 1,234", "1,234"),
        (r"So $x = \boxed{\frac{1}{2}}$ and no more.", r"\frac{1}{2}"),
        (r"First \boxed{1}, at last \boxed{\sqrt{2}}", r"\sqrt{2}"),
        (r"It is \fbox{7}.", "7"),
        (r"It is $\boxed 7$.", "7"),
        ("$x+1$", "x+1"),
        ("073", "073"),
        (25, "25"),
        (2.5, "2.5"),
        *((given, None) for given in NO_ANSWERS),
    ],
)
def test_the_final_answer_within_a_given_one(given, final):
    assert final_answer(given) == final


@pytest.mark.parametrize(
    ("row", "arguments", "answer"),
    [
        ({"question": "Why?", "answer": "So.\n#### 4"}, {}, "4"),
        ({"problem": "Why?", "level": "5", "solution": r"So \boxed{4}."}, {}, "4"),
        ({"problem": "Why?", "solution": r"So \boxed{5}.", "answer": "4"}, {}, "4"),
        ({"ID": "1", "Problem": "Why?", "Solution": "So.", "Answer": 4}, {}, "4"),
        ({"q.q": "Why?", "answer": "4"}, {"question_field": "q.q"}, "4"),
        (
            [{"from": "human", "value": "Why?"}, {"from": "assistant", "ground_truth": {"value": "4"}}],
            {"question_field": "0.value", "answer_field": "1.ground_truth.value"},
            "4",
        ),
    ],
)
def test_rows_of_well_known_data_sets(tmp_path, row, arguments, answer):
    """A held-out file wins over the training files."""
    path = write(tmp_path / "train.jsonl", ["", row, json.dumps(row).replace("Why?", "Who?")])
    held_out = write(tmp_path / "h.jsonl", [json.dumps(row).replace("Why?", "Who?")])
    arguments = {"path": [path], "held_out_path": held_out, "judge": "numbers", **arguments}
    environment = make_environment("math", arguments, TOKENIZER, 0)
    assert [environment.problem(index).id for index in range(2)] == ["train/2"] * 2
    assert environment.problem(0).payload == {"question": "Why?", "answer": answer}
    assert [(problem.id, problem.payload["question"]) for problem in environment.held_out(9)] == [("h/1", "Who?")]


WHO = {"problem": "Who?", "answer": 1}


@pytest.mark.parametrize(
    ("row", "arguments", "complaint"),
    [
        ('{"problem": "x', {}, r"p\.jsonl:2 is not JSON"),
        (
            {"text": "Why?", "answer": 4},
            {},
            r"p\.jsonl:2 has no field `question` or .* \(it has: text, answer\); set .*question_f",
        ),
        ({"problem": "Why?", "answer": 4}, {"answer_field": "a.b"}, r"p\.jsonl:1 has no field `a\.b`"),
        ({"problem": 7, "answer": 4}, {}, r"p\.jsonl:2: the question must be a text, not 7"),
        ({"problem": "Why?", "answer": [4]}, {}, r"p\.jsonl:2: `answer` has no final answer: .* it is \[4\]"),
        ({"problem": "Why?", "solution": "words " * 99}, {}, r"p\.jsonl:2: `solution` has no final answer"),
        ({"problem": "Why?", "answer": "x+1"}, {}, r"p\.jsonl:2: 'x\+1' is not a number, but `judge` is `numbers`"),
        (WHO, {"text": "no place"}, "must have {question}"),
        (WHO, {"length_penalty_tokens": 10}, "it needs environment.args.max_tokens"),
        (WHO, {"length_penalty_tokens": 10, "max_tokens": 9}, r"at least as many \(it is 9\)"),
    ],
)
def test_a_malformed_line_or_argument_is_named(tmp_path, row, arguments, complaint):
    path = write(tmp_path / "p.jsonl", [WHO, row])
    with one_line(EnvironmentSetupError, match=complaint):
        make_environment("math", {"path": path, "judge": "numbers", **arguments}, TOKENIZER, 0)


def test_without_math_verify_the_message_names_the_extra(tmp_path, not_installed):
    not_installed("math-verify")
    with pytest.raises(MissingDependencyError, match=r"pip install 'math-verify>=.* `numbers`"):
        one_problem(tmp_path, judge="math-verify")
    one_problem(tmp_path)  # `numbers` does without


# ---------------------------------------------------------------------------------------------------- rewards


def test_rewards_and_metrics_of_a_rollout(tmp_path):
    environment, problem = one_problem(tmp_path, format_reward=0.1, text="P: {question}")
    right = rollout(environment, problem, r"it is \boxed{42}, not 5")
    assert right.metrics == {"right": 1, "boxed": 1, "judge_failed": 0, "length_penalty": 0}
    assert TOKENIZER.decode(right.turns[0].prompt_ids) == "P: What is it?"
    assert rollout(environment, problem, "it is 42").metrics["boxed"] == 0
    rewards = {r"\boxed{42}": 1, "it is 42": 1, r"\boxed{41}": 0.1, "#### 41": 0.1, "#### no": 0, "41": 0, "": 0}
    assert {text: rollout(environment, problem, text).reward for text in rewards} == rewards


def test_the_length_counts_in_tokens_and_a_text_cut_anywhere_pays_all(tmp_path):
    environment, problem = one_problem(tmp_path, max_tokens=20, length_penalty_tokens=10, length_penalty=0.5)
    client = saying("4 of 42")
    asyncio.run(environment.rollout(problem, client))
    assert client.limits == [20]
    for count, penalty in {2: 0, 9: 0, 14: -0.25, 15: -0.3, 19: -0.5}.items():  # and the stop token
        late = rollout(environment, problem, "42".rjust(count, "!"))
        assert (late.metrics["length_penalty"], late.reward) == pytest.approx((penalty, 1 + penalty))
    assert rollout(environment, problem, "42", finish_reason="length").reward == pytest.approx(0.5)


SAME = [
    ("2.5", "2 1/2", r"2\frac{1}{2}", r"2 \dfrac 12", "5/2", r"\frac{5}{2}", "2.50", "25e-1", "$2.5$"),
    ("1000", "1e3", "1,000", r"1\,000", "1{,}000", r"1,\!000", "1000.", "1000.0", "2000/2", "1E+3"),
    ("-7", r"\text{So the answer is: } -7", "\u22127", "-7.0", "-14/2"),
    ("12", "12", r"1\!2"),
    ("1 2", "1  2", r"1\,2", "1~2", r"1\ 2", r"1\;2"),
    ("1, 2", "1,  2", r"1,\,2"),
    ("1, 234",), ("1 234",), ("0.12",), ("1/2", "0.5", ".5"), ("0.001", "1e-3"), ("11/2", "5 1/2"), ("1 1/2", "1.5"),
    ("i", r"\sqrt{-1}", r"\sqrt { -1 }"), ("2i", r"2\sqrt{-1}"), (r"\leftarrow",), (r"\rightarrow",),
    ("5 m", r"5\text{ m}", r"5\,\text{m}"), ("5 cm",), ("5 mm",), ("5 hours", "5 h"), ("5 minutes",),
    ("1e4",), ("10",), ("21/2",), (r"\text{not }7",), ("7",), ("77",), ("1/3",),
    ("0.333333333333",), (r"\left(1, 2\right)", "(1,2)"),
]  # fmt: skip
"""Notations of the same value stand together; all others differ."""


def test_notations_have_the_values_that_a_reader_gives_them():
    """No two of different values are the same, and those of one value are, or need algebra."""
    notations = [(text, group) for group, texts in enumerate(SAME) for text in texts]
    for expected, group in notations:
        for answer, other in notations:
            verdict = quick_verdict(expected, answer)
            assert verdict is not (group != other), f"{expected} and {answer}"
    assert quick_verdict("42", "") is quick_verdict("42", "4" * 400) is False
    assert quick_verdict("x+1", "1+x") is quick_verdict("50", "50\\%") is None
    assert quick_verdict("3 Mars", "3 Miles") is quick_verdict("5 s", "5 ss") is False
    assert quick_verdict("2ab", "2ba") is quick_verdict("5 m", "5 meters") is quick_verdict("1 apple", "1 apples") is None


@pytest.mark.slow
def test_math_verify_judges_the_rest():
    pairs = {
        (r"\frac{1}{2}", "50\\%"): True,
        ("x+1", "1+x"): True,
        (r"2\pi", "2"): False,
        ("12", r"12\text{ cm}"): True,
        ("(1,2)", "(1, 2]"): False,
        ("x=5", "5"): True,
        ("12", "1 2"): False,
        ("12", r"1\,2"): False,
        ("1,234", "1, 234"): False,
        ("7", r"\text{not }7 7"): False,
        ("7", "\\"): False,
    }

    async def judged():
        judge = Judge(timeout_s=20, processes=1)
        verdicts = [await judge.verdict(*pair) for pair in pairs]
        judge._pool.close()
        return verdicts

    assert asyncio.run(judged()) == [*pairs.values()]


@pytest.mark.slow
def test_an_answer_that_would_never_end_is_wrong_and_generation_goes_on(tmp_path):
    environment, problem = one_problem(tmp_path, judge="math-verify", judge_timeout_s=1.5)
    turns = 0

    async def main():
        nonlocal turns
        judged = asyncio.create_task(environment.rollout(problem, saying("\\boxed{9^{9^{9}}}")))
        while not judged.done():
            await asyncio.sleep(0.001)
            turns += 1
        return judged.result()

    result = asyncio.run(main())
    assert (result.reward, result.metrics["judge_failed"]) == (0, 1)
    assert turns > 50


@pytest.mark.parametrize("error", [TimeoutError, MemoryError, ChildProcessError, RuntimeError, EnvironmentSetupError])
def test_a_judge_that_fails_costs_one_answer_and_is_not_asked_again_and_one_that_is_broken_says_so(error, monkeypatch):
    calls = []

    async def call(pool, *arguments):
        calls.append(arguments)
        raise error("no")

    monkeypatch.setattr(FunctionPool, "call", call)
    judge = Judge(timeout_s=1, processes=1)
    if error in (RuntimeError, EnvironmentSetupError):
        with pytest.raises(error):
            asyncio.run(judge.verdict("x", "y"))
        return
    assert asyncio.run(judge.verdict("x", "y")) is None
    assert asyncio.run(judge.verdict("x", "y")) is None
    assert asyncio.run(judge.verdict("3", "3")) is True
    assert len(calls) == 1

"""Training on problems by their measured pass rates."""

from __future__ import annotations

import json

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import TOKENIZER, one_line, rollout

INNER = {"kind": "math", "args": {"path": "p.jsonl", "held_out_path": "h.jsonl", "judge": "numbers"}}
COUNT = 40


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("p.jsonl", [{"question": f"How much is {n} + 1?", "answer": n + 1} for n in range(COUNT)])
    write("h.jsonl", [{"question": f"How much is {n} + 2?", "answer": n + 2} for n in range(3)])


def write(path, rows):
    with open(path, "w") as file:
        file.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def rate(number, passes, attempts=8):
    return {"id": f"p/{number}", "attempts": attempts, "passes": passes, "more": "fields"}


def filtered(rates, seed=0, **arguments):
    write("rates.jsonl", rates)
    return make_environment(
        "difficulty_filter", {"environment": INNER, "pass_rates": "rates.jsonl", **arguments}, TOKENIZER, seed
    )


def ids(environment, count):
    return [environment.problem(index).id for index in range(count)]


def test_only_what_is_sometimes_solved_is_trained_on():
    environment = filtered([rate(1, 0), rate(2, 1), rate(3, 4), rate(4, 8), rate(5, 7)])
    assert sorted(ids(environment, 3)) == ["p/2", "p/3", "p/5"]
    assert sorted(ids(environment, 30)) == sorted(["p/2", "p/3", "p/5"] * 10)
    assert set(ids(filtered([rate(1, 0), rate(2, 4), rate(3, 8)], pass_rate_between=[0.5, 1]), 9)) == {"p/2", "p/3"}


def test_a_problem_depends_on_index_and_seed_only():
    rates = [rate(n, 4) for n in range(1, 21)]
    one, again, other = filtered(rates, 1), filtered(rates[::-1], 1), filtered(rates, 2)
    assert [again.problem(index).id for index in reversed(range(60))] == ids(one, 60)[::-1]
    assert ids(one, 60) != ids(other, 60)
    assert len({tuple(ids(one, 60)[start : start + 20]) for start in (0, 20, 40)}) == 3


def test_evaluation_and_rollouts_are_those_of_the_environment():
    environment = filtered([rate(3, 4)])
    assert sorted(problem.id for problem in environment.held_out(9)) == ["h/1", "h/2", "h/3"]
    assert rollout(environment, environment.problem(0), "#### 3").reward == 1


def test_rates_of_one_problem_add_up_over_files():
    write("more.jsonl", [rate(1, 1, 4), rate(2, 1, 4)])
    write("rates.jsonl", [rate(1, 1, 4), rate(2, 4, 4)])
    arguments = {"environment": INNER, "pass_rates": ["rates.jsonl", "more.jsonl"], "pass_rate_between": [0.2, 0.3]}
    assert ids(make_environment("difficulty_filter", arguments, TOKENIZER, 0), 2) == ["p/1", "p/1"]


def test_problems_are_found_by_their_ids_also_where_they_have_no_end():
    rates = [{"id": f"gcd/{number}", "attempts": 2, "passes": 1} for number in (3, 800)]
    environment = filtered(rates, environment={"kind": "gcd"})
    assert sorted(ids(environment, 2)) == ["gcd/3", "gcd/800"]


def test_two_files_of_one_name_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    write("other/p.jsonl", [{"question": "Another?", "answer": 1}])
    both = {"kind": "math", "args": {**INNER["args"], "path": ["p.jsonl", "other/p.jsonl"]}}
    with one_line(EnvironmentSetupError, "two different problems have the id 'p/1'"):
        filtered([rate(1, 4)], environment=both)


@pytest.mark.parametrize(
    ("rates", "complaint"),
    [
        ([], r"rates\.jsonl has no pass rates"),
        (["{oops"], r"rates\.jsonl:1 is not JSON"),
        ([rate(1, 1), [1]], r"rates\.jsonl:2 is not a pass rate"),
        ([{"id": "p/1", "attempts": 8}], "missing required field `passes`"),
        ([{"id": 1, "attempts": 8, "passes": 2}], r"got `int` - at `\$\.id`"),
        ([{"id": "p/1", "attempts": 8, "passes": 0.5}], r"got `float` - at `\$\.passes`"),
        ([rate(1, 1), rate(2, 9)], r"rates\.jsonl:2: 9 passes in 8 attempts is impossible"),
        ([rate(1, 0, 0)], "0 passes in 0 attempts"),
        ([rate(1, -1)], "-1 passes"),
        (
            [rate(1, 0), rate(2, 8)],
            r"none of the 2 problems in rates\.jsonl has .* between 0\.05 and 0\.95: they go from 0 to 1",
        ),
        ([rate(1, 4), rate(99, 4)], r"1 of the 2 problems chosen from rates\.jsonl are not among .* 'p/99'"),
    ],
)
def test_pass_rates_that_can_not_be_used(rates, complaint):
    with one_line(EnvironmentSetupError, match=complaint):
        filtered(rates)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"pass_rate_between": [0.9, 0.1]}, "give the minimum first"),
        ({"pass_rates": "none.jsonl"}, r"can't read none\.jsonl"),
        ({"environment": {"kind": "gdc"}}, "args.environment: environment.kind 'gdc' is unknown"),
    ],
)
def test_arguments_that_can_not_be_used(arguments, complaint):
    with pytest.raises(EnvironmentSetupError, match=complaint):
        filtered([rate(1, 4)], **arguments)

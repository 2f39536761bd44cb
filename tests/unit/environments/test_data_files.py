"""Files of examples: what each form is read as, what is wrong with a file, and which problems are held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.environments.data import ProblemSet, Split, read_rows
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Problem
from tests.unit.environments.env_client import TOKENIZER, one_line

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
PRETTY = json.dumps(ROWS, indent=1)
READ: dict[str, tuple[str, str, list[Any]]] = {
    "lines": ("d.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"}', ROWS),
    "array": ("d.json", json.dumps(ROWS), ROWS),
    "array, several lines": ("d.json", PRETTY, ROWS),
    "array after blanks and a mark": ("d.json", "\ufeff \n" + PRETTY, ROWS),
    "lines of lists": ("d.jsonl", '[1, 2]\n[{"a": 3}]', [[1, 2], [{"a": 3}]]),
}
WRONG = {
    "array without an end": (
        "d.json",
        '[\n{"prompt": "a"},',
        "d.json:1 is not JSON: Input data was truncated",
    ),
    "object over lines": (
        "d.json",
        json.dumps(ROWS[0], indent=1),
        "d.json:1 is not JSON: Input data was truncated",
    ),
    "no JSON at all": (
        "d.txt",
        "hello",
        r"d.txt:1 is not JSON: .* \(files of JSON lines or of one JSON array, and .parquet",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_by_its_suffix_and_content(tmp_path: Path, name: str) -> None:
    file, text, rows = READ[name]
    (tmp_path / file).write_text(text)
    assert [row for _, row in read_rows(tmp_path / file)] == rows


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    file, text, said = WRONG[name]
    Path(file).write_text(text)
    with one_line(EnvironmentSetupError, match=said):
        list(read_rows(Path(file)))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes('{"a": 1}'.encode("utf-16"))
    with one_line(EnvironmentSetupError, "d.jsonl:1 is not JSON: "):
        list(read_rows(tmp_path / "d.jsonl"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no PAR1")
    with one_line(EnvironmentSetupError, "d.parquet is not Parquet"):
        list(read_rows(tmp_path / "d.parquet"))


def test_parquet_is_read_with_nested_values(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n, "score": n / 2} for n in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert list(read_rows(tmp_path / "d.parquet")) == list(enumerate(rows, 1))


def test_held_out_problems_are_a_sample_that_depends_on_their_content_only() -> None:
    problems = [Problem(id=str(n), payload={"n": n}) for n in range(1000)]

    def held_out(some: list[Problem], seed: int, count: int = 100) -> list[int]:
        return [problem.payload["n"] for problem in ProblemSet(Split(problems, some), f"name/{seed}").held_out(count)]

    drawn = held_out(problems, 0)
    assert drawn == held_out(problems[::-1], 1)
    assert drawn[:10] == held_out(problems, 0, 10)
    assert 400 < sum(drawn) / len(drawn) < 600


def test_a_first_prompt_of_a_class_that_has_the_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("""
from pipelinerl.environments import SingleTurn
from pipelinerl.types import Problem
class Task(SingleTurn):
    def problem(self, index): return Problem(id="0", payload={})
    def prompt(self, problem): return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    def reward(self, problem, text): return 0.0
""")
    with one_line(EnvironmentSetupError, "the first problem's prompt has chat messages that end with the assistant's"):
        make_environment(f"{tmp_path}/task.py:Task", {}, TOKENIZER, 0)


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("math", {"path": "d.jsonl", "judge": "numbers", "system": "x"}, "system has no effect: there is no chat"),
        ("math", {"path": "d.jsonl", "judge": "numbers", "judge_processes": 2}, "judge_processes has no effect: it is for"),
        ("countdown", {"system": "x"}, "environment.args.system has no effect"),
        ("agent", {"run": "a.py:f", "problems": {"kind": "gcd"}, "held_out": 0.5}, "held_out has no effect"),
    ],
)
def test_an_argument_without_effect_is_refused(kind: str, args: dict[str, Any], said: str) -> None:
    with one_line(EnvironmentSetupError, said):
        make_environment(kind, args, TOKENIZER, 0)

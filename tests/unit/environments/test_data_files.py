"""Files of examples: what each form is read as, what is wrong with a file, and which problems are held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.environments.data import ProblemSet, Split, parse_name, read_rows
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Problem
from tests.unit.environments.env_client import TOKENIZER, one_line

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
PRETTY = json.dumps(ROWS, indent=1)
READ: dict[str, tuple[str, str, list[Any]]] = {
    "lines": ("d.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"}', ROWS),
    "array": ("d.json", json.dumps(ROWS), ROWS),
    "array after blanks and a mark": ("d.json", "\ufeff \n" + PRETTY, ROWS),
    "lines of lists": ("d.jsonl", '[1, 2]\n[{"a": 3}]', [[1, 2], [{"a": 3}]]),
}
WRONG = {
    "array without an end": ("d.json", b'[\n{"prompt": "a"},', "d.json:1 is not JSON: Input data was truncated"),
    "no JSON at all": (
        "d.txt",
        b"hello",
        r"d.txt:1 is not JSON: .* \(files of JSON lines or of one JSON array, and .parquet",
    ),
    "bytes that are no text": ("d.jsonl", '{"a": 1}'.encode("utf-16"), "d.jsonl:1 is not JSON: "),
    "no Parquet": ("d.parquet", b"PAR1 no PAR1", "d.parquet is not Parquet"),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_by_its_suffix_and_content(tmp_path: Path, name: str) -> None:
    file, text, rows = READ[name]
    (tmp_path / file).write_text(text)
    assert [row for _, row in read_rows(tmp_path / file)] == rows


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    file, content, message = WRONG[name]
    Path(file).write_bytes(content)
    with one_line(EnvironmentSetupError, match=message):
        list(read_rows(Path(file)))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_parquet_is_read_with_nested_values(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n, "score": n / 2} for n in range(5)]
    write_parquet(tmp_path / "d.parquet", rows)
    assert list(read_rows(tmp_path / "d.parquet")) == list(enumerate(rows, 1))


def test_a_data_set_has_an_owner_a_name_perhaps_a_config_and_a_split() -> None:
    assert parse_name("dataset:openai/gsm8k/main:train") == ("openai/gsm8k", "main", "train")
    assert parse_name("dataset:owner/name:test[:10%]") == ("owner/name", None, "test[:10%]")
    for wrong in ("dataset:", "dataset:train", "dataset:a:train", "dataset:a/b/c/d:train", "dataset:a/b:"):
        with one_line(EnvironmentSetupError, match="write dataset:OWNER/NAME:SPLIT"):
            parse_name(wrong)


def test_a_folder_of_parquet_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real `datasets`; the hub itself is not asked."""
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"{n} + {n}?", "answer": f"twice\n#### {2 * n}"} for n in range(20)]
    folder = tmp_path / "sums"
    for split, part in (("train", rows), ("test", rows[:3])):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", part)
    args = {"path": f"dataset:{folder}:train", "held_out_path": f"dataset:{folder}:test", "judge": "numbers"}
    environment = make_environment("math", args, TOKENIZER, seed=0)
    assert sorted(problem.payload["answer"] for problem in environment.held_out(5)) == ["0", "2", "4"]
    assert {problem.id.rpartition("/")[2] for problem in environment.held_out(3)} == {"1", "2", "3"}
    questions = {environment.problem(index).payload["question"] for index in range(17)}
    assert questions == {row["question"] for row in rows[3:]}
    with one_line(EnvironmentSetupError, match="a file has no splits"):
        list(read_rows(Path(f"dataset:{folder}/train-00000-of-00001.parquet:train")))


def test_held_out_problems_are_a_sample_that_depends_on_their_content_only() -> None:
    problems = [Problem(id=str(n), payload={"n": n}) for n in range(1000)]

    def held_out(some: list[Problem], seed: int, count: int = 100) -> list[int]:
        return [problem.payload["n"] for problem in ProblemSet(Split(problems, some), f"name/{seed}").held_out(count)]

    drawn = held_out(problems, 0)
    assert drawn == held_out(problems[::-1], 1)
    assert drawn[:10] == held_out(problems, 0, 10)
    assert 400 < sum(drawn) / len(drawn) < 600

"""Data sets in place of files, with the real `datasets`; the hub itself is not asked."""

from __future__ import annotations

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.environments.data import parse_name, read_dataset, read_rows
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.environments.env_client import TOKENIZER, one_line

ROWS = [{"question": f"{n} + {n}?", "answer": f"twice\n#### {2 * n}"} for n in range(20)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "sums"


def write(folder, split, rows):
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("dataset:openai/gsm8k/main:train", ("openai/gsm8k", "main", "train")),
        ("dataset:owner/name:test[:10%]", ("owner/name", None, "test[:10%]")),
        ("dataset:owner/name:test", ("owner/name", None, "test")),
    ],
)
def test_a_data_set_has_an_owner_a_name_perhaps_a_config_and_a_split(source, name):
    assert parse_name(source) == name


@pytest.mark.parametrize(
    "source", ["dataset:", "dataset:train", "dataset:gsm8k:train", "dataset:a/b/c/d:train", "dataset:a/b:"]
)
def test_what_names_no_data_set_is_refused(source):
    with one_line(EnvironmentSetupError, match="write dataset:OWNER/NAME:SPLIT"):
        parse_name(source)


def test_a_folder_of_parquet_is_a_file_of_problems(folder):
    write(folder, "train", ROWS)
    write(folder, "test", ROWS[:3])
    args = {"path": f"dataset:{folder}:train", "held_out_path": f"dataset:{folder}:test", "judge": "numbers"}
    environment = make_environment("math", args, TOKENIZER, seed=0)
    assert sorted(problem.payload["answer"] for problem in environment.held_out(5)) == ["0", "2", "4"]
    questions = {environment.problem(index).payload["question"] for index in range(17)}
    assert questions == {row["question"] for row in ROWS[3:]}
    assert {problem.id.rpartition("/")[2] for problem in environment.held_out(3)} == {"1", "2", "3"}


def test_a_file_is_no_data_set_with_splits(folder):
    write(folder, "train", ROWS)
    file = folder / "train-00000-of-00001.parquet"
    with one_line(EnvironmentSetupError, match="a file has no splits"):
        list(read_dataset(f"dataset:{file}:train"))
    assert [row for _, row in read_rows(file)] == ROWS

"""What is found wrong with `environment` of a run file before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments.static_check import check_statically
from pipelinerl.errors import ConfigError, EnvironmentSetupError

TASKS = """
from elsewhere import Imported
from pipelinerl.environments import SingleTurn
from pipelinerl import environments
raise RuntimeError("this file is not to be run")

class Plain(SingleTurn):
    def problem(self, index): ...

class Sized(environments.SingleTurn):
    def __init__(self, tokenizer, seed, size, *, depth=2): ...
    def held_out(self, count): ...

class Anything(Imported):
    def __init__(self, *args, **options): ...

class Inherits(Imported):
    pass

def right(completion, example): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "broken.py").write_text("def right(:")
    (tmp_path / "star.py").write_text("from elsewhere import *")
    (tmp_path / "data.jsonl").write_text("{}")
    return tmp_path


def function(**args: Any) -> tuple[str, dict[str, Any]]:
    return "function", {"data": "data.jsonl", "reward": "tasks.py:right", **args}


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("gdc", {}, "Did you mean 'gcd'"),
        ("gcd", {"size": 3}, "environment.args don't fit gcd"),
        ("no.py:Task", {}, "there is no file FOLDER/no.py (a path is relative to the working directory, FOLDER)"),
        ("tasks.py:Plane", {}, "tasks.py has no class 'Plane'; it has Plain (environment.kind tasks.py:Plane)"),
        ("tasks.py:Plain", {"size": 3}, "don't fit tasks.py:Plain: got an unexpected keyword argument 'size'"),
        (
            "tasks.py:Sized",
            {},
            "missing a required argument: 'size'; after `tokenizer` and `seed` it takes size (required)",
        ),
        ("tasks.py:Sized", {"size": 1, "deep": 1}, "got an unexpected keyword argument 'deep'"),
        ("broken.py:Task", {}, "FOLDER/broken.py can't be imported: line 1: SyntaxError"),
        (*function(timeout=3), "got an unexpected keyword argument 'timeout'"),
        (
            *function(data="nofile.jsonl"),
            "can't read nofile.jsonl: No such file or directory (FOLDER/nofile.jsonl: a path",
        ),
        (*function(data=["data.jsonl", "two.jsonl"]), "can't read two.jsonl"),
        (*function(reward="nofile.py:f"), "there is no file FOLDER/nofile.py"),
        (*function(reward="tasks.py:wrong"), "tasks.py has no function 'wrong'; it has right"),
        (*function(prompt="tasks.py:ask"), "tasks.py has no function 'ask'"),
        ("math", {"path": "nofile.jsonl"}, "can't read nofile.jsonl"),
        ("agent", {"run": "agent.py:solve", "data": "data.jsonl"}, "there is no file FOLDER/agent.py"),
        ("mixture", {"environments": 3}, "environment.args.environments is 3: expected `object`, got `int`"),
        ("countdown", {"highest": 1}, "environment.args.highest is 1: expected `int` >= 2"),
        ("mixture", {"environments": {"a": {"kind": "gdc"}}}, "environment.args.environments.a: environment.kind 'gdc' is"),
        (
            "difficulty_filter",
            {"environment": {"kind": "gdc"}, "pass_rates": "data.jsonl"},
            "environment.args.environment: ",
        ),
    ],
)
def test_a_mistake_is_found_without_running_anything(folder: Path, kind: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        check_statically(kind, args)
    message = str(caught.value).replace(str(folder), "FOLDER")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("gcd", {}),
        ("tasks.py:Plain", {}),
        ("tasks.py:Sized", {"size": 3, "depth": 4}),
        ("tasks.py:Anything", {"whatever": 1}),
        ("tasks.py:Inherits", {"whatever": 1}),
        ("tasks.py:Imported", {"whatever": 1}),
        ("star.py:Task", {}),
        ("no.such.module:Task", {}),
        function(),
        function(prompt="question", held_out=0.5, data="dataset:owner/name:train"),
        function(reward="a.module:right"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_can_not_be_known_is_left_to_the_start(kind: str, args: dict[str, Any]) -> None:
    check_statically(kind, args)


@pytest.mark.usefixtures("folder")
def test_a_class_without_held_out_can_not_be_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.py:Plain has no held-out problems: define `held_out\(self, count\)`"):
        check_statically("tasks.py:Plain", {}, held_out=8)
    for kind, args in (("tasks.py:Sized", {"size": 1}), ("tasks.py:Inherits", {}), ("gcd", {})):
        check_statically(kind, args, held_out=8)

"""`train --dry-run`: the environment is built and tried, and nothing else is started."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import pipelinerl
from pipelinerl.cli import main
from pipelinerl.errors import EnvironmentSetupError, UserError
from pipelinerl.launch import checks
from pipelinerl.launch.checks import TryoutReport, check_before_the_start, dry_run
from pipelinerl.launch.checks import try_environment as in_a_process
from pipelinerl.launch.tryout import try_environment
from pipelinerl.models.folder import resolve_path
from tests.integration.runs import flags, small_run, try_in_this_process, write_environment

Capture = pytest.CaptureFixture[str]
REWARDS = """
import time

def right(completion, example):
    return 0.25

def raises(completion, example):
    raise ValueError("boom")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}{n},1:"}}\n' for n in range(10, 40)))
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    try_in_this_process(monkeypatch)


def function(**args: Any) -> dict[str, Any]:
    values = {"data": "data.jsonl", "reward": "rewards.py:right", **args}
    text = ", ".join(f"{name}: {value}" for name, value in values.items())
    return {"environment__kind": "function", "environment__args": f"{{{text}}}"}


def klass(folder: Path, body: str, **settings: Any) -> dict[str, Any]:
    return {"environment__kind": write_environment(folder, body), **settings}


def tried(settings: dict[str, Any], folder: Path) -> Any:
    return asyncio.run(try_environment(small_run(folder / "r", **settings), lambda _: None))


@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_agree_in_the_model_is_reported(folder: Path) -> None:
    copy = folder / "model"
    shutil.copytree(resolve_path("demo"), copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": [1, 99]}')
    settings = function() | {"model__path": str(copy)}
    note, epoch, *_ = tried(settings, folder).lines
    assert note.startswith("model: ")
    assert re.fullmatch(r"data: \d+ training problems: an epoch is [\d.]+ steps \(trainer.steps: \d+\)", epoch)
    assert "99 (of generation_config.json)" in note
    assert {note, epoch} <= set(dry_run(small_run(folder / "r", **settings)))


WRONG = {
    "missing class": (lambda _: {"environment__kind": "rewards.py:Nope"}, "rewards.py has no class 'Nope'"),
    "missing file": (lambda _: function(reward="nofile.py:f"), "/nofile.py (a path is relative to the working directory, /"),
    "missing agent": (
        lambda _: {"environment__kind": "agent", "environment__args": "{run: agent.py:solve, data: data.jsonl}"},
        "agent.py",
    ),
    "unknown part": (
        lambda _: {"environment__kind": "mixture", "environment__args": "{environments: {a: {kind: gdc}}}"},
        "environment.args.environments.a: environment.kind 'gdc' is unknown",
    ),
    "missing callback": (
        lambda _: {"metrics__callback": "rewards.py:note"},
        "rewards.py has no function 'note'; it has right",
    ),
    "missing loss": (lambda _: {"trainer__loss": "rewards.py:nope"}, "rewards.py has no function 'nope'"),
    "loss of another kind": (
        lambda _: {"trainer__loss": "rewards.py:right"},
        "trainer.loss: TypeError",
    ),
    "advantage of another kind": (
        lambda _: {"preprocess__advantage": "rewards.py:right"},
        "preprocess.advantage: TypeError",
    ),
    "another vocabulary": (
        lambda _: {
            "trainer__teacher": "demo-tools",
            "trainer__kl_coefficient": 1.0,
            "preprocess__zero_advantage": "keep",
        },
        "trainer.teacher: demo-tools has another vocabulary than",
    ),
    "no answers": (lambda _: {"trainer__warm_start__data": "data.jsonl"}, "data.jsonl, line 1: it needs `prompt` and"),
    "arguments of a class": (
        lambda folder: klass(folder, "def __init__(self, tokenizer, seed, size): ..."),
        "missing a required argument: 'size'; after `tokenizer` and `seed` it takes size (required)",
    ),
    "misspelt argument": (lambda _: function(timeout=3), "environment.args.timeout: unknown; did you mean `timeout_s`?"),
    "function raises": (lambda _: function(reward="rewards.py:raises"), "reward: rewards.py, line 8: ValueError: boom"),
    "group reward raises": (
        lambda _: function(group_reward="rewards.py:raises"),
        "a group of two empty answers: raised: RuntimeError: group_reward: rewards.py, line 8: ValueError: boom",
    ),
    "constructor raises": (
        lambda folder: klass(folder, "def __init__(self, tokenizer, seed):\n    raise OSError('no such table')"),
        "can't be built: task.py, line 9: OSError: no such table",
    ),
    "reward raises": (
        lambda folder: klass(folder, "def reward(self, problem, text):\n    return problem.answer"),
        "an empty answer to its first problem: raised: RuntimeError: reward: task.py, line 9: AttributeError: 'Problem'",
    ),
    "reward raises for a text": (
        lambda folder: klass(folder, "def reward(self, problem, text):\n    return problem.answer if text else 0.0"),
        "the answer 'banana' to its first problem: raised: RuntimeError: reward: task.py, line 9: AttributeError",
    ),
    "reward loops": (
        lambda folder: klass(
            folder, "reward_limits = {'timeout_s': 0.3}\ndef reward(self, problem, text):\n    while True: pass"
        ),
        "timeout: reward (task.py:Task): it took longer than 0.3 s, in line 10; its process was ended",
    ),
    "problem raises": (
        lambda folder: klass(folder, "def problem(self, index):\n    raise KeyError(index)"),
        "raised: problem(0): KeyError: 0",
    ),
    "nothing held out": (
        lambda folder: klass(folder, "def held_out(self, count):\n    return ()", evaluation__problems=4),
        "has no held-out problems",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_an_environment_is_found(folder: Path, name: str) -> None:
    make, said = WRONG[name]
    with pytest.raises(UserError) as caught:
        tried(make(folder), folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pool.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("gdc", "{}", "Did you mean 'gcd'"),
        ("gcd", "{size: 3}", "environment.args don't fit gcd"),
        ("mixture", "{environments: 3}", "environment.args.environments: 3 is not allowed"),
        ("math", "{path: data.jsonl, judge: 3}", "environment.args.judge"),
    ],
)
def test_the_arguments_of_a_built_in_environment_are_checked_without_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, args: str, message: str
) -> None:
    monkeypatch.setattr(checks, "try_environment", None)
    with pytest.raises(EnvironmentSetupError) as caught:
        check_before_the_start(small_run(folder / "r", environment__kind=kind, environment__args=args))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "attempts"),
    [
        ({}, None),
        ({"environment__kind": "task.py:Task"}, False),
        ({"environment__kind": "math", "environment__args": "{path: data.jsonl}"}, False),
        ({"environment__kind": "mixture", "environment__args": "{environments: {a: {kind: task.py:Task}}}"}, False),
        ({"metrics__callback": "rewards.py:right"}, False),
        ({"trainer__warm_start__data": "data.jsonl"}, False),
        ({"trainer__loss": "rewards.py:right"}, True),
        ({"preprocess__advantage": "rewards.py:right"}, True),
        (function(), True),
    ],
)
def test_user_code_and_files_are_tried_before_a_run_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], attempts: bool | None
) -> None:
    calls: list[bool] = []

    def note(*_: Any, attempts: bool) -> TryoutReport:
        calls.append(attempts)
        return TryoutReport()

    monkeypatch.setattr(checks, "try_environment", note)
    check_before_the_start(small_run(folder / "r", **settings | {"launch__kind": "processes"}))
    assert calls == ([] if attempts is None else [attempts])


@pytest.mark.usefixtures("in_this_process")
def test_a_class_is_built_before_a_run_without_an_attempt(folder: Path) -> None:
    body = "async def rollout(self, problem, client):\n    raise ValueError('not tried')"
    config = small_run(folder / "r", **klass(folder, body, evaluation__problems=1, launch__kind="processes"))
    assert len(check_before_the_start(config).lines) == 1


@pytest.mark.slow
def test_what_the_environment_does_is_shown_without_the_models_weights(folder: Path, capsys: Capture) -> None:
    demo = Path(pipelinerl.__file__).parent / "assets" / "demo_base"
    shutil.copytree(demo, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = function() | {"model__path": folder / "model", "evaluation__problems": 2}
    assert main(["train", "--dry-run", *flags(folder / "r", **settings)]) == 0
    said = capsys.readouterr().out
    assert "environment: function was built in " in said
    assert "the first prompt has 7 tokens: " in said
    assert "an empty answer to it gets reward 0.25" in said
    assert "2 held-out problems (evaluation.problems: 2)" in said
    assert not (folder / "r").exists()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("length", "warned"), [(16, True), (40, False)])
def test_a_prompt_that_does_not_fit_is_noticed(folder: Path, capsys: Capture, length: int, warned: bool) -> None:
    settings = function() | {"actor__max_tokens": 10, "engine__max_length": length}
    assert main(["train", "--dry-run", *flags(folder / "r", **settings)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("memory: up to ")
    assert "Adam's moments" in said
    warning = f"warning: the first prompt does not fit engine.max_length ({length}) with actor.max_tokens (10)"
    assert (warning in said) == warned


@pytest.mark.slow
def test_an_environment_that_ends_its_process_is_reported(folder: Path) -> None:
    body = "def __init__(self, tokenizer, seed):\n    import os\n    os._exit(7)"
    with pytest.raises(EnvironmentSetupError, match=r"status 7.*builds"):
        in_a_process(small_run(folder / "r", **klass(folder, body)))


@pytest.mark.slow
def test_an_environment_that_is_never_ready_is_ended(folder: Path) -> None:
    """On a slow machine the bound may pass before the process has loaded the tokenizer."""
    body = "def __init__(self, tokenizer, seed):\n    time.sleep(3600)"
    with pytest.raises(EnvironmentSetupError, match=r"was not ready after 3 s .*: it (builds|loads)"):
        in_a_process(small_run(folder / "r", **klass(folder, body, launch__startup_timeout_s=3)))

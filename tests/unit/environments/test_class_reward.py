"""The reward of a user's class runs in processes with instances of their own: what it does wrong costs one rollout."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import guarded
from pipelinerl.config.schema import ModelConfig
from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.types import Problem, Rollout
from tests.unit.environments.env_client import TOKENIZER, one_line, rollout, saying

TASK = """
import os
from pipelinerl.environments import SingleTurn
from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.types import Problem

class Act(SingleTurn):
    reward_limits = {"workers": 1}

    def __init__(self, tokenizer, seed, *, bonus=0.0):
        super().__init__(tokenizer, seed)
        self.bonus = bonus
        self.asked = {}

    def problem(self, index):
        return Problem(id=str(index), payload={"index": index})

    def prompt(self, problem):
        self.asked[problem.id] = True
        return "1"

    def reward(self, problem, text):
        what = problem.payload.get("what")
        if what == "exit":
            os._exit(3)
        if what == "state":
            return float(self.asked[problem.id])
        if what == "pid":
            return os.getpid()
        return self.seed + self.bonus + problem.payload["index"] + len(text) / 10, {"length": len(text)}

class Here(Act):
    isolate_reward = False

class Limitless(Act):
    reward_limits = {"workers": 0}

class Misplaced(Act):
    reward_limits = 60.0

class Old(Act):
    reward_timeout_s = 3.0

class Counts(Act):
    def __init__(self, tokenizer, seed):
        super().__init__(tokenizer, seed)

    def reward(self, problem, text):
        return len(self.tokenizer.encode(text + "12"))

class Packaged(Gcd):
    pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_task.py"
    path.write_text(TASK)
    return path


def made(file: Path, name: str, tokenizer: Tokenizer = TOKENIZER, **args: Any) -> Environment:
    return make_environment(f"{file}:{name}", args, tokenizer, 7)


def test_what_a_reward_does_wrong_costs_one_rollout(file: Path) -> None:
    environment = made(file, "Act", bonus=0.5)

    async def play(what: str) -> Rollout | Failure:
        problem = Problem(id=what, payload={"what": what, "index": 1})
        return await guarded(lambda: environment.rollout(problem, saying("HEY")), 60.0, "the rollout")

    async def main() -> list[Any]:
        return [await play(what) for what in ("right", "exit", "state", "right")]

    first, *failures, last = asyncio.run(main())
    environment.reward_pool.close()  # type: ignore[attr-defined]
    assert first.reward == last.reward == 7 + 0.5 + 1 + 0.3
    assert first.metrics == {"length": 3.0}
    assert [failure.message.partition(" (`")[0] for failure in failures] == [
        "ChildProcessError: reward (own_task.py:Act): its process ended with status 3",
        "RuntimeError: reward: own_task.py, line 27: KeyError: 'state'",
    ]
    assert [failure.reason for failure in failures] == ["raised", "raised"]
    assert "set `isolate_reward = False` in the class" in failures[-1].message


def test_it_runs_in_this_process_if_the_class_says_so_or_the_reward_is_of_this_package(file: Path) -> None:
    here = made(file, "Here")
    assert rollout(here, Problem(id="a", payload={"what": "state"}), "HEY").reward == 1.0
    assert rollout(here, Problem(id="a", payload={"what": "pid"}), "HEY").reward == os.getpid()
    assert here.reward_pool is None  # type: ignore[attr-defined]
    assert made(file, "Packaged").reward_pool is None  # type: ignore[attr-defined]
    isolated = made(file, "Act")
    assert rollout(isolated, Problem(id="a", payload={"what": "pid"}), "HEY").reward != os.getpid()
    isolated.reward_pool.close()  # type: ignore[attr-defined]


def test_what_another_process_can_not_have_is_refused(file: Path) -> None:
    with one_line(EnvironmentSetupError, "its attribute reward_limits: Expected `int` >= 1 - at `$.workers`"):
        made(file, "Limitless")
    with one_line(EnvironmentSetupError, "its attribute reward_limits: "):
        made(file, "Misplaced")
    with one_line(EnvironmentSetupError, "of its attribute reward_timeout_s, write `reward_limits = {'timeout_s': 3.0}`"):
        made(file, "Old")
    with one_line(EnvironmentSetupError, "are not JSON, so no other process can have them"):
        made(file, "Act", bonus=1j)


@pytest.mark.exhaustive
def test_a_reward_may_use_the_tokenizer(file: Path) -> None:
    from pipelinerl.models.loading import load_tokenizer

    environment = made(file, "Counts", load_tokenizer(ModelConfig()))
    assert asyncio.run(environment.call_reward(Problem(id="a", payload={}), "3")) == 3  # type: ignore[attr-defined]
    environment.reward_pool.close()  # type: ignore[attr-defined]

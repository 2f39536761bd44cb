"""Reward functions with the signatures of TRL and verl, as they are."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments.user.code import adapted, split_signature
from pipelinerl.environments.user.function import Function, read_tools
from pipelinerl.environments.user.pool import Limits
from pipelinerl.environments.user.rewards import Functions
from pipelinerl.errors import EnvironmentSetupError
from tests.unit.scripted_engine import CharTokenizer

TOKENIZER = CharTokenizer()
CHAT = [{"role": "user", "content": "2 + 2?"}]


def trl(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    assert len(completions) == len(answer) == len(kwargs["prompts"]) == 1
    text = completions[0] if isinstance(completions[0], str) else completions[0][0]["content"]
    return [float(text == answer[0])]


async def trl_async(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if kwargs["answer"] == ["none"] else float(completions[0] == "4")]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str}


def short(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def own(completion: str, example: dict[str, Any]) -> float:
    return 1.0


def group(completions: list[str], example: dict[str, Any]) -> list[float]:
    return [0.0]


@pytest.mark.parametrize(
    ("function", "example", "reward"),
    [
        (trl, {"prompt": "2 + 2?", "answer": "4"}, 1.0),
        (trl, {"prompt": CHAT, "answer": "4"}, 1.0),
        (trl_async, {"prompt": "2 + 2?", "answer": "4"}, 1.0),
        (trl_async, {"prompt": "2 + 2?", "answer": "none"}, 0.0),
        (verl, {"data_source": "sums", "reward_model": {"ground_truth": "4"}}, {"reward": 1.0, "length": 1}),
        (short, {"data_source": "sums", "ground_truth": "5"}, 0.0),
    ],
)
def test_a_function_is_called_as_its_trainer_calls_it(function: Any, example: dict[str, Any], reward: Any) -> None:
    called = adapted(function, "rewards.py:f")("4", example)
    assert (asyncio.run(called) if inspect.iscoroutine(called) else called) == reward


def test_other_functions_stay_what_they_are() -> None:
    assert adapted(own, "rewards.py:own") is own
    assert adapted(group, "rewards.py:group") is group


def test_arguments_in_the_wrong_order_are_an_error() -> None:
    def swapped(example: dict[str, Any], completion: str) -> float:
        return 1.0

    with pytest.raises(EnvironmentSetupError, match=r"rewards.py:swapped has the parameters \(example, completion\): write"):
        adapted(swapped, "rewards.py:swapped")


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("trl:rewards.py:f", ("trl", "rewards.py:f")),
        ("verl:package.module:f", ("verl", "package.module:f")),
        ("rewards.py:f", ("", "rewards.py:f")),
        ("trl:f", ("", "trl:f")),  # a function of the module
    ],
)
def test_a_prefix_names_the_signature(named: str, parts: tuple[str, str]) -> None:
    assert split_signature(named) == parts


def test_a_prefix_counts_more_than_the_names_of_parameters() -> None:
    def unusual(completions: list[str], answer: list[str]) -> list[float]:
        return [float(completions == answer)]

    called = adapted(unusual, "rewards.py:unusual", "trl")
    assert called("4", {"prompt": "2 + 2?", "answer": "4", "level": 1}) == 1.0


@pytest.mark.parametrize("function", [lambda text: 1.0, lambda prompts, completions, answer: [1.0], lambda a, b, *, c: 1.0])
def test_a_function_that_takes_something_else_is_an_error(function: Any) -> None:
    with pytest.raises(
        EnvironmentSetupError,
        match=r"f can't be called with 2 arguments: .* takes \(completion, example\).* trl:rewards.py:f",
    ):
        adapted(function, "rewards.py:f")


@pytest.mark.parametrize("isolate", [True, False])
def test_the_signature_that_was_recognised_is_said(isolate: bool, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n' * 3)
    file = tmp_path / "rewards.py"
    file.write_text(
        "def right(completions, answer, **kwargs):\n    return [float(completions == answer)]\n"
        "def score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n"
        "def own(completion, example):\n    return 0.0\n"
    )
    rewards = [f"{file}:right", f"verl:{file}:score", f"{file}:own"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4", "ground_truth": "4"}\n')
    environment = Function(TOKENIZER, 0, data=f"{tmp_path}/data.jsonl", reward=rewards, isolate=isolate, held_out=0.0)
    assert [note.partition(":")[0] for note in environment.reward_notes] == [f"reward {file}", f"reward {file}"]
    assert ["as TRL calls" in note or "as verl calls" in note for note in environment.reward_notes] == [True, True]
    assert asyncio.run(environment.reward_of("4", {"prompt": "2 + 2?", "answer": "4", "ground_truth": "4"})) == 2.0


def test_only_rewards_are_called_as_another_trainer_calls_them(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(
        "def judge(completions, **kwargs):\n    return [len(kwargs['prompts'])]\n"
        "def brief(completions, example, **kwargs):\n    return [-1.0] * len(completions)\n"
        "def check(solution_str: str) -> str:\n"
        '    """Checks it.\n\n    Args:\n        solution_str: The solution.\n    """\n'
        "    return solution_str.upper()\n"
    )
    specs = {"reward": f"{tmp_path}/functions.py:judge", "group_reward": f"{tmp_path}/functions.py:brief"}

    async def ask(isolate: bool) -> tuple[Any, ...]:
        limits = Limits()
        functions = Functions(specs, {"reward": ""}, isolate=isolate, workers=1, concurrency=1, limits=limits)
        (tool,) = read_tools([f"{tmp_path}/functions.py:check"], isolate=isolate, workers=1, limits=limits)
        example = {"prompt": "2 + 2?"}
        return (
            await functions.call("reward", "4", example),
            await functions.call("group_reward", ["4", "5"], example),
            await tool.call({"solution_str": "four"}),
        )

    for isolate in (True, False):
        assert asyncio.run(ask(isolate)) == (1, [-1.0, -1.0], "FOUR")

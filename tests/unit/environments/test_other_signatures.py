"""Reward functions with the signatures of TRL and verl, as they are."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from pipelinerl.environments.user.code import adapted
from pipelinerl.errors import EnvironmentSetupError

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

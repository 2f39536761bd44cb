"""Reward functions with the signatures of TRL and verl, as they are."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments.user.code import find_reward
from pipelinerl.environments.user.function import Function
from pipelinerl.types import Completion, Problem, Turn
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


def group(completions: list[str], example: dict[str, Any], **kwargs: Any) -> list[float]:
    return [0.0]


@pytest.mark.parametrize(
    ("function", "example", "reward"),
    [
        ("trl", {"prompt": "2 + 2?", "answer": "4"}, 1.0),
        ("trl", {"prompt": CHAT, "answer": "4"}, 1.0),
        ("trl_async", {"prompt": "2 + 2?", "answer": "4"}, 1.0),
        ("trl_async", {"prompt": "2 + 2?", "answer": "none"}, 0.0),
        ("verl", {"data_source": "sums", "reward_model": {"ground_truth": "4"}}, {"reward": 1.0, "length": 1}),
        ("short", {"data_source": "sums", "ground_truth": "5"}, 0.0),
    ],
)
def test_a_function_is_called_as_its_trainer_calls_it(function: str, example: dict[str, Any], reward: Any) -> None:
    called = find_reward(f"{__file__}:{function}")("4", example)
    assert (asyncio.run(called) if inspect.iscoroutine(called) else called) == reward


def test_other_functions_stay_what_they_are() -> None:
    for name in ("own", "group"):
        assert not hasattr(find_reward(f"{__file__}:{name}"), "called_as")


@pytest.mark.parametrize("isolate", [True, False])
def test_the_signature_that_was_recognised_is_said(isolate: bool, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n' * 3)
    file = tmp_path / "rewards.py"
    file.write_text(
        "def right(completions, answer, **kwargs):\n    return [float(completions == answer)]\n"
        "def score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n"
        "def own(completion, example):\n    return 0.0\n"
    )
    rewards = [f"{file}:right", f"{file}:score", f"{file}:own"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4", "ground_truth": "4"}\n')
    environment = Function(TOKENIZER, 0, data=f"{tmp_path}/data.jsonl", reward=rewards, isolate=isolate, held_out=0.0)
    assert [note.partition(":")[0] for note in environment.reward_notes] == [f"reward {file}", f"reward {file}"]
    assert ["as TRL calls" in note or "as verl calls" in note for note in environment.reward_notes] == [True, True]
    problem = Problem(id="", payload={"prompt": "2 + 2?", "answer": "4", "ground_truth": "4"})
    nothing = Completion(request_id="", token_ids=(), logprobs=(), weight_versions=(), finish_reason="stop")
    turn = Turn(prompt_ids=(), completion=nothing, text="4")
    assert asyncio.run(environment.judge(problem, turn)).reward == 2.0

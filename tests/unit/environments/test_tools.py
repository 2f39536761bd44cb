"""Tasks with tools: what the model is shown, what its calls cost, and what comes of mistakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments import ToolTask
from pipelinerl.environments.chat.tool_use import MAX_RESULT, tool_of
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError, RolloutError
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Problem, Rollout
from tests.unit.chat_parts import SamplingClient, calling, make_tokenizer

TOKENIZER = make_tokenizer()
EXAMPLE = f"{Path(__file__).parents[3]}/examples/calculator.py:Calculator"


def play(environment: Any, problem: Problem, *texts: str | Exception) -> tuple[Rollout, str]:
    """The rollout in which the model says these things, and its whole text."""
    client = SamplingClient.saying(TOKENIZER, *texts)
    rollout = asyncio.run(environment.rollout(problem, client))
    assert len(join_turns(rollout.turns).segments) == 1
    turn = rollout.turns[-1]
    return rollout, TOKENIZER.decode([*turn.prompt_ids, *turn.completion.token_ids])


# ------------------------------------------------------------------------------------------------ the example


@pytest.fixture(scope="module")
def calculator() -> Any:
    return make_environment(EXAMPLE, {}, TOKENIZER, 0)


SUM = Problem(id="", payload={"expression": "(12 + 30) * 2", "value": 84})


def test_the_calculator_answers_and_the_answer_earns(calculator: Any) -> None:
    rollout, text = play(calculator, SUM, calling("calculate", expression="(12 + 30) * 2"), "It is 84.")
    assert rollout.reward == 1.0
    assert "<|im_start|>tool\n84<|im_end|>" in text
    assert rollout.metrics["tool_calls"] == 1
    assert rollout.metrics["tool_errors"] == rollout.metrics["out_of_turns"] == rollout.metrics["new_segments"] == 0
    wrong, _ = play(calculator, SUM, "It is 85.")
    assert wrong.reward == wrong.metrics["tool_calls"] == 0.0
    for problem in (*map(calculator.problem, range(200)), *calculator.held_out(50)):
        assert eval(problem.payload["expression"]) == problem.payload["value"]  # noqa: S307 - digits and operators
    few = make_environment(EXAMPLE, {"numbers": [2, 2], "highest": 10}, TOKENIZER, 0)
    trained = {few.problem(index).payload["expression"] for index in range(200)}
    assert trained.isdisjoint(problem.payload["expression"] for problem in few.held_out(20))


def test_a_turn_earns_a_part_of_the_reward_with_the_right_call() -> None:
    environment = make_environment(EXAMPLE, {"call_reward": 0.25}, TOKENIZER, 0)
    wrong, right = (calling("calculate", expression=text) for text in ("12 + 30", "(12 + 30) * 2"))
    rollout, _ = play(environment, SUM, wrong, right, "It is 84.")
    assert ([turn.reward for turn in rollout.turns], rollout.reward) == ([0.0, 0.25, 0.0], 1.0)
    rollout, _ = play(environment, SUM, right, "It is 85.")
    assert ([turn.reward for turn in rollout.turns], rollout.reward) == ([0.25, 0.0], 0.25)
    assert rollout.metrics["right"] == 0.0


@pytest.mark.parametrize("turns", [[1.0], [1.0, None], "12", 3.0, [1.0, float("nan")]])
def test_rewards_that_do_not_fit_the_turns_are_an_error(turns: object, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = make_environment(EXAMPLE, {}, TOKENIZER, 0)
    monkeypatch.setattr(environment, "reward", lambda *_: {"reward": 1.0, "turns": turns})
    with pytest.raises(RolloutError, match="turns"):
        play(environment, SUM, calling("calculate", expression="2"), "It is 2.")


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (calling("calculate", expression="2 +"), "Error: '2 +' is not an expression"),
        (calling("calculate", expresion="2"), "Error: TypeError: calculate() got an unexpected keyword argument"),
        (calling("search", query="2"), "Error: there is no tool 'search'; there are: calculate"),
    ],
)
def test_mistakes_of_the_model_are_shown_to_it(calculator: Any, call: str, shown: str) -> None:
    rollout, text = play(calculator, SUM, call, "I do not know.")
    assert f"<|im_start|>tool\n{shown}" in text
    assert rollout.metrics["tool_errors"] == 1


def test_turns_are_bounded() -> None:
    environment = make_environment(EXAMPLE, {"max_turns": 2}, TOKENIZER, 0)
    call = calling("calculate", expression="2")
    rollout, _ = play(environment, environment.problem(0), call, call + call)
    assert len(rollout.turns) == 2
    assert rollout.metrics["out_of_turns"] == 1
    assert rollout.metrics["tool_calls"] == 3


# ------------------------------------------------------------------------------------------------ a task of one's own


class Counting(ToolTask):
    """Tools with a state: one for each attempt."""

    def problem(self, index: int) -> Problem:
        return Problem(id=str(index), payload={})

    def prompt(self, problem: Problem) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": "Count to two."}]

    def tools(self, problem: Problem) -> Sequence[Any]:
        count = 0

        def increase(by: int = 1) -> dict[str, int]:
            """Increase the counter.

            Args:
                by: By how much.
            """
            nonlocal count
            count += by
            return {"count": count}

        return [tool_of(increase)]

    def reward(self, problem: Problem, answer: str, messages: Sequence[Any]) -> float:
        return float(sum(message["role"] == "tool" for message in messages))


def test_tools_may_have_a_state_and_several_may_be_called_at_once() -> None:
    for _ in range(2):
        rollout, text = play(Counting(TOKENIZER, 0), SUM, calling("increase") * 2, "Done.")
        assert rollout.reward == 2.0
        assert [f'{{"count":{count}}}' in text for count in (1, 2, 3)] == [True, True, False]


def test_results_that_leave_no_room_end_the_attempt_with_what_there_is() -> None:
    def long() -> str:
        """Say much."""
        return "abcdefgh" * MAX_RESULT

    class Long(Counting):
        def tools(self, problem: Problem) -> Sequence[Any]:
            return [tool_of(long)]

        def reward(self, problem: Problem, answer: str, messages: Sequence[Any]) -> float:
            return float(len(messages[-1]["content"]))

    rollout, _ = play(Long(TOKENIZER, 0), SUM, calling("long"), PromptTooLongError("no room"))
    assert (rollout.metrics["out_of_context"], len(rollout.turns)) == (1, 1)
    assert rollout.reward < MAX_RESULT + 50
    with pytest.raises(PromptTooLongError):
        play(Long(TOKENIZER, 0), SUM, PromptTooLongError("no room"))


# ------------------------------------------------------------------------------------------------ functions in a file

FILE = '''
def look_up(name: str, times: int = 1) -> str:
    """Look up a name.

    Args:
        name: The name.
        times: How often.
    """
    return f"{name} is {len(name)}" * times


def fails(what: str) -> str:
    """Fail.

    Args:
        what: In which way.
    """
    if what == "hang":
        while True:
            pass
    if what == "die":
        import os
        os._exit(3)
    if what == "object":
        return object()
    raise KeyError(what)


def undescribed(x):
    return x


async def waits(x: int) -> int:
    return x


def reward(completion, example):
    return 1.0 if example["answer"] in completion else 0.0
'''


@pytest.fixture
def project(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(FILE)
    lines = [json.dumps({"prompt": f"How long is name {number}?", "answer": "is 3"}) for number in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return {
        "data": str(tmp_path / "data.jsonl"),
        "functions": [f"{tmp_path}/mine.py:look_up", f"{tmp_path}/mine.py:fails"],
        "reward": f"{tmp_path}/mine.py:reward",
        "isolate": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
def test_functions_of_a_file_are_tools_and_what_they_do_wrong_is_shown_to_the_model(
    project: dict[str, Any], isolate: bool
) -> None:
    limits = {"isolate": True, "timeout_s": 1.0} if isolate else {}
    environment = make_environment("tools", {**project, **limits}, TOKENIZER, 0)
    rollout, text = play(environment, environment.problem(0), calling("look_up", name="Ada"), "It is 3 long.")
    assert rollout.reward == 1.0
    assert "Look up a name." in text
    assert "<|im_start|>tool\nAda is 3<|im_end|>" in text
    ended = (
        ("hang", "Error: it took longer than 1 s"),
        ("die", "Error: its process ended with status 3"),
        ("object", "Error: returned a object, which is not JSON"),
        ("x", "Error: mine.py, line 26: KeyError: 'x'"),
    )
    for what, shown in ended if isolate else (("x", "Error: KeyError: 'x'"),):
        rollout, text = play(environment, environment.problem(0), calling("fails", what=what), "It is 3.")
        assert rollout.reward == 1.0
        assert f"<|im_start|>tool\n{shown}" in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["undescribed"], "can't describe the tool undescribed"),
        (["waits"], "is `async def`; it must be a plain function"),
        (["look_up", "look_up"], "two tools called 'look_up'"),
    ],
)
def test_functions_that_cannot_be_described_or_told_apart(project: dict[str, Any], names: list[str], message: str) -> None:
    path = project["functions"][0].partition(":")[0]
    with pytest.raises(EnvironmentSetupError, match=message):
        make_environment("tools", project | {"functions": [f"{path}:{name}" for name in names]}, TOKENIZER, 0)

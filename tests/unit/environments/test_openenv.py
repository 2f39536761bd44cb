"""Environments of OpenEnv in real servers: the echo environment that `openenv init` makes, and the example."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv")

from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.types import Rollout
from tests.integration.runs import until
from tests.unit.chat_parts import SamplingClient, calling, make_tokenizer
from tests.unit.environments.env_client import one_line

pytestmark = pytest.mark.slow  # servers
TOKENIZER = make_tokenizer()
EXAMPLES = Path(__file__).parents[3] / "examples"
SERVER = ["python", "-m", "uvicorn", "--port", "{port}", "--log-level", "warning", "--app-dir"]


def play(environment: Any, seed: int, *texts: str) -> tuple[Rollout, str]:
    """The rollout in which the model says these things, and its whole text."""
    problem = environment.problem(0)
    problem.payload["seed"] = seed
    rollout = asyncio.run(environment.rollout(problem, SamplingClient.saying(TOKENIZER, *texts)))
    turn = rollout.turns[-1]
    return rollout, TOKENIZER.decode([*turn.prompt_ids, *turn.completion.token_ids])


# ---- texts


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a server with one session."""
    folder = tmp_path_factory.mktemp("openenv")
    made = "from openenv.cli.__main__ import main; main()"
    subprocess.run(
        [sys.executable, "-c", made, "init", "mine", "-o", str(folder)], check=True, capture_output=True, text=True
    )
    return [*SERVER, str(folder / "mine"), "server.app:app"]


def test_texts_are_actions_and_observations_are_messages(echo: list[str], tmp_path: Path) -> None:
    args = {"command": echo, "observation": "echoed_message", "action": "message", "sessions": 1, "max_turns": 2}
    environment = make_environment("openenv", args, TOKENIZER, 0)
    rollout, text = play(environment, 3, "abc", "abcdef")
    assert rollout.reward == pytest.approx(0.9)  # 0.1 for each letter
    assert rollout.metrics["steps"] == rollout.metrics["turns"] == 2
    assert (rollout.metrics["done"], rollout.metrics["out_of_turns"], rollout.metrics["new_segments"]) == (0, 1, 0)
    assert "<|im_start|>user\nabc<|im_end|>" in text
    (tmp_path / "mine.py").write_text(
        "def action(text):\n    return {'message': text.upper()}\n\n\n"
        "def shown(observation):\n    return f\"{observation['echoed_message']} ({observation['message_length']})\"\n"
    )
    url = environment._url  # of the same server
    functions = {"observation": f"{tmp_path}/mine.py:shown", "action": f"{tmp_path}/mine.py:action", "reward": "last"}
    rollout, text = play(
        make_environment("openenv", {"url": url, "max_turns": 3, **functions}, TOKENIZER, 0), 3, "a", "b", "cd"
    )
    assert rollout.reward == pytest.approx(0.2)
    assert "user\nA (1)<|im_end|>" in text
    wrong = make_environment("openenv", {"url": url, "action": "text", "observation": "echoed_message"}, TOKENIZER, 0)
    with one_line(RolloutError, match="step of the environment failed: .*message"):
        play(wrong, 3, "a")
    wrong = make_environment("openenv", {"url": url, "action": "message", "observation": "text"}, TOKENIZER, 0)
    with one_line(RolloutError, match="has no field 'text'; it has: .*echoed_message"):
        play(wrong, 3, "a")


def test_attempts_wait_for_a_session(echo: list[str]) -> None:
    args = {"command": echo, "observation": "echoed_message", "action": "message", "sessions": 1, "max_turns": 1}
    environment: Any = make_environment("openenv", args, TOKENIZER, 0)

    async def several() -> list[Rollout]:
        clients = [SamplingClient.saying(TOKENIZER, "a" * number) for number in range(1, 5)]
        return await asyncio.gather(*(environment.rollout(environment.problem(0), client) for client in clients))

    assert [rollout.reward for rollout in asyncio.run(several())] == pytest.approx([0.1, 0.2, 0.3, 0.4])


# ---- tools


def test_calls_of_tools_are_actions() -> None:
    args = {"command": [*SERVER, str(EXAMPLES), "openenv_calculator:app"], "observation": "question", "tools": True}
    environment: Any = make_environment("openenv", {**args, "answer": "answer.text", "max_turns": 4}, TOKENIZER, 0)
    question = asyncio.run(first_question(environment))
    expression = question.removeprefix("What is ").removesuffix("?")
    right = str(eval(expression))  # noqa: S307 - two numbers
    calls = calling("calculate", expression=expression), calling("find", what="it")
    rollout, text = play(environment, 3, *calls, right)
    assert (rollout.reward, rollout.metrics["done"], rollout.metrics["steps"]) == (1.0, 1.0, 3.0)
    assert rollout.metrics["out_of_turns"] == rollout.metrics["new_segments"] == 0
    assert question in text
    assert f"<|im_start|>tool\n{right}<|im_end|>" in text
    assert "<|im_start|>tool\nError: " in text
    assert "calculate" in text
    assert '"answer"' not in text.partition(question)[0]  # hidden
    assert play(environment, 3, "no number")[0].reward == 0.0
    served = {"url": environment._url, "observation": "question", "tools": True}
    plain = make_environment("openenv", served, TOKENIZER, 0)
    rollout, _ = play(plain, 3, calling("answer", text=right), "not asked for")  # it has ended
    assert (rollout.reward, rollout.metrics["turns"]) == (1.0, 1.0)
    wrong = make_environment(
        "openenv", {**args, "url": environment._url, "command": None, "answer": "submit.x"}, TOKENIZER, 0
    )
    with one_line(RolloutError, "has no tool submit; it has: calculate, answer"):
        play(wrong, 3, "a")


async def first_question(environment: Any) -> str:
    async with environment._session() as act:
        question: str = (await act("reset", seed=3)).observation["question"]
        assert (await act("reset", seed=3)).observation["question"] == question
        assert (await act("reset", seed=4)).observation["question"] != question
    return question


# ---- mistakes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"action": "a"}, "give either `url` or `command`"),
        ({"url": "http://127.0.0.1:1"}, "give either `action` or `tools: true`"),
        ({"url": "http://127.0.0.1:1", "action": "a", "answer": "b.c"}, "answer has no effect"),
        ({"command": ["python", "-c", "pass"], "action": "a"}, "has no {port}"),
        ({"command": ["/no/program", "{port}"], "action": "a"}, "can't be run: .*No such file"),
        ({"command": ["python", "-c", "exit(3)", "{port}"], "action": "a"}, "ended with status 3"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], message: str) -> None:
    with one_line(EnvironmentSetupError, match=message):
        make_environment("openenv", args, TOKENIZER, 0)


def test_a_server_that_is_not_there_costs_the_rollout_and_one_of_ours_ends_with_the_environment(echo: list[str]) -> None:
    environment: Any = make_environment("openenv", {"command": echo, "action": "message"}, TOKENIZER, 0)
    url = environment._url
    elsewhere = make_environment("openenv", {"url": url, "action": "message", "timeout_s": 5.0}, TOKENIZER, 0)
    del environment
    gc.collect()

    def refused() -> bool:
        with pytest.raises((RolloutError, TimeoutError), match="connect of the environment"):
            play(elsewhere, 3, "a")
        return True

    until(refused)

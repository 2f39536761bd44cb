"""A task from a file of examples and a function: what it asks, what it holds out, and what a user can get wrong."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipelinerl.actor.failures import Failure
from pipelinerl.actor.rollouts import guarded, score
from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Rollout
from tests.unit.environments.env_client import TOKENIZER, one_line, saying
from tests.unit.environments.test_environments import ChatTokenizer

TIMEOUT_S = 30.0

REWARDS = """
import os, time

def reward(completion, example):
    if completion == "raise":
        raise ValueError("no such answer")
    if completion == "nan":
        return float("nan")
    if completion == "die":
        os._exit(1)
    if completion == "loop":
        time.sleep(60)
    return float(completion == example["answer"])

def ask(example):
    return f"Q: {example['question']} A:"

def asked(example):
    return [{"role": "user", "content": example["question"]}]

def chat(example):
    return [{"role": "system", "content": "be brief"}, *asked(example)]

def answered(example):
    return [*asked(example), {"role": "assistant", "content": example["answer"]}]
"""


@pytest.fixture
def task(tmp_path):
    """Makes the environment of these `environment.args`, with a file of examples and one of functions; in this process."""

    def make(tokenizer=TOKENIZER, *, seed=0, lines=None, rewards=REWARDS, **args):
        rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(20)] if lines is None else lines
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "data.jsonl").write_text(text)
        (tmp_path / "rewards.py").write_text(rewards)
        files = {"data": str(tmp_path / "data.jsonl"), "reward": f"{tmp_path}/rewards.py:reward"}
        functions = {key: f"{tmp_path}/{value}" for key, value in args.items() if str(value).startswith("rewards.py:")}
        arguments = {"prompt": "question", "isolate": False, **files, **args, **functions}
        return make_environment("function", arguments, tokenizer, seed)

    return make


def play(environment, problem, answers, tokenizer=TOKENIZER):
    """The outcome of an attempt for each answer, and the last prompt."""
    client = saying(*answers, tokenizer=tokenizer)

    async def main():
        return [await guarded(lambda: environment.rollout(problem, client), TIMEOUT_S, "the rollout") for _ in answers]

    outcomes = asyncio.run(main())
    return outcomes, TOKENIZER.decode(client.prompts[-1]) if client.prompts else ""


@pytest.mark.parametrize("isolate", [False, True])
def test_an_answer_is_worth_what_the_function_says(task, isolate):
    environment = task(isolate=isolate, **({"workers": 1} if isolate else {}))
    problem = environment.problem(0)
    answers = [problem.payload["answer"], "nonsense", "raise", "nan"]
    (right, wrong, *failed), prompt = play(environment, problem, answers)
    assert prompt == problem.payload["question"]
    assert isinstance(right, Rollout)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert [(failure.reason, failure.message) for failure in failed] == [
        ("raised", "RuntimeError: reward: rewards.py, line 6: ValueError: no such answer"),
        ("bad_rollout", "the result of reward is nan, not a finite number"),
    ]


def test_a_call_that_is_ended_costs_one_rollout_or_is_worth_what_the_user_says(task):
    environment = task(isolate=True, workers=1, timeout_s=0.5)
    problem = environment.problem(0)
    (died, late, right), _ = play(environment, problem, ["die", "loop", problem.payload["answer"]])
    message = "ChildProcessError: reward (rewards.py:reward): its process ended with status 1"
    assert died == Failure("raised", message, died.traceback, died.turns)
    message = "reward (rewards.py:reward): it took longer than 0.5 s, in line 12; its process was ended"
    assert late == Failure("timeout", message, late.traceback, late.turns)
    assert right.reward == 1.0

    environment = task(isolate=True, workers=1, ended_reward=-0.5)
    (died, raised, right), _ = play(environment, problem, ["die", "raise", problem.payload["answer"]])
    assert (died.reward, died.metrics) == (-0.5, {"reward_ended": 1.0})
    assert raised.reason == "raised"  # a mistake in the function is no property of the answer
    assert (right.reward, right.metrics) == (1.0, {"reward_ended": 0.0})


@pytest.mark.parametrize(
    ("args", "prompt"),
    [
        ({}, "S<u:3 + 3?\0\n<a:"),
        ({"chat": False}, "3 + 3?"),
        ({"prompt": "rewards.py:ask"}, "S<u:Q: 3 + 3? A:\0\n<a:"),
        ({"prompt": "rewards.py:chat"}, "S<s:be brief\0\n<u:3 + 3?\0\n<a:"),
        ({"prompt": "rewards.py:asked", "system": "think"}, "S<s:think\0\n<u:3 + 3?\0\n<a:"),
    ],
)
def test_prompts(task, args, prompt):
    environment = task(ChatTokenizer(), **args)
    problem = next(found for found in map(environment.problem, range(20)) if found.payload["question"] == "3 + 3?")
    _, asked = play(environment, problem, ["6"], ChatTokenizer())
    assert asked == prompt
    for made in ("answered", "chat"):  # what a function makes is checked
        environment = task(ChatTokenizer(), prompt=f"rewards.py:{made}", system="x")
        (failed,), _ = play(environment, environment.problem(0), ["1"], ChatTokenizer())
        assert (failed.reason, failed.message.startswith("prompt returned chat messages ")) == ("bad_rollout", True)


def test_what_is_held_out_does_not_depend_on_the_order_and_repeats_stay_together(task, tmp_path):
    def questions(environment):
        return {problem.payload["question"] for problem in environment.held_out(100)}

    rows = [{"question": f"q{n // 3}", "answer": str(n)} for n in range(30)]
    environment = task(lines=rows)
    assert (len(questions(environment)), len(environment.held_out(100))) == (1, 3)
    assert questions(task(lines=rows[::-1])) == questions(environment)
    (tmp_path / "eval.jsonl").write_text('{"question": "3 + 3?", "answer": "6"}\n{"question": "new", "answer": "0"}\n')
    environment = task(held_out=str(tmp_path / "eval.jsonl"))
    assert questions(environment) == {"3 + 3?", "new"}
    trained = {environment.problem(index).payload["question"] for index in range(19)}
    assert (len(trained), "3 + 3?" in trained) == (19, False)
    with pytest.raises(EnvironmentSetupError, match="all of its 1 problems are held out"):
        task(lines=[GOOD], held_out=str(tmp_path / "data.jsonl"))
    assert task(lines=[GOOD]).held_out(9) == []  # of a share something is left


GOOD = {"question": "1?", "answer": "1"}


USER, SYSTEM, ANSWER = ({"role": role, "content": "text"} for role in ("user", "system", "assistant"))
CHAT = ChatTokenizer()
MISTAKES = {
    "empty": ({"lines": ["", ""]}, "data.jsonl has no problems: it is empty"),
    "no object": ({"lines": [GOOD, "[1]"]}, "data.jsonl:2 is not a JSON object, but a list: write one object a line"),
    "no field": ({"lines": [GOOD, {"q": "2?"}]}, "data.jsonl:2 has no field `question` for the prompt (it has: q)"),
    "empty prompt": ({"lines": [{"question": ""}]}, "data.jsonl:1 has an empty text as its `question`"),
    "prompt is a number": ({"lines": [{"question": 2}]}, "data.jsonl:1 has a int that is neither a text nor chat messages"),
    "odd messages": ({"lines": [{"question": [{"role": "user"}]}]}, "are not objects of `role` and `content`"),
    "messages without a template": ({"lines": [{"question": [USER]}]}, "the model's tokenizer has no chat template"),
    "system without a template": ({"system": "think"}, "environment.args.system has no effect: there is no chat"),
    "workers without processes": ({"workers": 3}, "workers has no effect: no function is called in a process"),
    "limits without processes": ({"timeout_s": 3}, "timeout_s has no effect: calls in this process have no limits"),
    "calls that never wait": ({"concurrency": 8}, "concurrency has no effect: no function is `async def`"),
    "processes of functions that wait": (
        {"isolate": True, "memory_mb": 64, "rewards": "async def reward(text, example): return 0.0"},
        "memory_mb has no effect: no function is called in a process",
    ),
    "reward not callable": ({"rewards": "reward = 1.0"}, "is a float, not a function"),
    "reward is no name": ({"reward": "rewards.py"}, "does not name a function; write"),
    "two of one name": ({"reward": {"a.py:right": 1.0, "./b.py:right": 1.0}}, "two functions have the same name"),
    "answer in the prompt": (
        {"tokenizer": CHAT, "lines": [{"question": [USER]}, {"question": [USER, {**ANSWER, "role": "model"}]}]},
        "data.jsonl:2 has chat messages that end with the model's (the answer is in the prompt",
    ),
    "two system messages": (
        {"tokenizer": CHAT, "lines": [{"question": [SYSTEM, USER]}], "system": "x"},
        "data.jsonl:1 has chat messages with a ",
    ),
    "messages, no chat": (
        {"tokenizer": CHAT, "chat": False, "lines": [{"question": [USER]}]},
        "chat messages, but environment.args.chat is",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(task, name):
    args, message = MISTAKES[name]
    with one_line(EnvironmentSetupError, message):
        task(**args)


SEVERAL = """
import asyncio

running = most = 0

def right(completion, example):
    return {"reward": completion == example["answer"], "digits": len(completion)}

def brief(completion, example):
    return -len(completion)

async def judge(completion, example):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(60 if completion == "never" else 0.01)
    running -= 1
    if completion == "raise":
        raise ValueError("no verdict")
    return most

def best(completions, example):
    return [float(text == max(completions)) for text in completions]

def too_few(completions, example):
    return [0.0] * (len(completions) - 1)
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_several_functions_are_added_with_their_weights_and_each_is_a_metric(task, tmp_path, isolate):
    weights = {f"{tmp_path}/rewards.py:{name}": weight for name, weight in (("right", 2.0), ("brief", 0.25), ("judge", 0.5))}
    environment = task(rewards=SEVERAL, reward=weights, isolate=isolate)
    problem = environment.problem(0)
    answer = problem.payload["answer"]
    (right, wrong), _ = play(environment, problem, [answer, "nonsense"])
    assert right.metrics == {"right": 1.0, "brief": -len(answer), "judge": 1.0, "digits": len(answer)}
    assert right.reward == pytest.approx(2.0 - 0.25 * len(answer) + 0.5)
    assert wrong.reward == pytest.approx(-0.25 * 8 + 0.5)


def test_async_functions_wait_together_with_limits_on_number_and_time_and_their_errors_name_the_line(task, tmp_path):
    environment = task(rewards=SEVERAL, reward=f"{tmp_path}/rewards.py:judge", concurrency=3, timeout_s=0.3, isolate=True)

    async def main():
        return await asyncio.gather(*(environment._functions.call("reward", "text", {}) for _ in range(8)))

    assert max(asyncio.run(main())) == 3
    (late, raised), _ = play(environment, environment.problem(0), ["never", "raise"])
    assert (late.reason, late.message) == ("timeout", "reward (rewards.py:judge): it took longer than 0.3 s")
    assert raised.message == "RuntimeError: reward: rewards.py, line 19: ValueError: no verdict"


@pytest.mark.parametrize("isolate", [False, True])
def test_a_function_adds_to_the_rewards_of_a_group(task, tmp_path, isolate):
    files = {"rewards": SEVERAL, "reward": f"{tmp_path}/rewards.py:brief", "isolate": isolate}
    environment = task(**files, group_reward="rewards.py:best")
    problem = environment.problem(0)
    rollouts, _ = play(environment, problem, ["2", "9", "10"])
    scored = asyncio.run(score(environment, problem, rollouts, TIMEOUT_S))
    assert [rollout.reward for rollout in scored] == [-1.0, 0.0, -2.0]
    assert [rollout.metrics["group_reward"] for rollout in scored] == [0.0, 1.0, 0.0]
    assert [rollout.turns for rollout in scored] == [rollout.turns for rollout in rollouts]

    environment = task(**files, group_reward="rewards.py:too_few")
    failed = asyncio.run(score(environment, problem, rollouts, TIMEOUT_S))
    assert (failed.reason, failed.message) == ("bad_rollout", "group_reward returned [0.0, 0.0], not a list of 3 numbers")

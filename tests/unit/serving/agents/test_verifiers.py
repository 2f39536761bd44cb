"""Environments of the real package `verifiers`, played over HTTP: what the model is given, what becomes of its answers."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments import make_environment
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.preprocess.advantages import group_advantages
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Group, Rollout
from tests.unit.chat_parts import SamplingClient, calling, make_tokenizer
from tests.unit.environments.env_client import one_line

pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.slow  # for what verifiers imports
TOKENIZER = make_tokenizer()
HEAD = '''
import json, os, sys, time
import httpx
import verifiers.v1 as vf

class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(2 * self.data.idx))

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)

class Config(vf.TasksetConfig):
    first: int = 0

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        numbers = range(self.config.first, self.config.first + 20)
        return [Sum(vf.TaskData(prompt=f"What is {n} + {n}?", system_prompt="Be brief."), self.config.task) for n in numbers]

class Program(vf.Harness[vf.HarnessConfig]):
    """Runs `agent.py`, which stands beside this file, as a process of the runtime."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        script = os.path.join(os.path.dirname(__file__), "agent.py")
        return await runtime.run_program([sys.executable, script, endpoint, secret, data.system_prompt, data.prompt], {})

__all__ = ["Sums", "Program"]
'''
AGENT = """
import json, sys, urllib.request
endpoint, secret, system, prompt = sys.argv[1:]

def ask(messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
"""
ONCE = "ask(messages)\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WITH_TOOLS = f"""
message = ask(messages, tools=[{ADD!r}])
while calls := message.get("tool_calls"):
    messages.append(message)
    for call in calls:
        given = json.loads(call["function"]["arguments"])
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": str(sum(given.values()))}})
    message = ask(messages, tools=[{ADD!r}])
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Makes the environment of files with this code. Modules have names of their own: verifiers knows them by these."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    numbers = count()

    def make(
        code: str = "", agent: str = ONCE, env: dict[str, Any] | None = None, tokenizer: Any = TOKENIZER, **args: Any
    ) -> Any:
        folder = tmp_path / f"folder{next(numbers)}"
        folder.mkdir()
        path = folder / f"sums_{tmp_path.name.lower()}_{folder.name}.py".replace("-", "_")
        path.write_text(HEAD + textwrap.dedent(code))
        (folder / "agent.py").write_text(AGENT + agent)
        env = {**(env or {}), "taskset": {"id": str(path), **(env or {}).get("taskset", {})}}
        environment: Any = make_environment("verifiers", {"env": env, **args}, tokenizer, 0)
        environment.folder = folder
        return environment

    return make


def play(environment: Any, *texts: str, tokenizer: Any = TOKENIZER) -> tuple[Rollout, list[str]]:
    """A rollout in which the model says these things, and the prompts that it was given."""
    client = SamplingClient.saying(tokenizer, *texts)
    rollout = asyncio.run(environment.rollout(environment.problem(0), client))
    return rollout, [tokenizer.decode(ids) for ids in client.prompts]


def right_answer(environment: Any) -> str:
    return str(2 * environment.problem(0).payload["idx"])


def gone(process: int) -> bool:
    """Whether the process ends within some seconds."""
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------------------ episodes


def test_a_turn_of_a_process_is_exact_and_its_rewards_and_metrics_are_those_of_the_trace(load: Any) -> None:
    environment = load()
    answer = right_answer(environment)
    rollout, prompts = play(environment, answer)
    number = environment.problem(0).payload["idx"]
    asked = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is {number} + {number}?<|im_end|>\n"
    assert prompts == [asked + "<|im_start|>assistant\n"]
    (turn,) = rollout.turns
    assert (turn.text, TOKENIZER.decode(turn.prompt_ids)) == (answer, prompts[0])
    assert rollout.reward == 2.0
    expected = {"right": 1.0, "length": float(len(answer)), "timed_out": 0.0, "turns": 1.0, "cancelled_turns": 0.0}
    assert rollout.metrics.items() >= expected.items()
    assert play(environment, "wrong")[0].reward == 0.0


def test_turns_with_tools_continue_the_sampled_ids(load: Any) -> None:
    environment = load(agent=WITH_TOOLS)
    first = 'So: <tool_call>\n{"name": "add",  "arguments": {"a": 1}}</tool_call>'
    rollout, prompts = play(environment, first, calling("add", a=2), right_answer(environment))
    assert rollout.reward == 2.0
    assert [len(segment.sampled) for segment in join_turns(rollout.turns).segments] == [3]
    assert prompts[2].startswith(prompts[0] + first)
    assert rollout.metrics["turns"] == 3
    assert rollout.metrics["new_segments"] == 0


def test_tasks_are_payloads_and_some_are_held_out(load: Any) -> None:
    environment = load(held_out=0.2)
    training = [environment.problem(index).payload for index in range(16)]
    held_out = [problem.payload for problem in environment.held_out(20)]
    assert sorted(payload["idx"] for payload in training + held_out) == list(range(20))
    assert (environment.training_count, len(held_out)) == (16, 4)
    assert training[0].keys() == {"idx", "prompt", "system_prompt"}
    other = load(held_out={"first": 15}, tasks=18)
    assert other.training_count == 15  # those that are held out, too, are not trained on
    assert other.held_out(1)[0].payload["prompt"].startswith("What is")
    assert len(other.held_out(99)) == 18


SERVED = """
class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        "Add."
        return str(a + b)

class WithTool(Sum):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

class Served(vf.Taskset[WithTool, Config]):
    def load(self):
        return [WithTool(vf.TaskData(prompt=str(n), system_prompt="!")) for n in range(3)]

class Calling(Program):
    SUPPORTS_MCP = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        call = {"name": "add", "arguments": {"a": data.idx, "b": data.idx}}
        async with httpx.AsyncClient(headers={"Accept": "application/json, text/event-stream"}) as client:
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            answer = await client.post(next(iter(mcp_urls.values())), json=asked)
        data = data.model_copy(update={"prompt": answer.json()["result"]["content"][0]["text"]})
        return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data)

__all__ = ["Served", "Calling"]
if __name__ == "__main__":
    Adder.run()
"""


def test_a_server_of_tools_is_a_process_that_imports_the_file(load: Any) -> None:
    environment = load(SERVED)
    rollout, prompts = play(environment, "yes")
    assert f"<|im_start|>user\n{right_answer(environment)}<|im_end|>" in prompts[0]
    assert len(rollout.turns) == 1


def test_calls_that_continue_two_chats_at_once(load: Any) -> None:
    agent = """
from concurrent.futures import ThreadPoolExecutor

def chat(word):
    mine = [{"role": "user", "content": word}]
    for _ in range(2):
        mine += [ask(mine), {"role": "user", "content": "Go on."}]

with ThreadPoolExecutor(2) as pool:
    list(pool.map(chat, ["one", "two"]))
"""
    environment = load(agent=agent)
    client = SamplingClient(TOKENIZER, lambda ids: TOKENIZER.encode(f"saw {len(ids)}<|im_end|>"))
    rollout = asyncio.run(environment.rollout(environment.problem(0), client))
    segments = join_turns(rollout.turns).segments
    assert [len(segment.sampled) for segment in segments] == [2, 2]
    assert rollout.metrics["new_segments"] == 1


ATTEMPTS = """
class Failing(Program):
    attempts = 0

    async def launch(self, *args):
        result = await super().launch(*args)
        Failing.attempts += 1
        if Failing.attempts == 1:
            raise vf.HarnessError("the first attempt fails")
        return result

__all__ = ["Sums", "Failing"]
"""


@pytest.mark.parametrize("env", [{"agent": {"retries": {"max_retries": 1}}}, {"retries": {"max_retries": 1}}])
def test_only_the_turns_of_the_last_attempt_count(load: Any, env: dict[str, Any]) -> None:
    environment = load(ATTEMPTS, env=env)
    rollout, prompts = play(environment, "at first", right_answer(environment))
    assert len(prompts) == 2
    assert [turn.text for turn in rollout.turns] == [right_answer(environment)]
    assert rollout.reward == 2.0


def test_attempts_of_one_episode_are_credited_with_their_own_rewards(load: Any) -> None:
    environment = load(env={"id": "best-of-n", "n": 3})
    right = right_answer(environment)
    rollouts = [play(environment, *said)[0] for said in ([right, "no", right], ["no", "no", "no"])]
    assert [turn.text for turn in rollouts[0].turns] == [right, "no", right]
    assert rollouts[0].metrics["best"] == pytest.approx(2 / 3)  # what the environment says of the attempts together
    assert rollouts[0].metrics["pass_at_n"] == 1.0
    assert [rollout.reward for rollout in rollouts] == [2.0, 0.0]
    group = Group(index=0, problem=environment.problem(0), rollouts=tuple(rollouts), started=2)
    found = group_advantages(group, baseline="leave_one_out")[0]
    tokens = [len(turn.completion.token_ids) for turn in rollouts[0].turns]
    assert found == (*[2.0] * tokens[0], *[0.0] * tokens[1], *[2.0] * tokens[2])


PAIR = """
class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()

class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.critic.run(task)

    async def finalize(self, task, episode):
        solver, critic = episode.traces
        solver.record_reward("agreed", float(solver.last_reply == critic.last_reply))

__all__ = ["Sums", "Program", "Pair"]
"""


def test_only_agents_that_are_trained_are_trained_on(load: Any) -> None:
    rollout, prompts = play(load(PAIR), "the same", "the same")
    assert len(prompts) == 2
    assert [turn.text for turn in rollout.turns] == ["the same"]
    assert rollout.reward == 1.0
    assert (rollout.metrics["solver/agreed"], rollout.metrics["critic/reward"]) == (1.0, 0.0)


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("code", "agent", "env", "why"),
    [
        (
            "class Sum2(Sum):\n    @vf.reward\n    async def right(self, trace): return 1 / 0",
            ONCE,
            {},
            "TaskError.*division by zero",
        ),
        ("", "ask(messages); sys.exit('broken')", {}, "HarnessError.*exited 1: broken"),
        ("", "ask(messages); import time; time.sleep(60)", {"timeout": {"episode": 3}}, "TimeoutError.*3s deadline"),
        ("", "ask(messages, temperature=0.5)", {}, "temperature 0.5: this rollout is sampled with 1"),
        ("", "print('asks nothing')", {}, "no agent that is trained called the model"),
    ],
)
def test_a_failed_episode_costs_its_rollout_with_one_line(
    load: Any, code: str, agent: str, env: dict[str, Any], why: str
) -> None:
    if code:
        code += "\nclass Sums2(vf.Taskset[Sum2, Config]):\n"
        code += "    def load(self): return [Sum2(vf.TaskData(prompt='?', system_prompt='!'))] * 3\n"
        code += "__all__ = ['Sums2', 'Program']"
    with one_line(RolloutError, match=f"(?s){why}"):
        play(load(code, agent=agent, env=env), "yes")


def test_a_time_limit_of_the_agent_ends_its_process_and_the_rollout_is_scored(load: Any) -> None:
    agent = "open(__file__ + '.pid', 'w').write(str(__import__('os').getpid())); ask(messages); __import__('time').sleep(60)"
    environment = load(agent=agent, env={"agent": {"timeout": {"rollout": 4}}})
    rollout, _ = play(environment, right_answer(environment))
    assert (rollout.reward, rollout.metrics["timed_out"]) == (2.0, 1.0)
    assert gone(int((environment.folder / "agent.py.pid").read_text()))


class Waiting(SamplingClient):
    """Its completions take for ever."""

    cancelled = 0

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def test_cancelling_a_rollout_ends_its_processes_and_its_calls(load: Any) -> None:
    agent = """
import os, subprocess
child = subprocess.Popen(["sleep", "60"])
open(__file__ + '.pid', 'w').write(f"{os.getpid()} {child.pid}")
ask(messages)
"""
    environment = load(agent=agent)
    client = Waiting.saying(TOKENIZER)

    async def cancel_it() -> None:
        task = asyncio.create_task(environment.rollout(environment.problem(0), client))
        found = environment.folder / "agent.py.pid"
        while not (found.exists() and found.read_text() and environment._sessions):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the call arrives
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)

    asyncio.run(cancel_it())
    assert all(map(gone, map(int, (environment.folder / "agent.py.pid").read_text().split())))
    assert client.cancelled == 1
    assert play(environment, "still there")[0].turns  # other episodes go on


def test_a_call_that_the_program_gave_up_is_no_turn(load: Any) -> None:
    agent = """
import socket
from urllib.parse import urlsplit

where = urlsplit(endpoint)
body = json.dumps({"model": "any", "messages": messages}).encode()
head = f"POST {where.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {secret}\\r\\n"
head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
connection = socket.create_connection((where.hostname, where.port))
connection.sendall(head.encode() + body)
__import__("time").sleep(1)
connection.close()
"""
    environment = load(agent=agent, env={"agent": {"timeout": {"rollout": 20}}})
    client = Waiting.saying(TOKENIZER)
    with pytest.raises(RolloutError, match="no agent that is trained called the model"):
        asyncio.run(environment.rollout(environment.problem(0), client))
    assert client.cancelled == 1
    assert client.completions == []


# ------------------------------------------------------------------------------------------------------ token ids


def test_a_renderer_of_verifiers_asks_by_token_ids_and_its_turns_continue_them(load: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with one_line(EnvironmentSetupError, match="environment.args.renderer: .*<tool_call>"):
        load(renderer={"name": "qwen3"}, tokenizer=tokenizer)
    marks = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer.name_or_path = str(tmp_path / "tokenizer")
    agent = "messages += [ask(messages), {'role': 'user', 'content': 'Sure?'}]\nask(messages)\n"
    environment = load(agent=agent, renderer={"name": "qwen3"}, tokenizer=tokenizer)
    right = right_answer(environment)
    rollout, prompts = play(environment, "hm", right, tokenizer=tokenizer)
    assert rollout.reward == 2.0
    assert [len(segment.sampled) for segment in join_turns(rollout.turns).segments] == [2]
    assert prompts[1].startswith(prompts[0] + "hm<|im_end|>")


# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("env", "args", "what"),
    [
        ({"taskset": {"id": "no-such-taskset"}}, {}, "no.such.taskset"),
        ({"taskset": {"id": "nowhere.py"}}, {}, "there is no file .*nowhere.py"),
        ({"taskset": {"frist": 3}}, {}, "environment.args.env: .*frist"),
        ({"agent": {"harness": {"id": None}}}, {}, 'written "null"'),
        ({"agent": {"harness": {"id": "codex"}}}, {}, "needs a container"),
        ({"agent": {"sampling": {"temperature": 0.2}}}, {}, "agent.sampling.temperature: the run file"),
        ({"id": "no-such-env"}, {}, "no.such.env"),
        ({}, {"renderer": {"name": "qwen17"}}, "environment.args.renderer: .*qwen17"),
        ({}, {"held_out": {"frist": 3}}, "frist"),
        ({}, {"tasks": 0}, "environment.args.tasks"),
    ],
)
def test_wrong_settings_are_one_line(load: Any, env: dict[str, Any], args: dict[str, Any], what: str) -> None:
    with one_line(EnvironmentSetupError, match=f"(?is){what}"):
        load(env=env, **args)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("class Sums(Sums):\n    INFINITE = True", "has no end: set environment.args.tasks"),
        ("class Sums(Sums):\n    def load(self): return []", "has no tasks"),
        ("class Sums(Sums):\n    def load(self): return 1 / 0", "sums_.*line .*ZeroDivisionError"),
        (
            "class Free(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]): pass\nclass Sums(vf.Taskset[Free, Config]):\n"
            "    def load(self): return [Free(vf.TaskData(prompt='?'))]",
            "gives a reward",
        ),
        (
            "from pydantic import Field\nclass Secret(vf.TaskData):\n    secret: int = Field(0, exclude=True)\n"
            "class Kept(Sum):\n    pass\nclass Sums(vf.Taskset[Kept, Config]):\n"
            "    def load(self): return [Kept(Secret(prompt='?', secret=1))]",
            "left out of it",
        ),
        ("import nonsense_that_is_missing", "nonsense_that_is_missing"),
    ],
)
def test_a_taskset_that_cannot_be_trained_on_is_one_line(load: Any, code: str, what: str) -> None:
    with one_line(EnvironmentSetupError, match=f"(?s){what}"):
        load(code)

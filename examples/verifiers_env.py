"""A taskset and a harness for the package `verifiers`, as they would be published: sums, with a calculator as a tool.

pip install -e '.[verifiers]'
pipelinerl train examples/verifiers_env.yaml
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

CALCULATE = {
    "name": "calculate",
    "description": "Work out an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return sum(message.role == "tool" for message in trace.branches[-1].messages)


class SumsConfig(vf.TasksetConfig):
    problems: int = 2000
    largest: int = 99


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        rng = random.Random(0)  # every process of a run must load the same tasks
        for _ in range(self.config.problems):
            a, b = (rng.randint(2, self.config.largest) for _ in range(2))
            yield Sum(SumData(prompt=f"What is {a} + {b}?", answer=a + b), self.config.task)


class Calculator(vf.Harness[vf.HarnessConfig]):
    """A chat with a tool. It runs in verifiers' own process; most harnesses start a program here."""

    EXECUTES_CODE = NEEDS_CONTAINER = False
    client: httpx.AsyncClient | None = None  # shared by all episodes: making one is slow

    async def launch(self, *given: Any) -> vf.ProgramResult:
        _, _, _, endpoint, secret, _, data = given
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        while True:
            message = await self.ask(endpoint, secret, messages)
            if not message.get("tool_calls"):
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            messages.append(message)
            for call in message["tool_calls"]:
                result = add(json.loads(call["function"]["arguments"]).get("expression", ""))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def ask(self, endpoint: str, secret: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.client = self.client or httpx.AsyncClient(timeout=None)  # noqa: S113 - the run limits the time
        answer = await self.client.post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": "any", "messages": messages, "tools": [{"type": "function", "function": CALCULATE}]},
        )
        if answer.status_code == httpx.codes.BAD_REQUEST:  # a limit of the episode, such as `max_turns`
            return {"role": "assistant", "content": ""}
        message: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
        return message


def add(expression: str) -> str:
    try:
        return str(sum(map(int, str(expression).split("+"))))
    except ValueError:
        return "not a sum"


__all__ = ["Calculator", "Sums"]

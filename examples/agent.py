"""An agent without any training code: it only uses an OpenAI-compatible API at a given base URL.

pipelinerl train examples/agent.yaml
"""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI

CLIENT = OpenAI(base_url="http://unused", api_key="unused")
"""Shared by all attempts, because creating a client is slow. Each attempt sets its own base URL."""
ASYNC_CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")


def solve(problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Ask for the greatest common divisor. If the answer is no common divisor, ask once more, for half the reward."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    a, b = problem["a"], problem["b"]
    attempts, divisor = 0, 0
    while attempts < 2 and (divisor == 0 or a % divisor or b % divisor):
        attempts += 1
        answer = client.completions.create(model="policy", prompt=f"{a:02d},{b:02d}:")
        divisor = read(answer.choices[0].text)
    return {"reward": (divisor == problem["answer"]) / attempts, "attempts": attempts}


async def best_of_three(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask three times at once: the share of right answers. `run: examples/agent.py:best_of_three` trains it."""
    client = ASYNC_CLIENT.with_options(base_url=base_url, api_key=api_key)
    prompt = f"{problem['a']:02d},{problem['b']:02d}:"
    answers = await asyncio.gather(*(client.completions.create(model="policy", prompt=prompt) for _ in range(3)))
    return sum(read(answer.choices[0].text) == problem["answer"] for answer in answers) / 3


def read(text: str) -> int:
    """The number after the last `>` of an answer; 0 if there is none."""
    number = text.rpartition(">")[2]
    return int(number) if number.isdecimal() else 0

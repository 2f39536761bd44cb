"""An agent that knows nothing of training: it speaks to an OpenAI-compatible API, wherever that is.

pipelinerl train examples/agent.yaml
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

CLIENT = OpenAI(base_url="http://unused", api_key="unused")
"""One for all attempts, for it takes long to make; each has it speak to its own address."""


def solve(problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Ask for the greatest common divisor; if the answer can't be right, ask once more, for half the reward."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    a, b = problem["a"], problem["b"]
    attempts, divisor = 0, 0
    while attempts < 2 and (divisor == 0 or a % divisor or b % divisor):
        attempts += 1
        answer = client.completions.create(model="policy", prompt=f"{a:02d},{b:02d}:")
        divisor = read(answer.choices[0].text)
    return {"reward": (divisor == problem["answer"]) / attempts, "attempts": attempts}


def read(text: str) -> int:
    """The number after the `>` that ends an answer; 0 if there is none."""
    number = text.rpartition(">")[2]
    return int(number) if number.isdecimal() else 0

"""An agent without any training code: it only uses an OpenAI-compatible API at a given base URL."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

CLIENT = OpenAI(base_url="http://unused", api_key="unused")
"""Shared by all attempts, because creating a client is slow. Each attempt sets its own base URL."""


def solve(problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """One attempt at a line of problems.jsonl. Returns its reward; other numbers become curves.

    It may ask the model any number of times, and everything that the model answers is trained on. Here it asks once more if
    the answer is no common divisor, for half the reward.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    a, b = problem["a"], problem["b"]
    attempts, divisor = 0, 0
    while attempts < 2 and (divisor == 0 or a % divisor or b % divisor):
        attempts += 1
        # With a model that has a chat template, use client.chat.completions, with or without tools.
        answer = client.completions.create(model="policy", prompt=f"{a:02d},{b:02d}:")
        divisor = number_in(answer.choices[0].text)
    return {"reward": (divisor == problem["answer"]) / attempts, "attempts": attempts}


def number_in(text: str) -> int:
    """The number after the last `>` of an answer; 0 if there is none."""
    number = text.rpartition(">")[2]
    return int(number) if number.isdecimal() else 0

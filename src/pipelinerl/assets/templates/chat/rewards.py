"""What an answer is worth, and how a line of the data set becomes a prompt."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def prompt(example: dict[str, Any]) -> list[dict[str, str]]:
    """Chat messages, or a text for a model without a chat template."""
    task = "Solve the problem in at most three short sentences. Then write the answer as a number after ####."
    return [{"role": "system", "content": task}, {"role": "user", "content": example["question"]}]


def reward(completion: str, example: dict[str, Any]) -> dict[str, float]:
    """1 for the right number after the last ####, and a little for the form. Every number here becomes a curve."""
    _, mark, after = completion.rpartition("####")
    form = 1.0 if mark and NUMBER.fullmatch(after.strip()) else 0.0
    right = 1.0 if form and number(after) == number(example["answer"].rpartition("####")[2]) else 0.0
    return {"reward": right + 0.1 * form, "right": right, "form": form}


def number(text: str) -> float:
    return float(text.strip().replace(",", ""))

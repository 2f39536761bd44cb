"""A tool that the model may call, and what its answer is worth."""

from __future__ import annotations

from typing import Any


def calculate(expression: str) -> int:
    """Work out an expression.

    The model is shown this docstring and the type hints (through its chat template), then the result, or the error.

    Args:
        expression: Two whole numbers with +, - or * between them, such as 12 + 34.
    """
    match expression.split():
        case [left, "+", right]:
            return int(left) + int(right)
        case [left, "-", right]:
            return int(left) - int(right)
        case [left, "*", right]:
            return int(left) * int(right)
    raise ValueError("write two whole numbers with +, - or * between them, such as 12 + 34")


def reward(completion: str, example: dict[str, Any]) -> float:
    """Any finite number for the model's last turn; more is better. `example` is the line of problems.jsonl."""
    return 1.0 if completion.strip() == example["answer"] else 0.0

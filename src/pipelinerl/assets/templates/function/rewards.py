"""What an answer is worth. Change this to your own task; nothing else has to be Python."""

from __future__ import annotations

from typing import Any


def reward(completion: str, example: dict[str, Any]) -> float:
    """Any finite number; more is better. The model is trained towards answers that are worth more than its others.

    completion  what the model wrote, as text. It may be empty, or cut off at `actor.max_tokens`
    example     the line of problems.jsonl that was asked, with all of its fields

    Here the problem is `84,36:`, and a careful answer subtracts until both numbers are equal, `48,36;12,36;12,24;12,12>12`.
    Only what comes after `>` counts: how to get there is the model's affair.
    """
    _, mark, result = completion.partition(">")
    return 1.0 if mark and result == example["answer"] else 0.0


# The prompt is the field `prompt` of a line. To make it from other fields, write a function and name it in run.yaml
# (`prompt: rewards.py:prompt`). It returns a text, or a list of chat messages:
#
# def prompt(example: dict[str, Any]) -> str:
#     return f"Question: {example['question']}\nAnswer:"

"""What an attempt at a maths problem is worth: pure functions."""

from __future__ import annotations

from pipelinerl.environments.numbers import answer_in, last_boxed


def answer_of(text: str) -> str:
    r"""The final answer of a model's text: what its last `\boxed{}` holds, else its last number (after a `####`: the first).

    Empty if there is none.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    number = answer_in(text)
    return "" if number is None else str(number)


def length_penalty(length: int, *, limit: int, soft_tokens: int) -> float:
    """0 up to `limit - soft_tokens` tokens, then falling evenly to -1 at `limit`, where a text is cut off.

    A reward near the limit so tells how near it was; without it, a text cut off is worth as little as a wrong one, and a
    policy that grows longer finds out too late.
    """
    if soft_tokens <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - soft_tokens)) / soft_tokens))

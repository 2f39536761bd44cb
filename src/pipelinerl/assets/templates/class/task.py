"""A task as a class: it makes its own problems, and says what an answer is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelinerl.environments import SingleTurn
from pipelinerl.types import Problem


class LargerNumber(SingleTurn):
    """The prompt is `84,36:`; the whole answer must be `>84`."""

    def problem(self, index: int) -> Problem:
        """Training problem number `index`: always the same one for the same index and seed."""
        return draw(random.Random(f"{self.seed}/{index}"), str(index), held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        """`count` problems that training never sees, for `evaluation.problems`."""
        rng = random.Random("held out")
        return [draw(rng, f"held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> str:
        """A text, or a list of chat messages for a model with a chat template."""
        return f"{problem.payload['a']},{problem.payload['b']}:"

    def reward(self, problem: Problem, text: str) -> float:
        """Any finite number for the answer `text`; more is better."""
        return 1.0 if text == f">{max(problem.payload.values())}" else 0.0


def draw(rng: random.Random, name: str, *, held_out: bool) -> Problem:
    while True:
        a, b = rng.sample(range(10, 100), 2)
        if ((a * b) % 10 == 4) == held_out:  # some pairs are held out of training
            return Problem(id=name, payload={"a": a, "b": b})

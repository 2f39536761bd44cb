"""The demo's task: the greatest common divisor of two numbers, by repeated subtraction.

The prompt is the pair, `84,36:`. A full answer subtracts the smaller number from the larger, step by step,
until they are equal, then gives the result: `48,36;12,36;12,24;12,12>12`. All numbers have two digits. Only the
result is graded, so a model may guess or stop early, which rarely succeeds on this task. The number of
steps is long-tailed (usually a few, sometimes more than thirty), and so is the length of a completion.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

from pipelinerl.environments.single_turn import SingleTurn, is_held_out
from pipelinerl.types import Problem

ALPHABET = "0123456789,;:>"
MAX_STEPS = 36
MEAN_EXTRA_STEPS = 5.0
MAX_ANSWER = 12
# The longest full answer has MAX_STEPS cells of six characters, then three for the result; the rest is
# slack.
MAX_COMPLETION_TOKENS = 240

Pools = Mapping[int, Mapping[int, tuple[tuple[int, int], ...]]]


@dataclass(frozen=True)
class GcdProblem:
    a: int
    b: int
    answer: int
    steps: int


def subtract_once(a: int, b: int) -> tuple[int, int]:
    """One step of the method: the larger number is replaced by the difference."""
    return (a - b, b) if a > b else (a, b - a)


@cache
def problem_pools(held_out: bool) -> Pools:
    """The pairs a problem may be drawn from: by number of steps, then by answer."""
    pools: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for a in range(1, 100):
        for b in range(1, 100):
            answer = gcd(a, b)
            if a == b or answer > MAX_ANSWER or is_held_out(f"{a:02d},{b:02d}") != held_out:
                continue
            steps, left = 0, (a, b)
            while left[0] != left[1]:
                steps, left = steps + 1, subtract_once(*left)
            if steps <= MAX_STEPS:
                pools.setdefault(steps, {}).setdefault(answer, []).append((a, b))
    return {steps: {answer: tuple(pairs) for answer, pairs in by_answer.items()} for steps, by_answer in pools.items()}


def draw_problem(rng: random.Random, held_out: bool, steps: int | None = None) -> GcdProblem:
    """A random problem with `steps` subtractions (default: a long-tailed random number); fewer if no pair has that many.

    Raises ValueError for fewer than one step.
    """
    if steps is None:
        steps = min(MAX_STEPS, 1 + int(rng.expovariate(1.0 / MEAN_EXTRA_STEPS)))
    if steps < 1:
        raise ValueError(f"a problem takes at least one step, not {steps}")
    pools = problem_pools(held_out)
    while steps not in pools:  # a small pool can lack a number of steps: take the next lower one
        steps -= 1
    by_answer = pools[steps]
    # The answer is drawn first, uniformly: the divisor of most pairs is 1, and always answering 01 must not pay off.
    answer = rng.choice(sorted(by_answer))
    a, b = rng.choice(by_answer[answer])
    return GcdProblem(a=a, b=b, answer=answer, steps=steps)


def problem_at(index: int, seed: int, held_out: bool) -> GcdProblem:
    """Problem number `index` of an endless stream. A pure function of its arguments."""
    return draw_problem(random.Random(f"gcd/{seed}/{held_out}/{index}"), held_out)


def prompt_text(problem: GcdProblem) -> str:
    return f"{problem.a:02d},{problem.b:02d}:"


def score(problem: GcdProblem, text: str) -> float:
    """1.0 if the text after the first `>` is exactly the answer in two digits; else 0.0."""
    _, mark, result = text.partition(">")
    return 1.0 if mark and result == f"{problem.answer:02d}" else 0.0


# ---- the environment


class Gcd(SingleTurn):
    """Greatest common divisors by repeated subtraction; reward 1 for the right result, else 0."""

    max_tokens = MAX_COMPLETION_TOKENS

    def problem(self, index: int) -> Problem:
        return Problem(id=f"gcd/{index}", payload=dict(vars(problem_at(index, self.seed, held_out=False))))

    def held_out(self, count: int) -> Sequence[Problem]:
        problems = [problem_at(number, seed=0, held_out=True) for number in range(count)]  # the same for every seed
        return [Problem(id=f"gcd/held-out/{number}", payload=dict(vars(one))) for number, one in enumerate(problems)]

    def prompt(self, problem: Problem) -> str:
        return prompt_text(GcdProblem(**problem.payload))

    def reward(self, problem: Problem, text: str) -> float:
        return score(GcdProblem(**problem.payload), text)

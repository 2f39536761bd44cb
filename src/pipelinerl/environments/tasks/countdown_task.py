"""Countdown: reach a target from given numbers with `+ - * /`, each number used at most once. Pure functions."""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl.environments.maths.expressions import read_expression
from pipelinerl.environments.maths.numbers import last_boxed

HELD_OUT_IN = 10
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Difficulty:
    """The minimum and maximum count of numbers, the highest number, the highest target, and the operations of a solution."""

    fewest: int = 3
    most: int = 4
    highest: int = 50
    highest_target: int = 100
    operations: str = "+-*/"


@dataclass(frozen=True)
class Countdown:
    numbers: tuple[int, ...]
    target: int

    @property
    def name(self) -> str:
        """Identifies the problem: problems with the same name are the same."""
        return ",".join(map(str, sorted(self.numbers))) + f"={self.target}"


def is_held_out(task: Countdown) -> bool:
    """One problem in ten, by a hash: independent of the seed and the difficulty."""
    return zlib.crc32(task.name.encode()) % HELD_OUT_IN == 0


def draw_task(rng: random.Random, difficulty: Difficulty, *, held_out: bool, tries: int) -> Countdown | None:
    """A problem with a solution that uses all of its numbers. None if none was found in this many tries."""
    for _ in range(tries):
        count = rng.randint(difficulty.fewest, difficulty.most)
        numbers = tuple(rng.randint(1, difficulty.highest) for _ in range(count))
        target = _reachable(rng, numbers, difficulty)
        if target is not None and target not in numbers:
            task = Countdown(numbers, target)
            if is_held_out(task) == held_out:
                return task
    return None


def _reachable(rng: random.Random, numbers: Sequence[int], difficulty: Difficulty) -> int | None:
    """Combine two of the numbers at random until one is left. Results are whole, positive and within the highest target.

    None if no operation gives such a result.
    """
    left = list(numbers)
    while len(left) > 1:
        rng.shuffle(left)
        a, b = left.pop(), left.pop()
        made = {"+": a + b, "-": abs(a - b), "*": a * b, "/": a // b if a % b == 0 else 0}
        possible = [sign for sign in difficulty.operations if 1 <= made[sign] <= difficulty.highest_target]
        if not possible:
            return None
        left.append(made[rng.choice(possible)])
    return left[0]


def answer_in(text: str) -> str:
    r"""The expression in the last `<answer>`, else in the last `\boxed{}`, else in the last line; up to an `=`."""
    tagged = _TAGGED.findall(text)
    boxed = last_boxed(text)
    lines = text.strip().splitlines()
    answer = tagged[-1] if tagged else boxed if boxed is not None else lines[-1] if lines else ""
    return answer.partition("=")[0].strip().strip("$.").strip()


def score(task: Countdown, text: str, format_reward: float) -> float:
    """1 if the expression has the target's value, `format_reward` if it only uses the given numbers, else 0."""
    expression = read_expression(answer_in(text))
    if expression is None or Counter(expression.numbers) - Counter(task.numbers):
        return 0.0
    return 1.0 if expression.value == task.target else format_reward

"""Countdown: reach a target from given numbers with `+ - * /`, each number used at most once."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import Field, Strict

from pipelinerl.environments.maths.numbers import last_boxed, read_expression
from pipelinerl.environments.options import FormatReward, QuestionOptions, QuestionTask, bounds_of
from pipelinerl.environments.prompts import Message
from pipelinerl.environments.single_turn import SingleTurn, is_held_out
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)

SYSTEM = "Think it through, then put the expression, and nothing else, in \\boxed{}, like \\boxed{(3 + 4) * 5}."
TEXT = "{question}\nThink it through, then put the expression, and nothing else, in \\boxed{}.\n"
QUESTION = "Use the numbers {numbers} to make {target}. You may use +, -, *, / and brackets, and each number at most once."

CHECKED = 50
"""Problems drawn when the environment is built, to check the difficulty."""
CHECKED_TRIES = 200
TRIES = 20_000
"""Far more than CHECKED_TRIES, so that a difficulty that passed the check does not fail during the run."""

Count: TypeAlias = Annotated[int, Field(ge=2, le=8)]
Highest: TypeAlias = Annotated[int, Field(ge=2, le=100_000)]


class CountdownOptions(QuestionOptions, frozen=True):
    numbers: Count | Annotated[tuple[Count, Count], Strict(False)] = (3, 4)
    """How many numbers are given: one value, or the minimum and maximum."""
    highest: Highest = 50
    """The numbers are from 1 to this."""
    highest_target: Highest = 100
    """The targets are from 1 to this."""
    operations: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/"
    """The operations of the generated solution, some of `+-*/`. An answer may use all four."""
    format_reward: FormatReward = 0.1
    """Reward of an expression with a wrong value that uses only the given numbers."""
    system: str = SYSTEM
    text: str = TEXT

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        bounds_of("numbers", self.numbers)


# ---- the task: pure functions


@dataclass(frozen=True)
class CountdownTask:
    numbers: tuple[int, ...]
    target: int

    @property
    def name(self) -> str:
        """Identifies the problem: problems with the same name are the same."""
        return ",".join(map(str, sorted(self.numbers))) + f"={self.target}"


def draw_task(rng: random.Random, options: CountdownOptions, *, held_out: bool, tries: int) -> CountdownTask | None:
    """A problem with a solution that uses all of its numbers. None if none was found in this many tries."""
    for _ in range(tries):
        count = rng.randint(*bounds_of("numbers", options.numbers))
        numbers = tuple(rng.randint(1, options.highest) for _ in range(count))
        target = _reachable(rng, numbers, options)
        if target is not None and target not in numbers:
            task = CountdownTask(numbers, target)
            if is_held_out(task.name) == held_out:
                return task
    return None


def _reachable(rng: random.Random, numbers: Sequence[int], options: CountdownOptions) -> int | None:
    """Combine two of the numbers at random until one is left. Results are whole, positive and within the highest target.

    None if no operation gives such a result.
    """
    left = list(numbers)
    signs = sorted(set(options.operations))
    while len(left) > 1:
        rng.shuffle(left)
        a, b = left.pop(), left.pop()
        made = {"+": a + b, "-": abs(a - b), "*": a * b, "/": a // b if a % b == 0 else 0}
        possible = [sign for sign in signs if 1 <= made[sign] <= options.highest_target]
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


def score(task: CountdownTask, text: str, format_reward: float) -> float:
    """1 if the expression has the target's value, `format_reward` if it only uses the given numbers, else 0."""
    expression = read_expression(answer_in(text))
    if expression is None or Counter(expression.numbers) - Counter(task.numbers):
        return 0.0
    return 1.0 if expression.value == task.target else format_reward


# ---- the environment


class Countdown(QuestionTask, SingleTurn):
    """Reward 1 for an expression that makes the target of the given numbers, each used at most once; else 0."""

    Options = CountdownOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for a difficulty that allows few problems or none."""
        self._options = CountdownOptions.read(args)
        super().__init__(tokenizer, seed, self._options)
        for held_out in (False, True):
            for index in range(CHECKED):
                if self._draw(f"check/{index}", held_out, CHECKED_TRIES) is None:
                    raise EnvironmentSetupError(
                        "environment.args of countdown leave too few problems: raise highest, highest_target or numbers, or "
                        "allow more operations"
                    )

    def problem(self, index: int) -> Problem:
        task = self._draw(f"{self.seed}/{index}", False, TRIES)
        if task is None:
            raise EnvironmentSetupError(f"countdown found no problem {index}: raise highest, highest_target or numbers")
        return _problem(task)

    def held_out(self, count: int) -> Sequence[Problem]:
        tasks = (self._draw(f"held-out/{index}", True, TRIES) for index in range(2 * count))
        distinct = {task.name: task for task in tasks if task is not None}
        return [_problem(task) for task in list(distinct.values())[:count]]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        numbers = ", ".join(map(str, problem.payload["numbers"]))
        return self.ask(QUESTION.replace("{numbers}", numbers).replace("{target}", str(problem.payload["target"])))

    def reward(self, problem: Problem, text: str) -> float:
        task = CountdownTask(tuple(problem.payload["numbers"]), int(problem.payload["target"]))
        return score(task, text, self._options.format_reward)

    def _draw(self, name: str, held_out: bool, tries: int) -> CountdownTask | None:
        rng = random.Random(f"countdown/{name}")
        return draw_task(rng, self._options, held_out=held_out, tries=tries)


def _problem(task: CountdownTask) -> Problem:
    return Problem(id=f"countdown/{task.name}", payload={"numbers": list(task.numbers), "target": task.target})

"""Countdown as a class with arguments: reach a target from given numbers with `+ - * /`, each number used at most once.

pipelinerl train examples/mixture.yaml        with word problems (it needs expressions.py beside it)
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from expressions import read_expression
from pydantic import Field, Strict

from pipelinerl.config.schema import ShareBelowOne
from pipelinerl.environments.options import QuestionOptions, QuestionTask, bounds_of
from pipelinerl.environments.single_turn import is_held_out
from pipelinerl.environments.tasks.numbers import last_boxed
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.encoding import Message
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
    format_reward: ShareBelowOne = 0.1
    """Reward of an expression with a wrong value that uses only the given numbers."""
    system: str = SYSTEM
    text: str = TEXT

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        bounds_of("numbers", self.numbers)


class Countdown(QuestionTask):
    """Reward 1 for an expression that makes the target of the given numbers, each used at most once; else 0."""

    Options = CountdownOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for a difficulty that allows few problems or none."""
        self._options = CountdownOptions.read(args)
        super().__init__(tokenizer, seed, self._options)
        for held_out in (False, True):
            for index in range(CHECKED):
                self._draw(f"check/{index}", held_out, CHECKED_TRIES)

    def problem(self, index: int) -> Problem:
        return self._draw(f"{self.seed}/{index}", False, TRIES)

    def held_out(self, count: int) -> Sequence[Problem]:
        drawn = (self._draw(f"held-out/{index}", True, TRIES) for index in range(2 * count))
        return list({problem.id: problem for problem in drawn}.values())[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        numbers = ", ".join(map(str, problem.payload["numbers"]))
        return self.ask(QUESTION.replace("{numbers}", numbers).replace("{target}", str(problem.payload["target"])))

    def reward(self, problem: Problem, text: str) -> float:
        r"""1 if the answer has the target's value, `format_reward` if it only uses the given numbers, else 0.

        The answer is the expression in the last `<answer>`, else in the last `\boxed{}`, else in the last line, up to `=`.
        """
        tagged, boxed, lines = _TAGGED.findall(text), last_boxed(text), text.strip().splitlines()
        answer = tagged[-1] if tagged else boxed if boxed is not None else lines[-1] if lines else ""
        expression = read_expression(answer.partition("=")[0].strip().strip("$.").strip())
        if expression is None or Counter(expression.numbers) - Counter(problem.payload["numbers"]):
            return 0.0
        return 1.0 if expression.value == problem.payload["target"] else self._options.format_reward

    def _draw(self, name: str, held_out: bool, tries: int) -> Problem:
        """A problem with a solution that uses all of its numbers. Equal problems have equal ids."""
        rng, options = random.Random(f"countdown/{name}"), self._options
        for _ in range(tries):
            count = rng.randint(*bounds_of("numbers", options.numbers))
            numbers = [rng.randint(1, options.highest) for _ in range(count)]
            target = _reachable(rng, numbers, options.highest_target)
            if target is not None and target not in numbers:
                key = ",".join(map(str, sorted(numbers))) + f"={target}"
                if is_held_out(key) == held_out:
                    return Problem(id=f"countdown/{key}", payload={"numbers": numbers, "target": target})
        raise EnvironmentSetupError(
            "environment.args of countdown leave too few problems: raise highest, highest_target or numbers"
        )


def _reachable(rng: random.Random, numbers: Sequence[int], highest: int) -> int | None:
    """Combine two of the numbers at random until one is left. Results are whole, positive and at most `highest`.

    None if no operation gives such a result.
    """
    left = list(numbers)
    while len(left) > 1:
        rng.shuffle(left)
        a, b = left.pop(), left.pop()
        made = {"*": a * b, "+": a + b, "-": abs(a - b), "/": a // b if a % b == 0 else 0}
        possible = [sign for sign in made if 1 <= made[sign] <= highest]
        if not possible:
            return None
        left.append(made[rng.choice(possible)])
    return left[0]

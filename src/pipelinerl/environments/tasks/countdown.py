"""Countdown as an environment. The task itself is defined in `countdown_task`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelinerl.environments.prompts import Message
from pipelinerl.environments.single_turn import QuestionPrompt, SingleTurn, checked_format_reward
from pipelinerl.environments.tasks.countdown_task import Countdown as Task
from pipelinerl.environments.tasks.countdown_task import Difficulty, draw_task, score
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

SYSTEM = "Think it through, then put the expression, and nothing else, in \\boxed{}, like \\boxed{(3 + 4) * 5}."
TEXT = "{question}\nThink it through, then put the expression, and nothing else, in \\boxed{}.\n"
QUESTION = "Use the numbers {numbers} to make {target}. You may use +, -, *, / and brackets, and each number at most once."

CHECKED = 50
"""Problems drawn when the environment is built, to check the difficulty."""
CHECKED_TRIES = 200
TRIES = 20_000
"""Far more than CHECKED_TRIES, so that a difficulty that passed the check does not fail during the run."""


class Countdown(SingleTurn):
    """Reward 1 for an expression that makes the target of the given numbers, each used at most once; else 0.

    numbers         how many numbers are given: one value, or the minimum and maximum
    highest, highest_target   the numbers are from 1 to `highest`, the targets from 1 to `highest_target`
    operations      operations that the generated solution uses; an answer may use all four
    format_reward   reward of an expression with a wrong value that uses only the given numbers
    chat, system, text   as in `math_words`
    max_tokens      longest completion, if `actor.max_tokens` is too long for this task
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        numbers: int | Sequence[int] = (3, 4),
        highest: int = 50,
        highest_target: int = 100,
        operations: str = "+-*/",
        format_reward: float = 0.1,
        chat: bool | None = None,
        system: str = SYSTEM,
        text: str = TEXT,
        max_tokens: int | None = None,
    ) -> None:
        """Raises EnvironmentSetupError for a difficulty that allows few problems or none."""
        super().__init__(tokenizer, seed)
        self.max_tokens = max_tokens
        self._ask = QuestionPrompt(tokenizer, chat=chat, system=system, text=text)
        self._format_reward = checked_format_reward(format_reward)
        self._difficulty = _difficulty(numbers, highest, highest_target, operations)
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
        return self._ask(QUESTION.replace("{numbers}", numbers).replace("{target}", str(problem.payload["target"])))

    def reward(self, problem: Problem, text: str) -> float:
        task = Task(tuple(problem.payload["numbers"]), int(problem.payload["target"]))
        return score(task, text, self._format_reward)

    def _draw(self, name: str, held_out: bool, tries: int) -> Task | None:
        rng = random.Random(f"countdown/{name}")
        return draw_task(rng, self._difficulty, held_out=held_out, tries=tries)


def _problem(task: Task) -> Problem:
    return Problem(id=f"countdown/{task.name}", payload={"numbers": list(task.numbers), "target": task.target})


def _difficulty(numbers: int | Sequence[int], highest: int, highest_target: int, operations: str) -> Difficulty:
    bounds = [numbers, numbers] if isinstance(numbers, int) else list(numbers)
    if len(bounds) != 2 or not all(isinstance(one, int) for one in bounds) or not 2 <= bounds[0] <= bounds[1] <= 8:
        raise EnvironmentSetupError(
            f"environment.args.numbers of countdown is {numbers!r}; it must be a number from 2 to 8, or a range of two"
        )
    for name, value in (("highest", highest), ("highest_target", highest_target)):
        if not isinstance(value, int) or not 2 <= value <= 100_000:
            raise EnvironmentSetupError(f"environment.args.{name} of countdown is {value!r}; it must be from 2 to 100000")
    if not operations or set(operations) - set("+-*/"):
        raise EnvironmentSetupError(f"environment.args.operations of countdown is {operations!r}; it must be some of `+-*/`")
    return Difficulty(bounds[0], bounds[1], highest, highest_target, "".join(sorted(set(operations))))

"""Arithmetic with a calculator: the example of a task with a tool."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from pipelinerl.environments.chat.messages import ChatMessage
from pipelinerl.environments.chat.tool_use import Tool, ToolError, ToolTask, tool_of
from pipelinerl.environments.maths.expressions import MAX_DIGITS, read_expression
from pipelinerl.environments.maths.numbers import answer_in
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

SYSTEM = "Work out what you are asked; the calculator may help. Then answer with the number and nothing else."
HELD_OUT_IN = 10


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Whole numbers, + - * / and brackets, such as (3 + 4) * 5.
    """
    found = read_expression(expression)
    if found is None:
        raise ToolError(
            f"{expression!r} is not an expression of whole numbers (of up to {MAX_DIGITS} digits), + - * / and brackets"
        )
    if found.value is None:
        raise ToolError("division by zero")
    return str(found.value)


class Calculator(ToolTask):
    """Sums, differences and products; the model may call a calculator. Reward 1 for the right number, else 0.

    numbers     minimum and maximum count of numbers
    highest     the numbers are from 2 to this
    operations  some of `+-*`
    system      the system message
    max_turns   turns of the model, including the answer
    max_tokens  longest turn, if `actor.max_tokens` is too long for this task
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        numbers: Sequence[int] = (2, 4),
        highest: int = 99,
        operations: str = "+-*",
        system: str = SYSTEM,
        max_turns: int = 4,
        max_tokens: int | None = None,
    ) -> None:
        """Raises EnvironmentSetupError for arguments out of range, and for a model without a chat template."""
        super().__init__(tokenizer, seed)
        if len(numbers) != 2 or not 2 <= numbers[0] <= numbers[1] <= 8:
            raise EnvironmentSetupError(f"environment.args.numbers of calculator is {numbers!r}; give two, from 2 to 8")
        if not 10 <= highest <= 999:
            raise EnvironmentSetupError(f"environment.args.highest of calculator is {highest}; give 10 to 999")
        if not operations or set(operations) - set("+-*"):
            raise EnvironmentSetupError(f"environment.args.operations of calculator is {operations!r}; give some of `+-*`")
        if max_turns < 1:
            raise EnvironmentSetupError(f"environment.args.max_turns of calculator is {max_turns}; give at least 1")
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self._fewest, self._most = numbers
        self._highest = highest
        self._operations = operations
        self._system = system
        self._calculate = tool_of(calculate)

    def tools(self, problem: Problem) -> Sequence[Tool]:  # noqa: ARG002 - the same for all
        return [self._calculate]

    def problem(self, index: int) -> Problem:
        return self._draw(random.Random(f"calculator/{self.seed}/{index}"), f"calculator/{index}", held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        rng = random.Random("calculator/held-out")
        return [self._draw(rng, f"calculator/held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> Sequence[ChatMessage]:
        question = {"role": "user", "content": f"What is {problem.payload['expression']}?"}
        return [{"role": "system", "content": self._system}, question] if self._system else [question]

    def reward(self, problem: Problem, answer: str, messages: Sequence[ChatMessage]) -> float:  # noqa: ARG002
        return float(answer_in(answer) == problem.payload["value"])

    def _draw(self, rng: random.Random, name: str, *, held_out: bool) -> Problem:
        while True:
            numbers = [rng.randint(2, self._highest) for _ in range(rng.randint(self._fewest, self._most))]
            expression = str(numbers[0])
            for number in numbers[1:]:
                left = f"({expression})" if rng.random() < 0.3 and not expression.isdigit() else expression
                expression = f"{left} {rng.choice(self._operations)} {number}"
            if (zlib.crc32(expression.encode()) % HELD_OUT_IN == 0) == held_out:
                found = read_expression(expression)
                if found is not None and found.value is not None:
                    return Problem(id=name, payload={"expression": expression, "value": int(found.value)})

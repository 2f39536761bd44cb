"""Arithmetic with a calculator: the example of a task with a tool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field, Strict

from pipelinerl.config.schema import Count
from pipelinerl.environments.chat.conversation import ChatMessage
from pipelinerl.environments.chat.tool_use import Tool, ToolError, ToolTask, tool_of
from pipelinerl.environments.options import Arguments, Options, bounds_of
from pipelinerl.environments.prompts import check_template_options, with_system
from pipelinerl.environments.single_turn import is_held_out
from pipelinerl.environments.tasks.numbers import MAX_OPERAND_DIGITS, answer_in, read_expression
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

SYSTEM = "Work out what you are asked; the calculator may help. Then answer with the number and nothing else."


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Whole numbers, + - * / and brackets, such as (3 + 4) * 5.
    """
    found = read_expression(expression)
    if found is None:
        raise ToolError(
            f"{expression!r} is not an expression of whole numbers (of up to {MAX_OPERAND_DIGITS} digits), + - * / and "
            "brackets"
        )
    if found.value is None:
        raise ToolError("division by zero")
    return str(found.value)


Operands: TypeAlias = Annotated[int, Field(ge=2, le=8)]


class CalculatorOptions(Options, frozen=True):
    numbers: Annotated[tuple[Operands, Operands], Strict(False)] = (2, 4)
    """The minimum and maximum count of numbers."""
    highest: Annotated[int, Field(ge=10, le=999)] = 99
    """The numbers are from 2 to this."""
    operations: Annotated[str, Field(pattern=r"^[-+*]+$")] = "+-*"
    """Some of `+-*`."""
    system: str = SYSTEM
    """The system message; "" for none."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    max_turns: Count = 4
    """Turns of the model, including the answer."""
    max_tokens: Count | None = None
    """Longest turn, if `actor.max_tokens` is too long for this task."""

    def model_post_init(self, _: Any) -> None:
        bounds_of("numbers", self.numbers)


class Calculator(ToolTask):
    """Sums, differences and products; the model may call a calculator. Reward 1 for the right number, else 0."""

    Options = CalculatorOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for arguments out of range, and for a model without a chat template."""
        super().__init__(tokenizer, seed)
        self._options = CalculatorOptions.read(args)
        self.max_turns = self._options.max_turns
        self.max_tokens = self._options.max_tokens
        self.template_options = check_template_options(tokenizer, self._options.template_options)
        self._calculate = tool_of(calculate)

    def tools(self, problem: Problem) -> Sequence[Tool]:  # noqa: ARG002 - the same for all
        return [self._calculate]

    def problem(self, index: int) -> Problem:
        return self._draw(random.Random(f"calculator/{self.seed}/{index}"), f"calculator/{index}", held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        rng = random.Random("calculator/held-out")
        return [self._draw(rng, f"calculator/held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> Sequence[ChatMessage]:
        question = f"What is {problem.payload['expression']}?"
        return with_system(self._options.system, [{"role": "user", "content": question}])

    def reward(self, problem: Problem, answer: str, messages: Sequence[ChatMessage]) -> float:  # noqa: ARG002
        return float(answer_in(answer)[0] == problem.payload["value"])

    def _draw(self, rng: random.Random, name: str, *, held_out: bool) -> Problem:
        while True:
            numbers = [rng.randint(2, self._options.highest) for _ in range(rng.randint(*self._options.numbers))]
            expression = str(numbers[0])
            for number in numbers[1:]:
                left = f"({expression})" if rng.random() < 0.3 and not expression.isdigit() else expression
                expression = f"{left} {rng.choice(self._options.operations)} {number}"
            if is_held_out(expression) == held_out:
                found = read_expression(expression)
                if found is not None and found.value is not None:
                    return Problem(id=name, payload={"expression": expression, "value": int(found.value)})

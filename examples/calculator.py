"""A task with a tool, as a class: sums, differences and products, with a calculator that the model may call.

pipelinerl train examples/tools.yaml        (it needs expressions.py beside it)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any

from expressions import read_expression
from pydantic import Field, Strict

from pipelinerl.environments import ToolTask
from pipelinerl.environments.chat.conversation import ChatMessage
from pipelinerl.environments.chat.tool_use import Tool, ToolError, tool_of
from pipelinerl.environments.options import Arguments, Options, bounds_of
from pipelinerl.environments.prompts import check_template_options, with_system
from pipelinerl.environments.single_turn import is_held_out
from pipelinerl.environments.tasks.numbers import answer_in
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Whole numbers, + - * / and brackets, such as (3 + 4) * 5.
    """
    found = read_expression(expression)
    if found is None:  # the model is shown the message, and may try again
        raise ToolError(f"{expression!r} is not an expression of whole numbers (of up to 6 digits), + - * / and brackets")
    if found.value is None:
        raise ToolError("division by zero")
    return str(found.value)


Operands = Annotated[int, Field(ge=2, le=8)]


class CalculatorOptions(Options, frozen=True):
    """`environment.args`, checked before a run starts."""

    numbers: Annotated[tuple[Operands, Operands], Strict(False)] = (2, 4)
    """The minimum and maximum count of numbers."""
    highest: Annotated[int, Field(ge=10, le=999)] = 99
    """The numbers are from 2 to this."""
    system: str = "Work out what you are asked; the calculator may help. Then answer with the number and nothing else."
    """The system message; "" for none."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    max_turns: Annotated[int, Field(ge=1)] = 4
    """Turns of the model, including the answer."""
    call_reward: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the reward that a turn earns with the first call whose result is the right number."""


class Calculator(ToolTask):
    """Reward: 1 for the right number, else 0, or a part of it. A tenth of the problems is held out for evaluation."""

    Options = CalculatorOptions
    isolate_reward = False  # this reward is quick and safe: it needs no processes with limits

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        super().__init__(tokenizer, seed)
        self.options = CalculatorOptions.read(args)
        self.counts = bounds_of("numbers", self.options.numbers)
        self.max_turns = self.options.max_turns
        self.template_options = check_template_options(tokenizer, self.options.template_options)
        self.calculate = tool_of(calculate)

    def tools(self, problem: Problem) -> Sequence[Tool]:
        return [self.calculate]

    def problem(self, index: int) -> Problem:
        return self.draw(random.Random(f"calculator/{self.seed}/{index}"), f"calculator/{index}", held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        rng = random.Random("calculator/held-out")
        return [self.draw(rng, f"calculator/held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> Sequence[ChatMessage]:
        return with_system(self.options.system, [{"role": "user", "content": f"What is {problem.payload['expression']}?"}])

    def reward(self, problem: Problem, answer: str, messages: Sequence[ChatMessage]) -> Any:
        right, part = answer_in(answer)[0] == problem.payload["value"], self.options.call_reward
        if not part:
            return float(right)
        turns = [0.0] * sum(message["role"] == "assistant" for message in messages)
        turn = -1
        for message in messages:
            turn += message["role"] == "assistant"
            if message["role"] == "tool" and message["content"] == str(problem.payload["value"]):
                turns[turn] = part
                break
        return {"reward": sum(turns) + (1 - part) * right, "turns": turns, "right": float(right)}

    def draw(self, rng: random.Random, name: str, *, held_out: bool) -> Problem:
        while True:
            numbers = [rng.randint(2, self.options.highest) for _ in range(rng.randint(*self.counts))]
            expression = str(numbers[0])
            for number in numbers[1:]:
                left = f"({expression})" if rng.random() < 0.3 and not expression.isdigit() else expression
                expression = f"{left} {rng.choice('+-*')} {number}"
            if is_held_out(expression) == held_out:
                return Problem(id=name, payload={"expression": expression, "value": int(calculate(expression))})

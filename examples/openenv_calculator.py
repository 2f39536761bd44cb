"""An environment of OpenEnv with tools: a calculator, and a question that it can answer.

pipelinerl train examples/openenv.yaml        (the run starts this server)
"""

from __future__ import annotations

import operator
import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import MCPEnvironment, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

MOST_SESSIONS = 64
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def value_of(expression: str) -> int:
    """Raises ValueError."""
    match expression.split():
        case [left, sign, right] if sign in OPERATIONS:
            value: int = OPERATIONS[sign](int(left), int(right))
            return value
    raise ValueError(f"{expression!r} is not two whole numbers with +, - or * between them")


class Question(Observation):
    question: str = ""


class CalculatorEnvironment(MCPEnvironment):
    """The tool `answer` ends an episode. Its reward is 1 for the right number, and 0 for any other text."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("calculator")

        @tools.tool
        def calculate(expression: str) -> str:
            """Work out a sum, difference or product of two whole numbers, such as 12 + 34."""
            return str(value_of(expression))

        @tools.tool
        def answer(text: str) -> str:
            """Answer the question with a number, and nothing else."""
            return "right" if text.strip() == self.right else "wrong"

        super().__init__(tools)
        self.right, self.episode = "", State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        rng = random.Random(seed)
        expression = f"{rng.randint(2, 99)} {rng.choice('+-*')} {rng.randint(2, 99)}"
        self.right = str(value_of(expression))
        self.episode = State(episode_id=episode_id)
        return Question(question=f"What is {expression}?")

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        result: Observation = await super().step_async(action, timeout_s, **options)
        self.episode.step_count += 1
        if isinstance(action, CallToolAction) and action.tool_name == "answer":
            right = isinstance(result, CallToolObservation) and result.error is None and result.result.data == "right"
            result.done, result.reward = True, float(right)
        return result

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"{type(action).__name__} is no call of a tool")

    @property
    def state(self) -> State:
        return self.episode


app = create_app(CalculatorEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=MOST_SESSIONS)

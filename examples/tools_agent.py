"""An agent with a tool, written against Anthropic's plain client: it only uses the Messages API at a given base URL.

pipelinerl train examples/tools_agent.yaml
"""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

CLIENT = Anthropic(base_url="http://unused", api_key="unused")
"""Shared by all attempts, because creating a client is slow. Each attempt sets its own base URL."""
TOOL: ToolParam = {
    "name": "calculate",
    "description": "Works out a sum, difference or product of two whole numbers.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
TURNS = 3


def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask for the value of an expression, and answer calls of the tool, until a turn has none."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[MessageParam] = [{"role": "user", "content": f"What is {problem['expression']}?"}]
    for _ in range(TURNS):
        answer = client.messages.create(model="policy", max_tokens=40, messages=messages, tools=[TOOL])
        results: list[ToolResultBlockParam] = [
            {"type": "tool_result", "tool_use_id": block.id, **calculate(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            text = "".join(block.text for block in answer.content if block.type == "text")
            return float(text.strip() == str(problem["value"]))
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return 0.0


def calculate(arguments: Any) -> Any:
    """The result of a call as the API wants it, or the error that the model is shown."""
    match str(arguments.get("expression")).split():
        case [left, "+" | "-" | "*" as operation, right] if left.isdecimal() and right.isdecimal():
            a, b = int(left), int(right)
            return {"content": str({"+": a + b, "-": a - b, "*": a * b}[operation])}
    return {"content": "write two whole numbers with +, - or * between them", "is_error": True}

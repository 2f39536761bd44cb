"""A calculator as an MCP server, made with the official package `mcp`, and the reward of the run that uses it.

pipelinerl train examples/tools_mcp.yaml        (the run starts the server; it needs expressions.py beside it)
"""

from __future__ import annotations

from typing import Any

from expressions import read_expression
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """Work out an arithmetic expression of whole numbers, + - * / and brackets."""
    found = read_expression(expression)
    if found is None or found.value is None:  # the model is shown the message, and may try again
        raise ToolError(f"{expression!r} has no value: write whole numbers, + - * / and brackets")
    return str(found.value)


def reward(completion: str, example: dict[str, Any]) -> float:
    return float(completion.strip() == str(example["answer"]))


if __name__ == "__main__":
    server.run()  # on standard input and output; `server.run("streamable-http", port=8000)` is at http://127.0.0.1:8000/mcp

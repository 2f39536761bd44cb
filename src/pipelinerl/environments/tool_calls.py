"""Tool calls in what a model wrote: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ToolSchema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`"""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ParsedText(NamedTuple):
    """`content` is the text without the calls; what looks like a call and is none stays in it, and is counted."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


ToolParser = Callable[[str], ParsedText]


def parse_tool_calls(text: str) -> ParsedText:
    """The calls in a text, in order. A block that isn't closed counts if it is whole JSON: some models stop there."""
    calls: list[ToolCall] = []
    content: list[str] = []
    malformed = read = 0
    for block in _BLOCK.finditer(text):
        call = _call(block[1])
        if call is None:
            malformed += 1
            continue
        calls.append(call)
        content.append(text[read : block.start()])
        read = block.end()
    content.append(text[read:])
    whole = "".join(content)
    return ParsedText(whole.strip() if calls else whole, tuple(calls), malformed)


def describe_tools(tools: Sequence[ToolSchema]) -> str:
    """What a model is told in its system message whose chat template knows nothing of tools."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, described as JSON:\n<tools>\n{described}\n</tools>\n"
        'To call one, write\n<tool_call>\n{"name": "its name", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "and end your turn: the next message has the result."
    )


def _call(written: str) -> ToolCall | None:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    return ToolCall(name, arguments) if name and isinstance(name, str) and isinstance(arguments, dict) else None

"""Chat messages as OpenAI's API has them: made plain for templates, and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipelinerl.environments.tool_calls import ParsedText
from pipelinerl.errors import RequestError

ChatMessage = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`; also with `tool_calls` (role `assistant`) or `tool_call_id` (role `tool`)."""
PlainMessage = dict[str, Any]

_KEPT = ("name", "tool_call_id", "reasoning_content")


def plain_message(message: ChatMessage) -> PlainMessage:
    """As templates want it: content is one text, arguments of tool calls are objects, and nothing is null.

    Raises RequestError for what isn't a message of text.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("messages: each must have a `role`")
    plain: PlainMessage = {"role": role, "content": _text(message.get("content"))}
    plain |= {key: message[key] for key in _KEPT if message.get(key) is not None}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def answer_message(parsed: ParsedText, id_prefix: str) -> PlainMessage:
    """What a model said, in the form of OpenAI's API: `arguments` are JSON as text."""
    message: PlainMessage = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{number:02}",  # some templates want nine letters and digits, or more
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def same_messages(some: Sequence[PlainMessage], others: Sequence[PlainMessage]) -> bool:
    return len(some) == len(others) and all(_same(one, other) for one, other in zip(some, others, strict=True))


def _same(one: PlainMessage, other: PlainMessage) -> bool:
    """Of an answer, what was said counts: callers drop ids, or strip the text."""
    if one is other:
        return True
    if one["role"] != "assistant" or other["role"] != "assistant":
        return one == other
    return one["content"].strip() == other["content"].strip() and _functions(one) == _functions(other)


def _functions(message: PlainMessage) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestError("messages: `content` must be a text, or a list of parts of type `text`")


def _plain_call(call: Any) -> PlainMessage:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("messages: each of `tool_calls` must have a `function` with a `name`")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # the template gets the text, as the caller wrote it
            arguments = json.loads(arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return plain | ({"id": call["id"]} if call.get("id") is not None else {})

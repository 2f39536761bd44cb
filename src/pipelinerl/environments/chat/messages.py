"""Chat messages of OpenAI's API: normalised for chat templates, compared, and parsed for tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipelinerl.environments.prompts import encode_prompt
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import Tokenizer

# ---- tool calls in generated text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes and Qwen

ToolSchema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`"""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ParsedText(NamedTuple):
    """`content` is the text without the calls. Malformed calls stay in it and are counted."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


def parse_tool_calls(text: str) -> ParsedText:
    """The calls in a text, in order. An unclosed block counts if it is complete JSON: some models stop there."""
    calls: list[ToolCall] = []
    content: list[str] = []
    malformed = read = 0
    for block in _BLOCK.finditer(text):
        try:
            value = json.loads(block[1])
        except (ValueError, RecursionError):
            value = None
        name, arguments = (value.get("name"), value.get("arguments", {})) if isinstance(value, dict) else (None, None)
        if not (name and isinstance(name, str) and isinstance(arguments, dict)):
            malformed += 1
            continue
        calls.append(ToolCall(name, arguments))
        content.append(text[read : block.start()])
        read = block.end()
    content.append(text[read:])
    whole = "".join(content)
    return ParsedText(whole.strip() if calls else whole, tuple(calls), malformed)


ChatMessage = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`; also with `tool_calls` (role `assistant`) or `tool_call_id` (role `tool`)."""
PlainMessage = dict[str, Any]

_KEPT = ("name", "tool_call_id", "reasoning_content")


def plain_message(message: ChatMessage) -> PlainMessage:
    """The form that templates expect: content is one text, arguments of tool calls are objects, and no field is null.

    Raises RequestError for a message that isn't text.
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
    """The model's answer as a message of OpenAI's API, with `arguments` as JSON text."""
    message: PlainMessage = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{number:02}",  # some templates require at least nine letters and digits
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def same_messages(some: Sequence[PlainMessage], others: Sequence[PlainMessage]) -> bool:
    """Whether these are the same. Answers are compared by text and calls only: callers drop ids, or strip the text."""

    def essence(message: PlainMessage) -> Any:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return (message["content"].strip(), functions) if message["role"] == "assistant" else message

    return len(some) == len(others) and all(
        one is other or (one["role"] == other["role"] and essence(one) == essence(other))
        for one, other in zip(some, others, strict=True)
    )


# ---- in the model's chat template, and as ids


def render(
    tokenizer: Tokenizer, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema], options: Mapping[str, Any]
) -> str:
    """The messages in the model's chat template; `options` go to `apply_chat_template`.

    If the template ignores tools, they are described in the system message. Raises RequestError if it refuses the messages.
    """
    if tools:
        question: list[PlainMessage] = [{"role": "user", "content": "?"}]
        if _apply(tokenizer, question, tools, options) == _apply(tokenizer, question, (), options):
            described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = (
                f"You may call these functions, described as JSON:\n<tools>\n{described}\n</tools>\n"
                'To call one, write\n<tool_call>\n{"name": "its name", "arguments": {"an argument": "its value"}}\n'
                "</tool_call>\nand end your turn: the next message has the result."
            )
            tools = ()
            if messages[0]["role"] == "system":
                content = "\n\n".join(filter(None, [messages[0]["content"], system]))
                messages = [{**messages[0], "content": content}, *messages[1:]]
            else:
                messages = [{"role": "system", "content": system}, *messages]
    return _apply(tokenizer, messages, tools, options)


def encode_text(tokenizer: Tokenizer, text: str, *, special: bool = False) -> tuple[int, ...]:
    """The ids of a text; `special`: with the tokens that the model expects before it. Raises RequestError."""
    try:
        return encode_prompt(tokenizer, text) if special else tuple(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # tokenizers raise plain exceptions for characters that they can't encode
        raise RequestError(f"the model's tokenizer can't encode the prompt: {error}") from error


def _apply(
    tokenizer: Tokenizer, messages: Sequence[PlainMessage], tools: Sequence[ToolSchema], options: Mapping[str, Any]
) -> str:
    shown = [dict(tool) for tool in tools] or None
    try:
        return str(tokenizer.apply_chat_template([dict(one) for one in messages], tools=shown, tokenize=False, **options))
    except Exception as error:  # a template is code and may raise anything
        what = " ".join(str(error).split())
        raise RequestError(f"messages: the model's chat template refuses them: {what}") from error


# ---- parts of messages


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    types = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    raise RequestError(
        f"messages: only text is taken: `content` is a text, or parts of type `text`, not {str(types or content)[:80]}"
    )


def _plain_call(call: Any) -> PlainMessage:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("messages: each of `tool_calls` must have a `function` with a `name`")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # if it isn't JSON, the template gets the text unchanged
            arguments = json.loads(arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return plain | ({"id": call["id"]} if call.get("id") is not None else {})

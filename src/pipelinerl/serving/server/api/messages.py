"""Anthropic's Messages API: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.api.answers import Json, ReadRequest
from pipelinerl.serving.server.api.bodies import ChatBody, choice_of_function, read_body
from pipelinerl.serving.server.api.translation import chat_tools, converted, function_call, named_events, only_text
from pipelinerl.serving.wire import ErrorBody, ErrorCode

# ---- requests


class _ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Turn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _ToolUse(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, frozen=True):
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[_Turn]
    max_tokens: int
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    stream: bool | None = None


def read(data: bytes) -> ReadRequest:
    """Raises RequestError for a request that is malformed, or asks for what is not supported."""
    asked = read_body(data, MessagesBody, strict=True)
    body = ChatBody(
        model=asked.model,
        messages=_messages(asked),
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
        tools=chat_tools(asked.tools, None, "custom"),
        tool_choice=None if asked.tool_choice is None else _tool_choice(asked.tool_choice),
        stream=asked.stream,
    )
    return ReadRequest(body, MessagesWriter)


def _messages(asked: MessagesBody) -> list[Json]:
    messages: list[Json] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": only_text("system", asked.system, ("text",))})
    for number, message in enumerate(asked.messages):
        where = f"messages[{number}].content"
        if message.role == "assistant":
            messages.append(_answer(message.content, where))
        else:
            messages += _question(message, where)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestError("messages: this server does not continue an answer; end with a message of the user")
    return messages


def _question(message: _Turn, where: str) -> Iterable[Json]:
    """The results of tools in a message are messages of their own, before its text."""
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    texts = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            result = converted(where, block, _ToolResult)
            content = only_text(where, result.content or "", ("text",))
            shown = f"Error: {content}" if result.is_error else content  # as `use_tools` shows errors to the model
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": shown}
    if texts:
        yield {"role": message.role, "content": only_text(where, texts, ("text",))}


def _answer(content: str | list[dict[str, Any]], where: str) -> Json:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [block for block in blocks if block.get("type") != "tool_use"]
    calls = [converted(where, block, _ToolUse) for block in blocks if block.get("type") == "tool_use"]
    message: Json = {"role": "assistant", "content": only_text(where, texts, ("text",))}
    if calls:
        message["tool_calls"] = [function_call(call.id, call.name, call.input) for call in calls]
    return message


def _tool_choice(choice: _ToolChoice) -> Any:
    if choice.disable_parallel_tool_use and choice.type == "auto":
        raise RequestError(
            "tool_choice: the model may call several tools in one answer; leave out disable_parallel_tool_use"
        )
    if choice.type == "tool":
        return choice_of_function(choice.name)
    return {"auto": "auto", "none": "none", "any": "required"}[choice.type]


# ---- answers

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter:
    """Blocks of an answer: a text, and calls of tools."""

    def __init__(self, answer_id: str, model: str) -> None:
        message_id = f"msg_{answer_id.removeprefix('chatcmpl-')}"
        self._about = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        (choice,) = choices
        text, calls = choice["message"]["content"], choice["message"].get("tool_calls", ())
        blocks: list[Json] = [{"type": "text", "text": text or ""}] if text or not calls else []
        for call in calls:
            function = call["function"]
            arguments = msgspec.Raw(function["arguments"].encode())
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        stop = choice.get("stop_reason")
        reason = _STOP_REASONS.get(choice["finish_reason"])
        if reason == "end_turn" and calls:
            reason = "tool_use"  # a call that the request required
        elif reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {**self._about, "content": blocks, "stop_reason": reason, "stop_sequence": stop, "usage": counts}

    def stream(self, choices: Sequence[Json], usage: Json) -> bytes:
        return named_events(_events(self.whole(choices, usage)))


def _events(message: Json) -> Iterable[Json]:
    ended = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    begun = {**message, "content": [], **dict.fromkeys(ended), "usage": {**message["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            opened, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = bytes(block["input"]).decode()
            opened, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


# ---- errors

_ERROR_TYPES: Mapping[ErrorCode, str] = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "overloaded": "rate_limit_error",
    "unavailable": "api_error",
}


def error_of_messages(body: ErrorBody) -> Json:
    """An error in the shape of this API."""
    kind = _ERROR_TYPES.get(body.error.code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body.error.message}}

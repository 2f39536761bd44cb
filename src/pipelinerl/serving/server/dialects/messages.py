"""Anthropic's Messages API: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.errors import PipelineRLError, RequestError
from pipelinerl.serving.server.dialects.common import (
    USAGE_AT_THE_END,
    EventWriter,
    Part,
    Translated,
    chat_tools,
    converted,
    function_call,
    only_text,
)
from pipelinerl.serving.server.http import error_answer
from pipelinerl.serving.server.openai.answers import Json
from pipelinerl.serving.server.openai.bodies import ChatBody, choice_of_function, read_body
from pipelinerl.serving.wire import ErrorBody, ErrorCode

# ---- requests


class _Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Message(msgspec.Struct, frozen=True):
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
    messages: list[_Message]
    max_tokens: int
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _Choice | None = None
    stream: bool | None = None


def read(data: bytes) -> Translated:
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
        stream_options=USAGE_AT_THE_END,
    )
    return Translated(body, MessagesWriter)


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


def _question(message: _Message, where: str) -> Iterable[Json]:
    """The results of tools in a message are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    text: Json = {}
    for block in message.content:
        if block.get("type") != "tool_result":
            said = only_text(where, [block], ("text",))
            if text:
                text["content"] += said
            else:
                text = {"role": message.role, "content": said}
            continue
        if text:
            yield text
            text = {}
        result = converted(where, block, _ToolResult)
        content = only_text(where, result.content or "", ("text",))
        shown = f"Error: {content}" if result.is_error else content  # as `use_tools` shows errors to the model
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": shown}
    if text:
        yield text


def _answer(content: str | list[dict[str, Any]], where: str) -> Json:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [block for block in blocks if block.get("type") != "tool_use"]
    calls = [converted(where, block, _ToolUse) for block in blocks if block.get("type") == "tool_use"]
    message: Json = {"role": "assistant", "content": only_text(where, texts, ("text",))}
    if calls:
        message["tool_calls"] = [function_call(call.id, call.name, call.input) for call in calls]
    return message


def _tool_choice(choice: _Choice) -> Any:
    if choice.disable_parallel_tool_use and choice.type == "auto":
        raise RequestError(
            "tool_choice: the model may call several tools in one answer; leave out disable_parallel_tool_use"
        )
    if choice.type == "tool":
        return choice_of_function(choice.name)
    return {"auto": "auto", "none": "none", "any": "required"}[choice.type]


# ---- answers

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(EventWriter):
    """Blocks of an answer: texts and calls of tools."""

    def error(self, body: ErrorBody) -> bytes:
        return self._framed(_error(body))

    def _answer(self, usage: Json) -> Json:
        """The message."""
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        blocks = []
        for part in self._parts:
            content = {"input": msgspec.Raw(part.text.encode())} if part.call_id else {"text": part.text}
            blocks.append(_block(part) | content)
        about = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._model}
        return {**about, "content": blocks, **self._ended_by(), "usage": counts}

    def _ended_by(self) -> Json:
        reason = _STOP_REASONS.get(self._reason or "")
        if reason == "end_turn" and any(part.call_id for part in self._parts):
            reason = "tool_use"  # a call that the request required
        elif reason == "end_turn" and self._stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stop}

    def _begin(self) -> Iterable[Json]:
        message = self._answer({"prompt_tokens": self._prompt_tokens, "completion_tokens": 0})
        return [{"type": "message_start", "message": message}]

    def _begin_part(self, part: Part) -> Iterable[Json]:
        return [{"type": "content_block_start", "index": self._index, "content_block": _block(part)}]

    def _extended(self, part: Part, text: str) -> Json:
        delta = {"type": "input_json_delta", "partial_json": text} if part.call_id else {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end_part(self, part: Part) -> Iterable[Json]:  # noqa: ARG002 - the index says which
        return [{"type": "content_block_stop", "index": self._index}]

    def _end(self, usage: Json) -> Iterable[Json]:
        yield {"type": "message_delta", "delta": self._ended_by(), "usage": {"output_tokens": usage["completion_tokens"]}}
        yield {"type": "message_stop"}


def _block(part: Part) -> Json:
    """An empty block for a part."""
    if part.call_id:
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    return {"type": "text", "text": ""}


# ---- errors

_ERROR_TYPES: Mapping[ErrorCode, str] = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "overloaded": "rate_limit_error",
    "unavailable": "api_error",
}


def with_its_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler with errors in the shape of this API."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except PipelineRLError as error:
            return error_answer(error, _error)

    return handle


def _error(body: ErrorBody) -> Json:
    kind = _ERROR_TYPES.get(body.error.code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body.error.message}}

"""Anthropic's Messages API: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.api.answers import Answer, ReadRequest, function_call, function_tool, named_events, text_of
from pipelinerl.serving.server.api.bodies import ChatBody, Json, read_body

# ---- requests


class _Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class _ToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: Json


class _ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None


class _Turn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _ToolUse | _ToolResult]


class _CustomTool(msgspec.Struct, frozen=True):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Json | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[_Turn]
    max_tokens: int
    system: str | list[_Text] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[_CustomTool] | None = None
    tool_choice: _ToolChoice | None = None
    stream: bool | None = None


def read(data: bytes) -> ReadRequest:
    """Raises RequestError for a request that is malformed, or asks for what is not supported."""
    asked = read_body(data, MessagesBody)
    choice = asked.tool_choice
    if choice is not None and choice.disable_parallel_tool_use and choice.type == "auto":
        raise RequestError("tool_choice: the model may call several tools; leave out disable_parallel_tool_use")
    messages: list[Json] = [] if asked.system is None else [{"role": "system", "content": text_of(asked.system)}]
    for turn in asked.messages:
        messages += _translated(turn)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestError("messages: this server does not continue an answer; end with a message of the user")
    body = ChatBody(
        model=asked.model,
        messages=messages,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
        tools=[function_tool(tool.name, tool.description, tool.input_schema) for tool in asked.tools or []],
        tool_choice=None if choice is None else choice.type,
        stream=asked.stream,
    )
    return ReadRequest(body, MessagesWriter)


def _translated(turn: _Turn) -> Iterable[Json]:
    """Messages of Chat Completions. The results of tools in a message are messages of their own, before its text."""
    blocks = [_Text(turn.content)] if isinstance(turn.content, str) else turn.content
    texts = [block for block in blocks if isinstance(block, _Text)]
    calls = [function_call(block.id, block.name, block.input) for block in blocks if isinstance(block, _ToolUse)]
    for block in blocks:
        if isinstance(block, _ToolResult):
            content = text_of(block.content or "")
            shown = f"Error: {content}" if block.is_error else content  # as `use_tools` shows errors to the model
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}
    if texts or calls or not blocks:
        yield {"role": turn.role, "content": text_of(texts)} | ({"tool_calls": calls} if calls else {})


# ---- answers

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter:
    """Blocks of an answer: a text, and calls of tools."""

    def __init__(self, answer_id: str, model: str) -> None:
        message_id = f"msg_{answer_id.removeprefix('chatcmpl-')}"
        self._about = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, answer: Answer) -> Json:
        blocks: list[Json] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        for call in answer.calls:
            function = call["function"]
            arguments = msgspec.Raw(function["arguments"].encode())
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        stopped = answer.finish_reason == "stop" and answer.stop is not None
        reason = "stop_sequence" if stopped else _STOP_REASONS[answer.finish_reason]
        counts = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        return {**self._about, "content": blocks, "stop_reason": reason, "stop_sequence": answer.stop, "usage": counts}

    def stream(self, answer: Answer) -> bytes:
        return named_events(_events(self.whole(answer)))


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

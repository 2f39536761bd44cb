"""OpenAI's Responses API: `POST /v1/responses`. Nothing is stored: a request has the whole input."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.api.answers import Json, ReadRequest
from pipelinerl.serving.server.api.bodies import (
    WHOLE_INPUT,
    ChatBody,
    JsonSchema,
    ResponseFormat,
    choice_of_function,
    read_body,
)
from pipelinerl.serving.server.api.translation import chat_tools, converted, function_call, named_events, only_text

# ---- requests

_ROLES = {"developer": "system"}
"""The roles that models' chat templates lack, and what they become."""


class _Format(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format = _Format()
    verbosity: Literal["medium"] | None = None


class _FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class _MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _CallItem(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str


class _OutputItem(msgspec.Struct, frozen=True):
    call_id: str
    output: str | list[Any]


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | _FunctionChoice | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None


def read(data: bytes) -> ReadRequest:
    """Raises RequestError for a request that is malformed, or asks for what is not supported."""
    asked = read_body(data, ResponsesBody, strict=True)
    body = ChatBody(
        model=asked.model,
        messages=_messages(asked),
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        response_format=_response_format(asked.text or {}),
        tools=chat_tools(asked.tools, "function"),
        tool_choice=choice_of_function(choice.name) if isinstance(choice := asked.tool_choice, _FunctionChoice) else choice,
        stream=asked.stream,
    )
    return ReadRequest(body, partial(ResponsesWriter, asked))


def _messages(asked: ResponsesBody) -> list[Json]:
    given: Sequence[Json] = asked.input if isinstance(asked.input, list) else [{"role": "user", "content": asked.input}]
    messages: list[Json] = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    for number, item in enumerate(given):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    """Add an item to the messages. The text and the calls of one answer, which are several items, are one message."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        message = converted(where, item, _MessageItem)
        content = only_text(f"{where}.content", message.content, ("input_text", "output_text"))
        if message.role == "assistant" and last and "tool_calls" in last:
            last["content"] += content
        else:
            messages.append({"role": _ROLES.get(message.role, message.role), "content": content})
    elif kind == "function_call":
        call = converted(where, item, _CallItem)
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(function_call(call.call_id, call.name, call.arguments))
    elif kind == "function_call_output":
        result = converted(where, item, _OutputItem)
        content = only_text(f"{where}.output", result.output, ("input_text",))
        messages.append({"role": "tool", "tool_call_id": result.call_id, "content": content})
    else:
        hint = WHOLE_INPUT if kind == "item_reference" else "leave it out"
        raise RequestError(f"{where}: this server does not support items of type {str(kind)[:40]!r}; {hint}")


def _response_format(text: Json) -> ResponseFormat | None:
    given = converted("text", text, _Text).format
    return None if given.type == "text" else ResponseFormat(type=given.type, json_schema=JsonSchema(schema=given.schema))


# ---- answers


class ResponsesWriter:
    """Items of an answer: a message with one text, and calls."""

    def __init__(self, asked: ResponsesBody, answer_id: str, model: str) -> None:
        self._asked, self._model = asked, model
        self._id = answer_id.removeprefix("chatcmpl-")
        self._created = int(time.time())

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        (choice,) = choices
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        text, calls = choice["message"]["content"], choice["message"].get("tool_calls", ())
        items: list[Json] = []
        if text or not calls:
            content: Json = {"type": "output_text", "text": text or "", "annotations": [], "logprobs": []}
            items.append({"type": "message", "id": f"msg_{self._id}_0", "role": "assistant", "content": [content]})
        for number, call in enumerate(calls, len(items)):
            about = {"type": "function_call", "id": f"fc_{self._id}_{number}", "call_id": call["id"]}
            items.append(about | call["function"])
        for item in items:
            item["status"] = status if item is items[-1] else "completed"
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return self._response(status, items, counts)

    def stream(self, choices: Sequence[Json], usage: Json) -> bytes:
        events = enumerate(self._events(self.whole(choices, usage)))
        return named_events(event | {"sequence_number": number} for number, event in events)

    def _response(self, status: str, items: Sequence[Json], usage: Json | None) -> Json:
        asked = self._asked
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}} | (asked.text or {}),
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _events(self, response: Json) -> Iterable[Json]:
        begun = self._response("in_progress", [], None)
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for number, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": number}
            empty: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
            added = item | {"status": "in_progress"} | empty
            yield {"type": "response.output_item.added", "output_index": number, "item": added}
            if item["type"] == "message":
                place["content_index"] = 0
                (part,) = item["content"]
                text = {"logprobs": [], **place}
                yield {"type": "response.content_part.added", "part": part | {"text": ""}, **place}
                yield {"type": "response.output_text.delta", "delta": part["text"], **text}
                yield {"type": "response.output_text.done", "text": part["text"], **text}
                yield {"type": "response.content_part.done", "part": part, **place}
            else:
                arguments = item["arguments"]
                yield {"type": "response.function_call_arguments.delta", "delta": arguments, **place}
                yield {"type": "response.function_call_arguments.done", "arguments": arguments, **place}
            yield {"type": "response.output_item.done", "output_index": number, "item": item}
        yield {"type": f"response.{response['status']}", "response": response}

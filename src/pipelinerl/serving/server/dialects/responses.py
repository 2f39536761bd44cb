"""OpenAI's Responses API: `POST /v1/responses`. Nothing is stored: a request has the whole input."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from pipelinerl.errors import RequestError
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
from pipelinerl.serving.server.openai.answers import Json
from pipelinerl.serving.server.openai.bodies import (
    WHOLE_INPUT,
    ChatBody,
    JsonSchema,
    ResponseFormat,
    choice_of_function,
    read_body,
)
from pipelinerl.serving.wire import ErrorBody

# ---- requests

_ROLES = {"developer": "system"}
"""The roles that models' chat templates lack, and what they become."""


class _Format(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Format = _Format()
    verbosity: Literal["medium"] | None = None


class _Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str


class _Output(msgspec.Struct, frozen=True):
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
    tool_choice: str | _Choice | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None


def read(data: bytes) -> Translated:
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
        tool_choice=choice_of_function(choice.name) if isinstance(choice := asked.tool_choice, _Choice) else choice,
        stream=asked.stream,
        stream_options=USAGE_AT_THE_END,
    )
    return Translated(body, lambda *about: ResponsesWriter(asked, *about))


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
        message = converted(where, item, _Message)
        content = only_text(f"{where}.content", message.content, ("input_text", "output_text"))
        if message.role == "assistant" and last and "tool_calls" in last:
            last["content"] += content
        else:
            messages.append({"role": _ROLES.get(message.role, message.role), "content": content})
    elif kind == "function_call":
        call = converted(where, item, _Call)
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(function_call(call.call_id, call.name, call.arguments))
    elif kind == "function_call_output":
        result = converted(where, item, _Output)
        content = only_text(f"{where}.output", result.output, ("input_text",))
        messages.append({"role": "tool", "tool_call_id": result.call_id, "content": content})
    else:
        hint = WHOLE_INPUT if kind == "item_reference" else "leave it out"
        raise RequestError(f"{where}: this server does not support items of type {str(kind)[:40]!r}; {hint}")


def _response_format(text: Json) -> ResponseFormat | None:
    given = converted("text", text, _Text).format
    return None if given.type == "text" else ResponseFormat(type=given.type, json_schema=JsonSchema(schema=given.schema))


# ---- answers


class ResponsesWriter(EventWriter):
    """Items of an answer: a message with one text, or a call."""

    def __init__(self, asked: ResponsesBody, answer_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__(answer_id, model, prompt_tokens)
        self._asked = asked
        self._created = int(time.time())
        self._sent = 0

    def error(self, body: ErrorBody) -> bytes:
        detail = body.error
        return self._framed({"type": "error", "code": detail.code, "message": detail.message, "param": detail.param})

    def _framed(self, event: Json) -> bytes:
        self._sent += 1
        return super()._framed(event | {"sequence_number": self._sent - 1})

    def _answer(self, usage: Json | None) -> Json:
        """The response; without `usage` as it is when it begins."""
        asked = self._asked
        cut = self._reason == "length"
        ended = "incomplete" if cut else "completed"
        status = "in_progress" if usage is None else ended
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
            "output": [
                self._item(number, part, ended if number == self._index else "completed")
                for number, part in enumerate(self._parts)
            ],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}} | (asked.text or {}),
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _item(self, number: int, part: Part, status: str) -> Json:
        about = {"id": self._item_id(number, part), "status": status}
        if part.call_id:
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {"type": "function_call", **about, **call}
        content = [] if status == "in_progress" else [_text_part(part.text)]
        return {"type": "message", **about, "role": "assistant", "content": content}

    def _item_id(self, number: int, part: Part) -> str:
        return f"{'fc' if part.call_id else 'msg'}_{self._id}_{number}"

    def _begin(self) -> Iterable[Json]:
        response = self._answer(None)
        return [{"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}]

    def _begin_part(self, part: Part) -> Iterable[Json]:
        item = self._item(self._index, part, "in_progress")
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        if not part.call_id:
            yield self._event("content_part.added", part, part=_text_part(""))

    def _extended(self, part: Part, text: str) -> Json:
        if part.call_id:
            return self._event("function_call_arguments.delta", part, delta=text)
        return self._event("output_text.delta", part, delta=text, logprobs=[])

    def _end_part(self, part: Part) -> Iterable[Json]:
        if part.call_id:
            yield self._event("function_call_arguments.done", part, arguments=part.text)
        else:
            yield self._event("output_text.done", part, text=part.text, logprobs=[])
            yield self._event("content_part.done", part, part=_text_part(part.text))
        item = self._item(self._index, part, "incomplete" if self._reason == "length" else "completed")
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _end(self, usage: Json) -> Iterable[Json]:
        response = self._answer(usage)
        return [{"type": f"response.{response['status']}", "response": response}]

    def _event(self, kind: str, part: Part, /, **fields: Any) -> Json:
        """An event about the last part."""
        place = {"item_id": self._item_id(self._index, part), "output_index": self._index}
        return {"type": f"response.{kind}", **place, **({} if part.call_id else {"content_index": 0}), **fields}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }

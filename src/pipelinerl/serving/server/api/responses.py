"""OpenAI's Responses API: `POST /v1/responses`. Nothing is stored: a request has the whole input."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.api.answers import Answer, ReadRequest, function_call, function_tool, named_events, text_of
from pipelinerl.serving.server.api.bodies import WHOLE_INPUT, ChatBody, Json, read_body

# ---- requests

_ROLES = {"developer": "system"}
"""The roles that models' chat templates lack, and what they become."""


class _Part(msgspec.Struct, frozen=True):
    type: Literal["input_text", "output_text"]
    text: str


class _Message(msgspec.Struct, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]


class _Call(msgspec.Struct, frozen=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _Output(msgspec.Struct, frozen=True, tag="function_call_output"):
    call_id: str
    output: str | list[_Part]


_Item = _Message | _Call | _Output


class _FunctionTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # not enforced


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[_FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    stream: bool | None = None


def read(data: bytes) -> ReadRequest:
    """Raises RequestError for a request that is malformed, or asks for what is not supported."""
    asked = read_body(data, ResponsesBody)
    messages: list[Json] = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        for number, item in enumerate(asked.input):
            _add_item(messages, item, f"input[{number}]")
    body = ChatBody(
        model=asked.model,
        messages=messages,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        tools=[function_tool(tool.name, tool.description, tool.parameters) for tool in asked.tools or []],
        tool_choice=asked.tool_choice,
        stream=asked.stream,
    )
    return ReadRequest(body, partial(ResponsesWriter, asked))


def _add_item(messages: list[Json], given: Json, where: str) -> None:
    """Add an item to the messages. The text and the calls of one answer, which are several items, are one message."""
    if given.get("type") == "item_reference":
        raise RequestError(f"{where}: {WHOLE_INPUT}")
    try:
        item: _Item = msgspec.convert({"type": "message", **given}, _Item)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}") from error
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, _Message):
        content = text_of(item.content)
        if item.role == "assistant" and last and "tool_calls" in last:
            last["content"] += content
        else:
            messages.append({"role": _ROLES.get(item.role, item.role), "content": content})
    elif isinstance(item, _Call):
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(function_call(item.call_id, item.name, item.arguments))
    else:
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})


# ---- answers


class ResponsesWriter:
    """Items of an answer: a message with one text, and calls."""

    def __init__(self, asked: ResponsesBody, answer_id: str, model: str) -> None:
        self._asked, self._model = asked, model
        self._id = answer_id.removeprefix("chatcmpl-")
        self._created = int(time.time())

    def whole(self, answer: Answer) -> Json:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items: list[Json] = []
        if answer.text or not answer.calls:
            content: Json = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            items.append({"type": "message", "id": f"msg_{self._id}_0", "role": "assistant", "content": [content]})
        for number, call in enumerate(answer.calls, len(items)):
            about = {"type": "function_call", "id": f"fc_{self._id}_{number}", "call_id": call["id"]}
            items.append(about | call["function"])
        for item in items:
            item["status"] = status if item is items[-1] else "completed"
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        return self._response(status, items, counts)

    def stream(self, answer: Answer) -> bytes:
        events = enumerate(self._events(self.whole(answer)))
        return named_events(event | {"sequence_number": number} for number, event in events)

    def _response(self, status: str, items: Sequence[Json], usage: Json | None) -> Json:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": self._asked.tools or [],
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

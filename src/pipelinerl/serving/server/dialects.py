"""OpenAI's Responses API, Anthropic's Messages API, vLLM's API of token ids, and the routes of the APIs below one base URL.

    request ──read──▶ ChatBody or CompletionBody ──▶ Answer ──writer──▶ the API's answer

A request of the first two is translated into one of Chat Completions. What can't be translated is refused by name. Nothing
is stored: a request has the whole input. `pipelinerl serve` and the gateway of agents differ in how they get the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.chat import (
    OTHER_SAMPLING,
    WHOLE_INPUT,
    Answer,
    ChatBody,
    CompletionBody,
    Json,
    ReadRequest,
    Writer,
    read,
    read_body,
    refuse_effect,
)
from pipelinerl.serving.server.http import decoded, server_sent_event
from pipelinerl.types import Completion

Read = Callable[[bytes], ReadRequest]


def api_routes(base: str, respond: Callable[[Request, Read], Awaitable[Response]]) -> list[Route]:
    """A route below `base` for each API. `respond` answers a request, given what reads its body."""

    def route(path: str, read: Read) -> Route:
        async def handle(request: Request) -> Response:
            return await respond(request, read)

        return Route(base + path, handle, methods=["POST"])

    return [
        route("/chat/completions", partial(read, ChatBody)),
        route("/completions", partial(read, CompletionBody)),
        route("/responses", read_responses),
        route("/messages", read_messages),
        route("/v1/messages", read_messages),  # for a base URL that ends with `/v1`: Anthropic's clients add it
    ]


def text_of(content: str | list[Any]) -> str:
    """A text, or parts of one."""
    return content if isinstance(content, str) else "".join(str(part.text) for part in content)


def function_call(call_id: str, name: str, arguments: object) -> Json:
    """A call in a message of Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool of Chat Completions."""
    optional = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name} | {key: value for key, value in optional.items() if value}}


def named_event(event: Json) -> bytes:
    """An event, which has a `type`, as a server-sent event of that name."""
    return b"event: %s\n" % event["type"].encode() + server_sent_event(event)


# ---- the Responses API

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


def read_responses(data: bytes) -> ReadRequest:
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


class ResponsesWriter(Writer):
    """Items of an answer: a message with one text, and calls."""

    def whole(self, answer: Answer) -> Json:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items: list[Json] = []
        if answer.text or not answer.calls:
            content: Json = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            items.append({"type": "message", "id": f"msg_{self.id}_0", "role": "assistant", "content": [content]})
        for number, call in enumerate(answer.calls, len(items)):
            about = {"type": "function_call", "id": f"fc_{self.id}_{number}", "call_id": call["id"]}
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
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": self.asked.tool_choice or "auto",
            "tools": self.asked.tools or [],
            "usage": counts,
        }

    def events(self, answer: Answer) -> Iterable[bytes]:
        response = self.whole(answer)
        begun = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[Json] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        for number, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": number}
            empty: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
            added = item | {"status": "in_progress"} | empty
            events.append({"type": "response.output_item.added", "output_index": number, "item": added})
            if item["type"] == "message":
                place["content_index"] = 0
                (part,) = item["content"]
                text = {"logprobs": [], **place}
                events += [
                    {"type": "response.content_part.added", "part": part | {"text": ""}, **place},
                    {"type": "response.output_text.delta", "delta": part["text"], **text},
                    {"type": "response.output_text.done", "text": part["text"], **text},
                    {"type": "response.content_part.done", "part": part, **place},
                ]
            else:
                kind, arguments = "response.function_call_arguments", item["arguments"]
                events.append({"type": f"{kind}.delta", "delta": arguments, **place})
                events.append({"type": f"{kind}.done", "arguments": arguments, **place})
            events.append({"type": "response.output_item.done", "output_index": number, "item": item})
        events.append({"type": f"response.{response['status']}", "response": response})
        return [named_event(event | {"sequence_number": number}) for number, event in enumerate(events)]


# ---- the Messages API


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


def read_messages(data: bytes) -> ReadRequest:
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
    return ReadRequest(body, partial(MessagesWriter, asked))


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


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(Writer):
    """Blocks of an answer: a text, and calls of tools."""

    def whole(self, answer: Answer) -> Json:
        blocks: list[Json] = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        for call in answer.calls:
            function = call["function"]
            arguments = msgspec.Raw(function["arguments"].encode())
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        stopped = answer.finish_reason == "stop" and answer.stop is not None
        reason = "stop_sequence" if stopped else _STOP_REASONS[answer.finish_reason]
        counts = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        about = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model}
        return {**about, "content": blocks, "stop_reason": reason, "stop_sequence": answer.stop, "usage": counts}

    def events(self, answer: Answer) -> Iterable[bytes]:
        message = self.whole(answer)
        ended = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        begun = {**message, "content": [], **dict.fromkeys(ended), "usage": {**message["usage"], "output_tokens": 0}}
        yield named_event({"type": "message_start", "message": begun})
        for index, block in enumerate(message["content"]):
            if block["type"] == "text":
                opened, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                arguments = bytes(block["input"]).decode()
                opened, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
            yield named_event({"type": "content_block_start", "index": index, "content_block": opened})
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_event({"type": "content_block_stop", "index": index})
        usage = {"output_tokens": answer.completion_tokens}
        yield named_event({"type": "message_delta", "delta": ended, "usage": usage})
        yield named_event({"type": "message_stop"})


# ---- token ids in, token ids out: vLLM's `POST /inference/v1/generate`, the API of clients that render chats themselves

GENERATE = "/inference/v1/generate"
"""vLLM has it beside `/v1`, not below."""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", *OTHER_SAMPLING)
_NOT_FOR_IDS = """
    detokenize include_stop_str_in_output output_kind routed_experts_prompt_start skip_special_tokens
    spaces_between_special_tokens
"""
"""Sampling parameters without an effect on the sampled ids."""


class TokensBody(CompletionBody, frozen=True, kw_only=True):
    """A request whose answer is the sampled ids, with log-probs and versions."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """`cache_salt` and `priority` have no effect: the run decides what a request reads of the cache, and when it starts."""

    token_ids: list[int]
    sampling_params: Json
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None  # of the prompt, which the client has


def read_tokens(data: bytes) -> ReadRequest:
    """Raises RequestError for a request that is malformed, or asks for what is not supported."""
    asked, given = decoded(data, GenerateBody), decoded(data, Json)
    sampling: Json = asked.sampling_params
    if sampling.get("logprobs") not in (None, 0, 1):
        raise RequestError("logprobs: at most 1, because log-probs are of the sampled tokens alone")
    for fields, known in (
        (given, GenerateBody.__struct_fields__),
        (sampling, ("logprobs", *_SAMPLING, *_NOT_FOR_IDS.split())),
    ):
        for name in fields.keys() - known:
            refuse_effect(name, fields[name])
    taken = {name: sampling[name] for name in _SAMPLING if name in sampling}
    try:
        body = msgspec.convert({"model": asked.model, "prompt": asked.token_ids, **taken}, TokensBody)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}") from error
    return ReadRequest(body, partial(TokensWriter, body))


class TokensWriter(Writer):
    """The ids of an answer are in its `beyond`."""

    def whole(self, answer: Answer) -> Json:
        choice = {"index": 0, "finish_reason": answer.finish_reason, **answer.beyond}
        counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        usage = {**counts, "total_tokens": sum(counts.values())}
        return {"request_id": self.id, "model": self.model, "choices": [choice], "prompt_logprobs": None, "usage": usage}


def tokens_of(completion: Completion) -> Json:
    """The tokens of a completion, in the form of vLLM's choices."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": logprob} for token, logprob in pairs]
    spans = [{"version": str(span.version), "start": span.start, "end": span.end} for span in completion.weight_versions]
    return {"token_ids": completion.token_ids, "logprobs": {"content": content}, "weight_versions": spans}

"""Converts an answer of a conversation to the responses of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pipelinerl.environments.chat.conversation import Answer as ModelAnswer
from pipelinerl.serving.agents.session import ChatRequest, Request
from pipelinerl.serving.server.http import server_sent_event
from pipelinerl.serving.server.openai.answers import Answer, Usage

MODEL = "policy"
"""The model's name in responses. Requests may use any name."""


def whole(request: Request, reply: ModelAnswer) -> Answer:
    """The response to a request that doesn't stream."""
    content: dict[str, Any]
    if isinstance(request, ChatRequest):
        kind, content = "chat.completion", {"message": {**reply.message, "refusal": None}}
    else:
        kind, content = "text_completion", {"text": reply.text}
    return _answer(request, reply, kind, [_choice(content, reply.finish_reason)], _usage(reply))


def chunks(request: Request, reply: ModelAnswer) -> Iterator[bytes]:
    """The response as a stream. The answer is one chunk, because tool calls can be parsed only when it is complete."""
    usage = None if request.stream_options is None or not request.stream_options.include_usage else _usage(reply)
    if isinstance(request, ChatRequest):
        kind = "chat.completion.chunk"
        calls = [{**call, "index": number} for number, call in enumerate(reply.message.get("tool_calls", ()))]
        contents: list[dict[str, Any]] = [
            {"delta": {**reply.message, **({"tool_calls": calls} if calls else {})}},
            {"delta": {}},
        ]
    else:
        kind, contents = "text_completion", [{"text": reply.text}, {"text": ""}]
    for content, reason in zip(contents, (None, reply.finish_reason), strict=True):
        yield server_sent_event(_answer(request, reply, kind, [_choice(content, reason)]))
    if usage is not None:
        yield server_sent_event(_answer(request, reply, kind, [], usage))
    yield b"data: [DONE]\n\n"


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}


def _answer(
    request: Request, reply: ModelAnswer, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None
) -> Answer:
    answer = Answer(
        id=reply.completion.request_id,
        object=kind,
        model=request.model or MODEL,
        created=int(time.time()),
        choices=choices,
    )
    return answer if usage is None else msgspec.structs.replace(answer, usage=usage)


def _usage(reply: ModelAnswer) -> Usage:
    prompt, completion = len(reply.prompt.ids), len(reply.completion.token_ids)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

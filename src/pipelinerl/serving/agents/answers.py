"""What an agent gets: OpenAI's shapes around an answer of a conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pipelinerl.environments.chat.conversation import Answer as Said
from pipelinerl.serving.agents.session import ChatRequest, Request
from pipelinerl.serving.server.http import server_sent_event
from pipelinerl.serving.server.openai.answers import Answer, Usage

MODEL = "policy"
"""What the model is called. Requests may call it as they like."""


def whole(request: Request, said: Said) -> Answer:
    """The answer to a request that doesn't stream."""
    content: dict[str, Any]
    if isinstance(request, ChatRequest):
        kind, content = "chat.completion", {"message": {**said.message, "refusal": None}}
    else:
        kind, content = "text_completion", {"text": said.text}
    return _answer(request, said, kind, [_choice(content, said.finish_reason)], _usage(said))


def chunks(request: Request, said: Said) -> Iterator[bytes]:
    """The same as a stream: of one piece, as an answer is read for tool calls when it is whole."""
    usage = None if request.stream_options is None or not request.stream_options.include_usage else _usage(said)
    if isinstance(request, ChatRequest):
        kind = "chat.completion.chunk"
        calls = [{**call, "index": number} for number, call in enumerate(said.message.get("tool_calls", ()))]
        contents: list[dict[str, Any]] = [
            {"delta": {**said.message, **({"tool_calls": calls} if calls else {})}},
            {"delta": {}},
        ]
    else:
        kind, contents = "text_completion", [{"text": said.text}, {"text": ""}]
    for content, reason in zip(contents, (None, said.finish_reason), strict=True):
        yield server_sent_event(_answer(request, said, kind, [_choice(content, reason)]))
    if usage is not None:
        yield server_sent_event(_answer(request, said, kind, [], usage))
    yield b"data: [DONE]\n\n"


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}


def _answer(request: Request, said: Said, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> Answer:
    answer = Answer(
        id=said.completion.request_id,
        object=kind,
        model=request.model or MODEL,
        created=int(time.time()),
        choices=choices,
    )
    return answer if usage is None else msgspec.structs.replace(answer, usage=usage)


def _usage(said: Said) -> Usage:
    prompt, completion = len(said.prompt.ids), len(said.completion.token_ids)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

"""Answers of OpenAI's API, and how they are built from a generation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from pipelinerl.interfaces import Tokenizer
from pipelinerl.serving.server.exchange import Exchange, Generation
from pipelinerl.serving.server.http import server_sent_event, unavailable
from pipelinerl.serving.server.text import PART, StopStrings, TextStream
from pipelinerl.types import TokenEvent, VersionSpan

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
"""The end of a stream."""


class AnswerWriter:
    """Builds the answer to one request, whole or in chunks, to a chat or to a text completion."""

    def __init__(self, answer_id: str, model: str, *, chat: bool) -> None:
        self._kind, self._chunk_kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        self._fields = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, choice: Json, usage: Json) -> Json:
        return self._fields | {"object": self._kind, "choices": [choice], "usage": usage}

    def chunk(self, choices: Sequence[Json], **usage: Json | None) -> bytes:
        """A chunk as a server-sent event. If the stream ends with a usage chunk, all other chunks may have usage null."""
        return server_sent_event(self._fields | {"object": self._chunk_kind, "choices": choices} | usage)


def choice_of(content: Json, finish_reason: str | None, logprobs: Json | None = None) -> Json:
    """A choice, or the part of it in one chunk. `content`: its `message`, `delta` or `text`."""
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenEvent]) -> Json:
    """`bytes` is None for a token that is part of a character."""
    content = []
    for event in tokens:
        text = _token_text(tokenizer, event)
        data = None if PART in text else list(text.encode())
        content.append({"token": text, "logprob": event.logprob, "bytes": data, "top_logprobs": ()})
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenEvent], offsets: Sequence[int]) -> Json:
    """`offsets`: for each token, the number of characters that were final before it."""
    return {
        "tokens": [_token_text(tokenizer, event) for event in tokens],
        "token_logprobs": [event.logprob for event in tokens],
        "text_offset": offsets,
        "top_logprobs": None,
    }


def _token_text(tokenizer: Tokenizer, event: TokenEvent) -> str:
    return tokenizer.decode([event.token_id], skip_special_tokens=False)


# ---- a generation as pieces of text


class Piece(NamedTuple):
    """Tokens, and the text that became final with them. `end`: the finish reason of the last piece, else None."""

    tokens: list[TokenEvent]
    text: str
    end: str | None = None
    prompt_versions: tuple[VersionSpan, ...] = ()


async def pieces(
    exchange: Exchange, generation: Generation, tokenizer: Tokenizer, stops: Sequence[str], *, singly: bool
) -> AsyncGenerator[Piece]:
    """Yield the text of a generation in pieces; the last piece has no tokens.

    `singly`: one piece per token; otherwise one per batch. With stop strings, always one per token. Raises the request's
    error if it was refused, or was cancelled because the server stops.
    """
    text, stop = TextStream(tokenizer), StopStrings(stops)
    async for batch in generation.batches():
        size = 1 if singly or stops else len(batch)
        for start in range(0, len(batch), size):
            tokens = batch[start : start + size]
            yield Piece(tokens, stop.feed(text.feed([event.token_id for event in tokens])))
            if stop.found:
                break
        if stop.found:
            exchange.cancel(generation.request.id)
            break
    completion = await generation.completion()
    if completion.finish_reason == "cancelled" and not stop.found:
        raise unavailable("the request was cancelled")
    rest = stop.feed(text.rest()) + stop.rest()
    yield Piece([], rest, "stop" if stop.found else completion.finish_reason, completion.prompt_versions)

"""Answers of OpenAI's API, and how they are built from a generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from pipelinerl.environments.prompts import TextStream
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import PART, Tokenizer
from pipelinerl.serving.server.extras import Extras, Likeliest
from pipelinerl.serving.server.http import server_sent_event, unavailable
from pipelinerl.serving.server.served import Generation, ServedEngine
from pipelinerl.serving.server.text import StopStrings
from pipelinerl.serving.wire import ErrorBody
from pipelinerl.types import TokenEvent, VersionSpan

Json = dict[str, Any]
T = TypeVar("T")

_LOWEST_LOGPROB = -9999.0
"""Instead of -inf, which JSON lacks, as in vLLM: for tokens beyond `top_p` or `top_k`."""


class Writer(Protocol):
    """Builds the answer to one request, whole or in chunks, from choices of OpenAI's API (see `choice_of`)."""

    def whole(self, choices: Sequence[Json], usage: Json) -> Json: ...

    def chunk(self, choices: Sequence[Json], **usage: Json | None) -> bytes:
        """A part of a stream. If the stream ends with a usage chunk, all other chunks may have usage null."""

    def end(self) -> bytes:
        """The end of a stream."""

    def error(self, body: ErrorBody) -> bytes:
        """The end of a stream that failed."""


MakeWriter = Callable[[str, str, int], Writer]
"""(id of the answer, the model's name, number of tokens of the prompt) -> the writer."""


class AnswerWriter:
    """The writer of chats and text completions."""

    def __init__(self, answer_id: str, model: str, _prompt_tokens: int, *, chat: bool) -> None:
        self._kind, self._chunk_kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        self._fields = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        return self._fields | {"object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, choices: Sequence[Json], **usage: Json | None) -> bytes:
        return server_sent_event(self._fields | {"object": self._chunk_kind, "choices": choices} | usage)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, body: ErrorBody) -> bytes:
        return server_sent_event(body)


chat_writer, text_writer = partial(AnswerWriter, chat=True), partial(AnswerWriter, chat=False)


def choice_of(content: Json, finish_reason: str | None, logprobs: Json | None = None, *, index: int = 0) -> Json:
    """A choice, or the part of it in one chunk. `content`: its `message`, `delta` or `text`."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


# ---- log-probs


class ScoredToken(NamedTuple):
    """`offset`: number of characters that were final before it."""

    token_id: int
    logprob: float
    likeliest: Likeliest
    offset: int = 0


class LogprobWriter:
    """Writes log-probs with `top` alternatives. `as_ids`: tokens are written as "token_id:5"."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_ids: bool) -> None:
        self._tokenizer, self._top, self._as_ids = tokenizer, top, as_ids

    def of_chat(self, tokens: Iterable[ScoredToken]) -> Json:
        content = []
        for token in tokens:
            likeliest = [self._token(*pair) for pair in _with_exact(token)[: self._top]]
            content.append(self._token(token.token_id, token.logprob) | {"top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def of_text(self, tokens: Sequence[ScoredToken]) -> Json:
        """As in vLLM, the alternatives to a token include the token itself, first."""
        tops: list[dict[str, float]] = []
        for token in tokens:
            chosen = (token.token_id, token.logprob)
            pairs = [chosen, *(pair for pair in _with_exact(token)[: self._top] if pair != chosen)]
            by_text: dict[str, float] = {}
            for one, value in pairs:
                by_text.setdefault(self._text(one), max(value, _LOWEST_LOGPROB))
            tops.append(by_text)
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "text_offset": [token.offset for token in tokens],
            "top_logprobs": tops,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        """`bytes` is None for a token that is part of a character."""
        text = self._text(token_id)
        data = None if PART in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": data}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.decode([token_id], skip_special_tokens=False)


def _with_exact(token: ScoredToken) -> Likeliest:
    """The likeliest tokens. The log-prob of the token itself is that which it was sampled with, not its float32 rounding."""
    return [(one, token.logprob if one == token.token_id else value) for one, value in token.likeliest]


# ---- a generation as pieces of text


class Piece(NamedTuple):
    """Tokens, and the text that became final with them. `end`: the finish reason of the last piece, else None.

    `stop`: the stop string or stop token of the request that ended the text.
    """

    tokens: list[TokenEvent]
    text: str
    end: str | None = None
    prompt_versions: tuple[VersionSpan, ...] = ()
    stop: str | int | None = None


async def pieces(
    engine: ServedEngine,
    generation: Generation,
    extras: Extras | None,
    text: TextStream,
    stop: StopStrings,
    *,
    singly: bool,
    silent: Container[int],
) -> AsyncGenerator[Piece]:
    """Yield the text of a generation in pieces; the last piece has no tokens.

    `singly`: one piece per token; otherwise one per batch. `silent`: tokens without text. Raises the request's error if it
    was refused, or was cancelled because the server stops.
    """
    last_id: int | None = None
    read: tuple[VersionSpan, ...] = ()
    async for batch in generation.batches():
        size = 1 if singly else len(batch)
        for start in range(0, len(batch), size):
            tokens = batch[start : start + size]
            last_id = tokens[-1].token_id
            read = next((event.prompt_versions for event in reversed(tokens) if event.prompt_versions), read)
            yield Piece(tokens, stop.feed(text.feed([event.token_id for event in tokens if event.token_id not in silent])))
            if stop.found is not None:
                break
        if stop.found is not None:
            engine.cancel(generation.request.id)
            break
    completion = await generation.completion()
    if stop.found is None:
        if extras is not None and extras.error is not None:
            raise RequestError(extras.error)
        if completion.finish_reason == "cancelled":
            raise unavailable("the request was cancelled")
    rest = stop.feed(text.rest()) + stop.rest()
    if stop.found is not None:
        yield Piece([], rest, "stop", read, stop.found)
    else:
        by = last_id if completion.finish_reason == "stop" else None
        yield Piece([], rest, completion.finish_reason, completion.prompt_versions, by)


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """The items of all streams as they arrive."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

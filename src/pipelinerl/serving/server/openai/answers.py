"""Answers of OpenAI's API, and how they are built from a generation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from pipelinerl.interfaces import Tokenizer
from pipelinerl.serving.server.exchange import Exchange, Generation
from pipelinerl.serving.server.http import unavailable
from pipelinerl.serving.server.text import PART, StopStrings, TextStream
from pipelinerl.types import TokenEvent, VersionSpan


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a choice beyond OpenAI's API, included on request.

    `weight_versions`: spans over the completion's tokens. In every chunk of a stream, `start` and `end` count from the
    completion's first token; the last chunk has all spans.
    """

    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    weight_versions: tuple[VersionSpan, ...] | UnsetType = UNSET
    prompt_versions: tuple[VersionSpan, ...] | UnsetType = UNSET


class ChosenToken(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes` is None for a token that is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: tuple[()] = ()


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChosenToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Provenance, frozen=True, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    index: int = 0


class ChatChunkChoice(Provenance, frozen=True, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0


class TextChoice(Provenance, frozen=True, kw_only=True):
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None = None
    index: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer, or a chunk of a stream."""

    id: str
    object: str
    model: str
    created: int
    choices: Sequence[Any]
    usage: Usage | UnsetType | None = UNSET


class Part(NamedTuple):
    """A complete choice, or the content of one chunk.

    `tokens`: the tokens to report with log-probabilities; None: log-probabilities were not requested. `offsets`: for each
    token, the number of characters that were final before it. `end`: the finish reason, or None if more follows.
    `provenance`: fields of `Provenance`.
    """

    text: str
    tokens: Sequence[TokenEvent] | None
    offsets: Sequence[int]
    end: str | None
    provenance: Mapping[str, Any]


class Format(Protocol):
    """How an endpoint formats its choices."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def opening(self) -> Provenance | None:
        """The first choice of a stream, before any token."""
        ...

    def whole(self, part: Part) -> Provenance: ...

    def chunk(self, part: Part) -> Provenance: ...


class ChatFormat:
    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> ChatChunkChoice:
        return ChatChunkChoice(delta=Delta(role="assistant", content=""))

    def whole(self, part: Part) -> ChatChoice:
        message = ChatMessage(content=part.text)
        return ChatChoice(message=message, logprobs=self._logprobs(part), finish_reason=part.end, **part.provenance)

    def chunk(self, part: Part) -> ChatChunkChoice:
        delta = Delta(content=part.text if part.text else UNSET)
        return ChatChunkChoice(delta=delta, logprobs=self._logprobs(part), finish_reason=part.end, **part.provenance)

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        if part.tokens is None:
            return None
        texts = [_token_text(self._tokenizer, event) for event in part.tokens]
        chosen = [
            ChosenToken(token=text, logprob=event.logprob, bytes=None if PART in text else list(text.encode()))
            for text, event in zip(texts, part.tokens, strict=True)
        ]
        return ChatLogprobs(content=chosen)


class TextFormat:
    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> None:
        return None

    def whole(self, part: Part) -> TextChoice:
        return TextChoice(text=part.text, logprobs=self._logprobs(part), finish_reason=part.end, **part.provenance)

    chunk = whole

    def _logprobs(self, part: Part) -> TextLogprobs | None:
        if part.tokens is None:
            return None
        return TextLogprobs(
            tokens=[_token_text(self._tokenizer, event) for event in part.tokens],
            token_logprobs=[event.logprob for event in part.tokens],
            text_offset=list(part.offsets),
        )


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

"""OpenAI's endpoints: `/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.serving.server.exchange import Generation
from pipelinerl.serving.server.http import RefusedError, Stream, answer, body_of, server_sent_event, unless_gone
from pipelinerl.serving.server.openai.answers import (
    Answer,
    ChatFormat,
    Format,
    Part,
    Piece,
    Provenance,
    TextFormat,
    Usage,
    pieces,
)
from pipelinerl.serving.server.openai.bodies import Body, ChatBody, CompletionBody, read_body
from pipelinerl.serving.server.service import Service, ServiceHolder
from pipelinerl.types import GenerationRequest, TokenEvent, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""
_DONE = b"data: [DONE]\n\n"


class OpenAI:
    """Handlers of the endpoints. They raise RefusedError (503) until `holder` has a service."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    async def models(self, _: Request) -> Response:
        service = self._holder.service
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pipelinerl"}
        return answer({"object": "list", "data": [model | {"max_model_len": service.loaded.max_length}]})

    async def chat(self, request: Request) -> Response:
        service = self._holder.service
        body = read_body(await body_of(request), ChatBody)
        messages = [message.for_template() for message in body.messages]
        prompt_ids = await service.prompts.of_chat(messages, body.template_options)
        form = ChatFormat(service.loaded.tokenizer)
        return await _respond(request, _Call(service, body, form, prompt_ids, body.wants_logprobs, None))

    async def completions(self, request: Request) -> Response:
        service = self._holder.service
        body = read_body(await body_of(request), CompletionBody)
        prompt = body.one_prompt
        prompt_ids = await service.prompts.of_text(prompt) if isinstance(prompt, str) else tuple(prompt)
        form = TextFormat(service.loaded.tokenizer)
        return await _respond(request, _Call(service, body, form, prompt_ids, body.wants_logprobs, _COMPLETION_TOKENS))


@dataclass(frozen=True)
class _Call:
    """A decoded request to either endpoint. `default_tokens`: the default token limit; None: as many as fit."""

    service: Service
    body: Body
    form: Format
    prompt_ids: tuple[int, ...]
    logprobs: bool
    default_tokens: int | None

    def request(self) -> GenerationRequest:
        """The engine's request. Raises RefusedError for another model's name, RequestError for invalid parameters."""
        service, body = self.service, self.body
        if body.model is not None and body.model != service.name:
            raise RefusedError(
                "not_found", f"there is no model {body.model!r}; this server has {service.name!r}", param="model"
            )
        room = service.loaded.max_length - len(self.prompt_ids)
        sampling = body.sampling(
            default=room if self.default_tokens is None else min(room, self.default_tokens),
            end_ids=service.loaded.stop_token_ids,
        )
        request_id = self.form.id_prefix + secrets.token_hex(12)
        streams = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
        return GenerationRequest(id=request_id, prompt_ids=self.prompt_ids, sampling=sampling, stream=streams)

    def pieces(self, generation: Generation) -> AsyncGenerator[Piece]:
        service = self.service
        return pieces(service.exchange, generation, service.loaded.tokenizer, self.body.stops, singly=self.logprobs)

    def provenance(self, tokens: Sequence[TokenEvent], whole: Piece | None) -> dict[str, Any]:
        """The fields of `Provenance` for some tokens. With `whole`, the last piece, `tokens` are all tokens."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["token_ids"] = tuple(event.token_id for event in tokens)
            if whole:
                fields["prompt_token_ids"] = self.prompt_ids
        if self.body.return_weight_versions:
            first = tokens[0].index if tokens else 0
            spans = spans_from_versions(event.version for event in tokens)
            fields["weight_versions"] = [
                msgspec.structs.replace(span, start=span.start + first, end=span.end + first) for span in spans
            ]
            if whole:
                fields["prompt_versions"] = whole.prompt_versions
        return fields


async def _respond(request: Request, call: _Call) -> Response:
    exchange = call.service.exchange
    with ExitStack() as stack:
        generation = exchange.submit(call.request())
        stack.enter_context(exchange.following(generation))
        if not call.body.stream:
            return answer(await unless_gone(request, _whole(call, generation)))
        await unless_gone(request, generation.begun())  # refused requests get an error status, not a stream
        return Stream(_chunks(call, generation), stack.pop_all(), server_sent_event, "text/event-stream")


async def _whole(call: _Call, generation: Generation) -> Answer:
    text, tokens, offsets = "", list[TokenEvent](), list[int]()
    last = Piece([], "")
    async for last in call.pieces(generation):
        tokens += last.tokens
        offsets += [len(text)] * len(last.tokens)
        text += last.text
    part = Part(text, tokens if call.logprobs else None, offsets, last.end, call.provenance(tokens, last))
    answer_ = _Writer(call, generation).answer(call.form.kind, [call.form.whole(part)])
    return msgspec.structs.replace(answer_, usage=_usage(call, len(tokens)))


async def _chunks(call: _Call, generation: Generation) -> AsyncGenerator[bytes]:
    write = _Writer(call, generation).chunk
    if (opening := call.form.opening()) is not None:
        yield write([opening])
    shown, tokens = 0, list[TokenEvent]()
    async for piece in call.pieces(generation):
        tokens += piece.tokens
        more = call.provenance(tokens, piece) if piece.end else call.provenance(piece.tokens, None)
        if piece.end:
            more.pop("token_ids", None)  # already sent with the earlier chunks
        if piece.text or piece.end or more or call.logprobs:
            wanted = piece.tokens if call.logprobs and piece.tokens else None
            yield write([call.form.chunk(Part(piece.text, wanted, [shown] * len(piece.tokens), piece.end, more))])
        shown += len(piece.text)
    if call.body.include_usage:
        yield write([], _usage(call, len(tokens)))
    yield _DONE


def _usage(call: _Call, completion_tokens: int) -> Usage:
    prompt_tokens = len(call.prompt_ids)
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    )


class _Writer:
    """Builds the answers of one request from choices."""

    def __init__(self, call: _Call, generation: Generation) -> None:
        self._call = call
        self._id = generation.request.id
        self._created = int(time.time())

    def answer(self, kind: str, choices: Sequence[Provenance]) -> Answer:
        name = self._call.service.name
        return Answer(id=self._id, object=kind, model=name, created=self._created, choices=choices)

    def chunk(self, choices: Sequence[Provenance], usage: Usage | None = None) -> bytes:
        """A chunk as a server-sent event. If the stream ends with a usage chunk, all other chunks have usage null."""
        message = self.answer(self._call.form.chunk_kind, choices)
        if self._call.body.include_usage:
            message = msgspec.structs.replace(message, usage=usage)
        return server_sent_event(message)

"""OpenAI's endpoints: `/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.serving.server.exchange import Generation
from pipelinerl.serving.server.http import RefusedError, Stream, answer, body_of, server_sent_event, unless_gone
from pipelinerl.serving.server.openai.answers import (
    DONE,
    AnswerWriter,
    Json,
    Piece,
    chat_logprobs,
    choice_of,
    pieces,
    text_logprobs,
    usage_of,
)
from pipelinerl.serving.server.openai.bodies import Body, ChatBody, CompletionBody, read_body
from pipelinerl.serving.server.service import Service, ServiceHolder
from pipelinerl.types import GenerationRequest, TokenEvent, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""


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
        return await _respond(request, _Call(service, body, prompt_ids, body.wants_logprobs, chat=True))

    async def completions(self, request: Request) -> Response:
        service = self._holder.service
        body = read_body(await body_of(request), CompletionBody)
        prompt = body.one_prompt
        prompt_ids = await service.prompts.of_text(prompt) if isinstance(prompt, str) else tuple(prompt)
        return await _respond(request, _Call(service, body, prompt_ids, body.wants_logprobs, chat=False))


@dataclass(frozen=True)
class _Call:
    """A decoded request to either endpoint."""

    service: Service
    body: Body
    prompt_ids: tuple[int, ...]
    wants_logprobs: bool
    chat: bool

    def request(self) -> GenerationRequest:
        """The engine's request. Raises RefusedError for another model's name, RequestError for invalid parameters."""
        service, body = self.service, self.body
        if body.model is not None and body.model != service.name:
            raise RefusedError(
                "not_found", f"there is no model {body.model!r}; this server has {service.name!r}", param="model"
            )
        room = service.loaded.max_length - len(self.prompt_ids)
        sampling = body.sampling(
            default=room if self.chat else min(room, _COMPLETION_TOKENS),
            end_ids=service.loaded.stop_token_ids,
        )
        request_id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        streams = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
        return GenerationRequest(id=request_id, prompt_ids=self.prompt_ids, sampling=sampling, stream=streams)

    def pieces(self, generation: Generation) -> AsyncGenerator[Piece]:
        service = self.service
        return pieces(service.exchange, generation, service.loaded.tokenizer, self.body.stops, singly=self.wants_logprobs)

    def logprobs(self, tokens: Sequence[TokenEvent], offsets: Sequence[int]) -> Json | None:
        """The log-probabilities of some tokens, if they are wanted."""
        if not self.wants_logprobs:
            return None
        tokenizer = self.service.loaded.tokenizer
        return chat_logprobs(tokenizer, tokens) if self.chat else text_logprobs(tokenizer, tokens, offsets)

    def provenance(self, tokens: Sequence[TokenEvent], whole: Piece | None) -> Json:
        """Fields of a choice beyond OpenAI's API, on request. With `whole`, the last piece, `tokens` are all tokens.

        `weight_versions`: spans over the completion's tokens. In every chunk of a stream, `start` and `end` count from the
        completion's first token; the last chunk has all spans.
        """
        fields: Json = {}
        if self.body.return_token_ids:
            fields["token_ids"] = [event.token_id for event in tokens]
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

    def writer(self, generation: Generation) -> AnswerWriter:
        return AnswerWriter(generation.request.id, self.service.name, chat=self.chat)


async def _respond(request: Request, call: _Call) -> Response:
    exchange = call.service.exchange
    with ExitStack() as stack:
        generation = exchange.submit(call.request())
        stack.enter_context(exchange.following(generation))
        if not call.body.stream:
            return answer(await unless_gone(request, _whole(call, generation)))
        await unless_gone(request, generation.begun())  # refused requests get an error status, not a stream
        return Stream(_chunks(call, generation), stack.pop_all(), server_sent_event, "text/event-stream")


async def _whole(call: _Call, generation: Generation) -> Json:
    text, tokens, offsets = "", list[TokenEvent](), list[int]()
    last = Piece([], "")
    async for last in call.pieces(generation):
        tokens += last.tokens
        offsets += [len(text)] * len(last.tokens)
        text += last.text
    message = {"role": "assistant", "content": text, "refusal": None}
    content: Json = {"message": message} if call.chat else {"text": text}
    choice = choice_of(content, last.end, call.logprobs(tokens, offsets)) | call.provenance(tokens, last)
    return call.writer(generation).whole(choice, usage_of(len(call.prompt_ids), len(tokens)))


async def _chunks(call: _Call, generation: Generation) -> AsyncGenerator[bytes]:
    writer = call.writer(generation)
    no_usage: Json = {"usage": None} if call.body.include_usage else {}
    if call.chat:
        yield writer.chunk([choice_of({"delta": {"role": "assistant", "content": ""}}, None)], **no_usage)
    shown, tokens = 0, list[TokenEvent]()
    async for piece in call.pieces(generation):
        tokens += piece.tokens
        more = call.provenance(tokens, piece) if piece.end else call.provenance(piece.tokens, None)
        if piece.end:
            more.pop("token_ids", None)  # already sent with the earlier chunks
        if piece.text or piece.end or more or call.wants_logprobs:
            logprobs = call.logprobs(piece.tokens, [shown] * len(piece.tokens)) if piece.tokens else None
            delta = {"content": piece.text} if piece.text else {}
            content: Json = {"delta": delta} if call.chat else {"text": piece.text}
            yield writer.chunk([choice_of(content, piece.end, logprobs) | more], **no_usage)
        shown += len(piece.text)
    if call.body.include_usage:
        yield writer.chunk([], usage=usage_of(len(call.prompt_ids), len(tokens)))
    yield DONE

"""OpenAI's endpoints `/v1/chat/completions`, `/v1/completions`, `/v1/models`.

`/v1/responses` and Anthropic's `/v1/messages` are translated into chats (`dialects`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.environments.chat.messages import ParsedText, answer_message, parse_tool_calls
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import RequestError
from pipelinerl.serving.server.dialects import messages, responses
from pipelinerl.serving.server.dialects.common import Translated
from pipelinerl.serving.server.extras import ExtendedRequest, Extras, Penalties, Rule
from pipelinerl.serving.server.http import RefusedError, Stream, answer, body_of, unless_gone
from pipelinerl.serving.server.openai.answers import (
    Json,
    LogprobWriter,
    MakeWriter,
    Piece,
    ScoredToken,
    chat_writer,
    choice_of,
    merged,
    pieces,
    text_writer,
    usage_of,
)
from pipelinerl.serving.server.openai.bodies import ChatBody, CompletionBody, read_body
from pipelinerl.serving.server.served import Generation
from pipelinerl.serving.server.service import Service, ServiceHolder
from pipelinerl.serving.server.text import StopStrings, ToolCallStream
from pipelinerl.types import GenerationRequest, SamplingParams, TokenEvent, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""


class OpenAI:
    """Handlers of the endpoints. They raise RefusedError (503) until `holder` has a service."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    async def models(self, _: Request) -> Response:
        return answer({"object": "list", "data": [_model(self._holder.service)]})

    async def model(self, request: Request) -> Response:
        service = self._holder.service
        _require_model(service, request.path_params["name"])
        return answer(_model(service))

    async def chat(self, request: Request) -> Response:
        service = self._holder.service
        return await self._chat(service, request, Translated(read_body(await body_of(request), ChatBody), chat_writer))

    async def responses(self, request: Request) -> Response:
        service = self._holder.service
        return await self._chat(service, request, responses.read(await body_of(request)))

    async def messages(self, request: Request) -> Response:
        service = self._holder.service
        return await self._chat(service, request, messages.read(await body_of(request)))

    async def _chat(self, service: Service, request: Request, asked: Translated) -> Response:
        body = asked.body
        _require_model(service, body.model)
        ids = await service.prompts.of_chat(body.messages, body.template_options, body.offered_tools)
        return await _Call(service, body, [ids], asked.writer).respond(request)

    async def completions(self, request: Request) -> Response:
        service = self._holder.service
        body = read_body(await body_of(request), CompletionBody)
        _require_model(service, body.model)
        _check_choices(service, len(body.prompts) * body.choices)
        prompts = [
            await service.prompts.of_text(given, special=body.add_special_tokens) if isinstance(given, str) else tuple(given)
            for given in body.prompts
        ]
        return await _Call(service, body, prompts, text_writer).respond(request)


def _model(service: Service) -> Json:
    about = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pipelinerl"}
    return about | {"max_model_len": service.loaded.max_length}


def _require_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        raise RefusedError("not_found", f"there is no model {name!r}; this server has {service.name!r}", param="model")


def _check_choices(service: Service, count: int) -> None:
    if count > service.engine.most_open:
        raise RequestError(
            f"{count} answers (prompts times `n`): this server accepts {service.engine.most_open} at once (--engine.slots, "
            "--max-queue)"
        )


def _check_ids(service: Service, ids: Sequence[int]) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < service.loaded.vocabulary:
        raise RequestError(f"token ids outside the model's vocabulary of {service.loaded.vocabulary}")


def _call_prefix() -> str:
    return f"call{secrets.token_hex(4)}"


@dataclass
class _Choice:
    """One answer to a prompt. `tokens` and `text` are what has been generated so far."""

    index: int
    generation: Generation
    extras: Extras | None
    tokens: list[TokenEvent] = field(default_factory=list)
    text: str = ""


class _Call:
    """A decoded request for answers to `prompts`, one chat or several texts."""

    def __init__(
        self, service: Service, body: ChatBody | CompletionBody, prompts: Sequence[tuple[int, ...]], writer: MakeWriter
    ) -> None:
        self._service, self._body, self._prompts = service, body, prompts
        self._tokenizer = service.loaded.tokenizer
        self._chat = chat = isinstance(body, ChatBody)
        self._tools = isinstance(body, ChatBody) and bool(body.offered_tools)
        self._top = body.top  # alternatives to each token; None: no log-probs
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._writer = writer(self._id, service.name, len(prompts[0]))
        self._logprobs = LogprobWriter(self._tokenizer, self._top or 0, as_ids=body.return_tokens_as_token_ids)

    async def respond(self, request: Request) -> Response:
        engine = self._service.engine
        requests = await self._requests()
        with ExitStack() as stack:
            choices = []
            for index, wanted in enumerate(requests):
                generation = engine.submit(wanted)
                stack.enter_context(engine.following(generation))
                extras = wanted.extras if isinstance(wanted, ExtendedRequest) else None
                choices.append(_Choice(index, generation, extras))
            if not self._body.stream:
                return answer(await unless_gone(request, self._whole(choices)))
            for choice in choices:
                await unless_gone(request, choice.generation.begun())  # refused requests get an error status, not a stream
            return Stream(self._stream(choices), stack.pop_all(), self._writer.error, "text/event-stream")

    # ---- requests to the engine

    async def _requests(self) -> list[GenerationRequest]:
        """One request per choice. Raises RequestError for invalid parameters."""
        service, body = self._service, self._body
        count = body.choices * len(self._prompts)
        _check_choices(service, count)
        rules = await self._constraints(count)
        adjustments = body.adjustments(service.loaded.vocabulary)
        streams = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
        requests: list[GenerationRequest] = []
        for index in range(count):
            ids, choice = self._prompts[index // body.choices], index % body.choices
            _check_ids(service, ids)
            sampling = self._sampling(len(ids), choice)
            request_id = self._id if index == 0 else f"{self._id}-{index}"
            of_choice: list[Rule] = [] if adjustments is None else [Penalties(ids, adjustments, sampling.temperature)]
            of_choice += rules[index : index + 1]
            if of_choice or self._top:
                extras = Extras(top=self._top or 0, rules=of_choice)
                requests.append(
                    ExtendedRequest(id=request_id, prompt_ids=ids, sampling=sampling, stream=True, extras=extras)
                )
            else:
                requests.append(GenerationRequest(id=request_id, prompt_ids=ids, sampling=sampling, stream=streams))
        return requests

    def _sampling(self, prompt_tokens: int, choice: int) -> SamplingParams:
        loaded, body = self._service.loaded, self._body
        if body.grammar is not None:
            body = msgspec.structs.replace(body, ignore_eos=False)  # nothing may follow the end of the grammar
        if body.seed is not None:
            body = msgspec.structs.replace(body, seed=body.seed + choice)
        room = loaded.max_length - prompt_tokens
        default = room if self._chat else min(room, _COMPLETION_TOKENS)
        return body.sampling(default=default, end_ids=loaded.stop_token_ids)

    async def _constraints(self, count: int) -> Sequence[Rule]:
        grammar = self._body.grammar
        if grammar is None:
            return ()
        grammars = await asyncio.to_thread(self._service.grammars, grammar.key)
        return await asyncio.to_thread(grammars.rules, grammar, count)

    # ---- answers

    async def _pieces(self, choice: _Choice) -> AsyncGenerator[Piece]:
        """The pieces of one choice. Each is added to the choice after it was handled."""
        body = self._body
        text = TextStream(plain_decoder(self._tokenizer, special=not body.skip_special_tokens))
        stop = StopStrings(body.stops, include=body.include_stop_str_in_output)
        singly = self._top is not None or bool(body.stops)
        silent = () if body.include_stop_str_in_output else choice.generation.request.sampling.stop_token_ids
        engine = self._service.engine
        async for piece in pieces(engine, choice.generation, choice.extras, text, stop, singly=singly, silent=silent):
            yield piece
            choice.tokens += piece.tokens
            choice.text += piece.text

    async def _whole(self, choices: Sequence[_Choice]) -> Json:
        written = await asyncio.gather(*map(self._whole_choice, choices))
        return self._writer.whole(written, self._usage(choices))

    async def _whole_choice(self, choice: _Choice) -> Json:
        scored: list[ScoredToken] = []
        async for piece in self._pieces(choice):
            scored += self._scored(choice, piece)
            last = piece
        content: Json = {"text": choice.text}
        called = False
        if self._chat:
            parsed = parse_tool_calls(choice.text) if self._tools else ParsedText(choice.text)
            content, called = {"message": answer_message(parsed, _call_prefix()) | {"refusal": None}}, bool(parsed.calls)
        return self._choice(choice, content, scored, last, called=called)

    async def _stream(self, choices: Sequence[_Choice]) -> AsyncGenerator[bytes]:
        async for chunk in merged([self._chunks(choice) for choice in choices]):
            yield chunk
        if self._body.include_usage:
            yield self._writer.chunk([], usage=self._usage(choices))
        yield self._writer.end()

    async def _chunks(self, choice: _Choice) -> AsyncGenerator[bytes]:
        no_usage: Json = {"usage": None} if self._body.include_usage else {}
        shows_tokens = self._body.return_token_ids or self._body.return_weight_versions
        if self._chat:
            first = choice_of({"delta": {"role": "assistant", "content": ""}}, None, index=choice.index)
            yield self._writer.chunk([first], **no_usage)
        calls = ToolCallStream(_call_prefix()) if self._tools else None
        async for piece in self._pieces(choice):
            content: Any = piece.text
            if self._chat:
                text: Json = {"content": piece.text} if piece.text else {}
                content = text if calls is None else calls.feed(piece.text, end=piece.end is not None)
            scored = self._scored(choice, piece)
            if content or piece.end or scored or shows_tokens:
                named = {"delta" if self._chat else "text": content}
                called = calls is not None and calls.called
                yield self._writer.chunk([self._choice(choice, named, scored, piece, called=called, chunk=True)], **no_usage)

    def _choice(
        self,
        choice: _Choice,
        content: Json,
        scored: Sequence[ScoredToken],
        piece: Piece,
        *,
        called: bool,
        chunk: bool = False,
    ) -> Json:
        """A choice, whose last piece is `piece`; or with `chunk` that piece alone."""
        body = self._body
        named = isinstance(body, ChatBody) and not isinstance(body.tool_choice, str | None)
        reason = "tool_calls" if called and piece.end == "stop" and not named else piece.end
        logprobs = None
        if self._top is not None and (scored or not chunk):
            logprobs = self._logprobs.of_chat(scored) if self._chat else self._logprobs.of_text(scored)
        fields = choice_of(content, reason, logprobs, index=choice.index)
        if isinstance(piece.stop, str) or (piece.stop is not None and piece.stop in (body.stop_token_ids or ())):
            fields["stop_reason"] = piece.stop
        return fields | self._provenance(choice, piece, chunk=chunk)

    def _usage(self, choices: Sequence[_Choice]) -> Json:
        return usage_of(sum(map(len, self._prompts)), sum(len(choice.tokens) for choice in choices))

    def _scored(self, choice: _Choice, piece: Piece) -> list[ScoredToken]:
        if self._top is None:
            return []
        tops = choice.extras.tops if choice.extras is not None and self._top else None
        offset = len(choice.text)
        return [ScoredToken(one.token_id, one.logprob, tops[one.index] if tops else [], offset) for one in piece.tokens]

    def _provenance(self, choice: _Choice, piece: Piece, *, chunk: bool) -> Json:
        """Fields of a choice beyond OpenAI's API, on request.

        `weight_versions`: spans over the completion's tokens. In every chunk of a stream, `start` and `end` count from the
        completion's first token; the last chunk has all spans, but no `token_ids`.
        """
        fields: Json = {}
        last = piece.end is not None
        tokens = choice.tokens if last else piece.tokens
        if self._body.return_token_ids:
            if not (chunk and last):
                fields["token_ids"] = [event.token_id for event in tokens]
            if last:
                fields["prompt_token_ids"] = choice.generation.request.prompt_ids
        if self._body.return_weight_versions:
            first = tokens[0].index if tokens else 0
            fields["weight_versions"] = [
                msgspec.structs.replace(span, start=span.start + first, end=span.end + first)
                for span in spans_from_versions(event.version for event in tokens)
            ]
            if last:
                fields["prompt_versions"] = piece.prompt_versions
        return fields

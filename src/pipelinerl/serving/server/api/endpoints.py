"""The endpoints of `pipelinerl serve` for chats and texts, and `/v1/models`: from a request to its choices."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.environments.chat.messages import (
    ParsedText,
    answer_message,
    encode_text,
    parse_tool_calls,
    plain_message,
    render,
)
from pipelinerl.environments.prompts import TextStream, has_chat_template, plain_decoder
from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import PART, Tokenizer
from pipelinerl.serving.server.api import Read
from pipelinerl.serving.server.api.answers import AnswerWriter, Json, StopStrings, TextBeforeCalls, choice_of, usage_of
from pipelinerl.serving.server.api.bodies import ChatBody, CompletionBody
from pipelinerl.serving.server.constrained import ConstrainedRequest, Constraint
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    answer,
    body_of,
    server_sent_event,
    unavailable,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedEngine, ServedRequest
from pipelinerl.serving.server.service import Service, ServiceHolder
from pipelinerl.types import GenerationRequest, TokenEvent, VersionSpan, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""
_MAX_CHARACTERS_PER_TOKEN = 128
"""More than any tokenizer's average. A longer text can't fit, so it is refused without being encoded."""
_LONG_TEXT = 20_000
"""Characters. Encoding a longer text takes more than a few milliseconds, so it is done in a thread."""


class Endpoints:
    """Handlers of the endpoints. They raise RefusedError (503) until `holder` has a service."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    async def models(self, _: Request) -> Response:
        return answer({"object": "list", "data": [_model(self._holder.service)]})

    async def model(self, request: Request) -> Response:
        service = self._holder.service
        _require_model(service, request.path_params["name"])
        return answer(_model(service))

    async def respond(self, request: Request, read: Read) -> Response:
        """Answer a chat or a text."""
        service = self._holder.service
        asked = read(await body_of(request))
        body = asked.body
        _require_model(service, body.model)
        prompts = await _prompts(service, body)
        answer_id = ("chatcmpl-" if isinstance(body, ChatBody) else "cmpl-") + secrets.token_hex(12)
        requests = await _requests(service, body, prompts, answer_id)
        prompt_tokens = sum(map(len, prompts))
        with ExitStack() as stack:
            choices = []
            for index, wanted in enumerate(requests):
                served = service.engine.submit(wanted)
                stack.enter_context(service.engine.following(served))
                choices.append(AnswerChoice(service.engine, service.loaded.tokenizer, body, index, served))
            writer = asked.writer(answer_id, service.name)
            if body.stream and isinstance(writer, AnswerWriter):
                for choice in choices:
                    await unless_gone(request, choice.served.begun())  # refused requests get an error status, not a stream
                chunks = _stream(writer, choices, prompt_tokens)
                return StreamedResponse(chunks, stack.pop_all(), server_sent_event, "text/event-stream")
            written = await unless_gone(request, asyncio.gather(*(choice.whole() for choice in choices)))
            usage = usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices))
            return asked.answered(writer, written, usage)


def _model(service: Service) -> Json:
    about = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pipelinerl"}
    return about | {"max_model_len": service.loaded.max_length}


def _require_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        raise RefusedError("not_found", f"there is no model {name!r}; this server has {service.name!r}", param="model")


def _require_room(service: Service, count: int) -> None:
    if count > service.engine.most_open:
        raise RequestError(
            f"{count} answers (prompts times `n`): this server accepts {service.engine.most_open} at once (--engine.slots, "
            "--max-queue)"
        )


async def _prompts(service: Service, body: ChatBody | CompletionBody) -> list[tuple[int, ...]]:
    """The ids of a chat, in the model's chat template, or of one or several texts. Raises RequestError."""
    tokenizer, max_length = service.loaded.tokenizer, service.loaded.max_length

    async def encoded(text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) > max_length * _MAX_CHARACTERS_PER_TOKEN:
            raise PromptTooLongError(f"a prompt of {len(text)} characters can't fit into {max_length} tokens")
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(encode_text, tokenizer, text, special=special)
        return encode_text(tokenizer, text, special=special)

    if isinstance(body, CompletionBody):
        _require_room(service, len(body.prompts) * body.choices)
        return [
            await encoded(one, special=body.add_special_tokens) if isinstance(one, str) else tuple(one)
            for one in body.prompts
        ]
    if not has_chat_template(tokenizer):
        raise RequestError("this model's tokenizer has no chat template: use /v1/completions with a plain prompt")
    if not body.messages:
        raise RequestError("messages: there are none")
    messages = [plain_message(message) for message in body.messages]
    return [await encoded(render(tokenizer, messages, body.offered_tools, body.template_options), special=False)]


async def _requests(
    service: Service, body: ChatBody | CompletionBody, prompts: Sequence[tuple[int, ...]], answer_id: str
) -> list[GenerationRequest]:
    """The engine's requests, one per choice. Raises RequestError for invalid parameters."""
    loaded, count = service.loaded, body.choices * len(prompts)
    _require_room(service, count)
    constraints: Sequence[Constraint] = ()
    if (grammar := body.grammar) is not None:
        body = msgspec.structs.replace(body, ignore_eos=False)  # nothing may follow the end of the grammar
        constraints = await asyncio.to_thread(lambda: service.grammars.constraints(grammar, count))
    by_token = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
    requests: list[GenerationRequest] = []
    for index in range(count):
        prompt_ids = prompts[index // body.choices]
        if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < loaded.vocabulary:
            raise RequestError(f"token ids outside the model's vocabulary of {loaded.vocabulary}")
        room = loaded.max_length - len(prompt_ids)
        default = room if isinstance(body, ChatBody) else min(room, _COMPLETION_TOKENS)
        sampling = body.sampling(default=default, end_ids=loaded.stop_token_ids)
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index % body.choices)
        name = answer_id if index == 0 else f"{answer_id}-{index}"
        if constraints:
            constrained = ConstrainedRequest(
                id=name, prompt_ids=prompt_ids, sampling=sampling, stream=True, constraint=constraints[index]
            )
            requests.append(constrained)
        else:
            requests.append(GenerationRequest(id=name, prompt_ids=prompt_ids, sampling=sampling, stream=by_token))
    return requests


async def _stream(writer: AnswerWriter, choices: Sequence[AnswerChoice], prompt_tokens: int) -> AsyncGenerator[bytes]:
    """The chunks of one choice after the other. All of them are generated at the same time."""
    for choice in choices:
        async for chunk in choice.chunks():
            yield writer.chunk(chunk)
    yield writer.end(usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices)))


# ---- a request of the engine as pieces of text


class TextPiece(NamedTuple):
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
    served: ServedRequest,
    text: TextStream,
    stop: StopStrings,
    *,
    singly: bool,
    silent: Container[int],
) -> AsyncGenerator[TextPiece]:
    """Yield the text of a request in pieces; the last piece has no tokens.

    `singly`: one piece per token; otherwise one per batch. `silent`: tokens without text. Raises the request's error if it
    was refused, or was cancelled because the server stops.
    """
    last_id: int | None = None
    read: tuple[VersionSpan, ...] = ()
    async for batch in served.batches():
        size = 1 if singly else len(batch)
        for start in range(0, len(batch), size):
            tokens = batch[start : start + size]
            last_id = tokens[-1].token_id
            read = next((event.prompt_versions for event in reversed(tokens) if event.prompt_versions), read)
            shown = stop.feed(text.feed([event.token_id for event in tokens if event.token_id not in silent]))
            yield TextPiece(tokens, shown)
            if stop.found is not None:
                break
        if stop.found is not None:
            engine.cancel(served.request.id)
            break
    completion = await served.completion()
    if stop.found is None:
        if isinstance(served.request, ConstrainedRequest) and served.request.constraint.error is not None:
            raise RequestError(served.request.constraint.error)
        if completion.finish_reason == "cancelled":
            raise unavailable("the request was cancelled")
    rest = stop.feed(text.rest()) + stop.rest()
    if stop.found is not None:
        yield TextPiece([], rest, "stop", read, stop.found)
    else:
        by = last_id if completion.finish_reason == "stop" else None
        yield TextPiece([], rest, completion.finish_reason, completion.prompt_versions, by)


class AnswerChoice:
    """One answer to a prompt, as JSON. `tokens` and `text`: what has been generated so far."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        body: ChatBody | CompletionBody,
        index: int,
        served: ServedRequest,
    ) -> None:
        self._engine, self._tokenizer, self._body, self._index = engine, tokenizer, body, index
        self._chat = isinstance(body, ChatBody)
        self._tools = isinstance(body, ChatBody) and bool(body.offered_tools)
        self.served = served
        self.tokens: list[TokenEvent] = []
        self.text = ""

    async def whole(self) -> Json:
        """The complete choice."""
        logprobs: list[ShownToken] = []
        async for piece in self._pieces():
            logprobs += self._logprobs_of(piece)
            self._add(piece)
        if not self._chat:
            return self._choice({"text": self.text}, logprobs, piece)
        message = self._message()
        return self._choice({"message": message | {"refusal": None}}, logprobs, piece, called="tool_calls" in message)

    async def chunks(self) -> AsyncGenerator[Json]:
        """The choice in parts. Tool calls come at the end, with the text between them."""
        if self._chat:
            yield choice_of({"delta": {"role": "assistant", "content": ""}}, None, index=self._index)
        before_calls = TextBeforeCalls()
        async for piece in self._pieces():
            text = before_calls.feed(piece.text) if self._tools else piece.text
            delta: Json = {"content": text} if text else {}
            logprobs = self._logprobs_of(piece)
            self._add(piece)
            called = False
            if self._tools and piece.end is not None:
                rest = before_calls.rest(self._message())
                called = "tool_calls" in rest
                for part in filter(None, (delta, rest)):  # a chunk of their own: clients wait for the next one
                    yield choice_of({"delta": part}, None, index=self._index)
                delta = {}
            if delta or piece.end or logprobs or self._body.return_token_ids or self._body.return_weight_versions:
                content: Json = {"delta": delta} if self._chat else {"text": text}
                yield self._choice(content, logprobs, piece, called=called, chunk=True)

    def _pieces(self) -> AsyncGenerator[TextPiece]:
        body, wanted = self._body, self.served.request
        text = TextStream(plain_decoder(self._tokenizer, special=not body.skip_special_tokens))
        stop = StopStrings(body.stops, include=body.include_stop_str_in_output)
        singly = body.wants_logprobs or bool(body.stops)
        silent = () if body.include_stop_str_in_output else wanted.sampling.stop_token_ids
        return pieces(self._engine, self.served, text, stop, singly=singly, silent=silent)

    def _add(self, piece: TextPiece) -> None:
        self.tokens += piece.tokens
        self.text += piece.text

    def _message(self) -> Json:
        parsed = parse_tool_calls(self.text) if self._tools else ParsedText(self.text)
        return answer_message(parsed, f"call{secrets.token_hex(4)}")

    def _choice(
        self,
        content: Json,
        logprobs: Sequence[ShownToken],
        piece: TextPiece,
        *,
        called: bool = False,
        chunk: bool = False,
    ) -> Json:
        """A choice, whose last piece is `piece`; or with `chunk` that piece alone."""
        body = self._body
        required = isinstance(body, ChatBody) and not isinstance(body.tool_choice, str | None)
        reason = "tool_calls" if called and piece.end == "stop" and not required else piece.end
        shown = self._written(logprobs) if body.wants_logprobs and (logprobs or not chunk) else None
        fields = choice_of(content, reason, shown, index=self._index)
        if isinstance(piece.stop, str) or (piece.stop is not None and piece.stop in (body.stop_token_ids or ())):
            fields["stop_reason"] = piece.stop
        return fields | self._provenance(piece, chunk=chunk)

    def _logprobs_of(self, piece: TextPiece) -> list[ShownToken]:
        if not self._body.wants_logprobs:
            return []
        return [ShownToken(self._name(one.token_id), one.logprob, len(self.text)) for one in piece.tokens]

    def _name(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _written(self, logprobs: Sequence[ShownToken]) -> Json:
        """As OpenAI's API has them. `bytes` is None for a token that is part of a character."""
        if not self._chat:
            return {
                "tokens": [one.token for one in logprobs],
                "token_logprobs": [one.logprob for one in logprobs],
                "text_offset": [one.offset for one in logprobs],
                "top_logprobs": [{one.token: one.logprob} for one in logprobs],
            }
        content = []
        for one in logprobs:
            data = None if PART in one.token else list(one.token.encode())
            content.append({"token": one.token, "logprob": one.logprob, "bytes": data, "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _provenance(self, piece: TextPiece, *, chunk: bool) -> Json:
        """Fields of a choice beyond OpenAI's API, on request.

        `weight_versions`: spans over the completion's tokens. In every chunk of a stream, `start` and `end` count from the
        completion's first token; the last chunk has all spans, but no `token_ids`.
        """
        fields: Json = {}
        last = piece.end is not None
        tokens = self.tokens if last else piece.tokens
        if self._body.return_token_ids:
            if not (chunk and last):
                fields["token_ids"] = [event.token_id for event in tokens]
            if last:
                fields["prompt_token_ids"] = self.served.request.prompt_ids
        if self._body.return_weight_versions:
            first = tokens[0].index if tokens else 0
            fields["weight_versions"] = [
                msgspec.structs.replace(span, start=span.start + first, end=span.end + first)
                for span in spans_from_versions(event.version for event in tokens)
            ]
            if last:
                fields["prompt_versions"] = piece.prompt_versions
        return fields


class ShownToken(NamedTuple):
    """`offset`: number of characters that were final before the token."""

    token: str
    logprob: float
    offset: int

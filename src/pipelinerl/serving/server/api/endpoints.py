"""The endpoints of `pipelinerl serve` for chats and texts: from a request to its answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack

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
from pipelinerl.interfaces import PART
from pipelinerl.serving.server.api import Read
from pipelinerl.serving.server.api.answers import Answer, ChoiceWriter, StopStrings
from pipelinerl.serving.server.api.bodies import AnyBody, ChatBody, CompletionBody, Json
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    body_of,
    server_sent_event,
    unavailable,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.types import GenerationRequest, TokenEvent, VersionSpan, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""
_MAX_CHARACTERS_PER_TOKEN = 128
"""More than any tokenizer's average. A longer text can't fit, so it is refused without being encoded."""
_LONG_TEXT = 20_000
"""Characters. Encoding a longer text takes more than a few milliseconds, so it is done in a thread."""


async def respond(service: Service, request: Request, read: Read) -> Response:
    """Answer a chat or a text. Plain ones are streamed as tokens arrive; others come in one piece, at the end."""
    asked = read(await body_of(request))
    body = asked.body
    if body.model not in (None, service.name):
        raise RefusedError("not_found", f"there is no model {body.model!r}; this server has {service.name!r}")
    answer_id = ("chatcmpl-" if isinstance(body, ChatBody) else "cmpl-") + secrets.token_hex(12)
    wanted = await _request(service, body, answer_id)
    with ExitStack() as stack:
        served = service.engine.submit(wanted)
        stack.enter_context(service.engine.following(served))
        text = AnswerText(service, body, served)
        writer = asked.writer(answer_id, service.name)
        if body.stream and isinstance(writer, ChoiceWriter) and not text.tools:
            await unless_gone(request, served.begun())  # refused requests get an error status, not a stream
            return StreamedResponse(_chunks(writer, text), stack.pop_all(), server_sent_event, "text/event-stream")
        return asked.answered(writer, await unless_gone(request, text.whole()))


async def _chunks(writer: ChoiceWriter, text: AnswerText) -> AsyncGenerator[bytes]:
    if isinstance(text.body, ChatBody):
        yield writer.chunk({"role": "assistant", "content": ""}, {})
    async for tokens, shown in text.pieces():
        beyond = text.beyond(tokens)
        if shown or (tokens and beyond):
            yield writer.chunk(shown, beyond)
    yield writer.end(text.answer({}))


async def _request(service: Service, body: AnyBody, name: str) -> GenerationRequest:
    """The engine's request. Raises RequestError for an invalid prompt or parameters."""
    loaded = service.loaded
    if isinstance(body, ChatBody):
        if not has_chat_template(loaded.tokenizer):
            raise RequestError("this model's tokenizer has no chat template: use /v1/completions with a plain prompt")
        if not body.messages:
            raise RequestError("messages: there are none")
        messages = [plain_message(message) for message in body.messages]
        text = render(loaded.tokenizer, messages, body.offered_tools, body.template_options)
        prompt_ids = await _encoded(service, text, special=False)
    elif isinstance(body.prompt, str):
        prompt_ids = await _encoded(service, body.prompt, special=True)
    else:
        prompt_ids = tuple(body.prompt)
    room = loaded.max_length - len(prompt_ids)
    default = room if isinstance(body, ChatBody) else min(room, _COMPLETION_TOKENS)
    sampling = body.sampling(default=default, end_ids=loaded.stop_token_ids)
    by_token = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
    return GenerationRequest(id=name, prompt_ids=prompt_ids, sampling=sampling, stream=by_token)


async def _encoded(service: Service, text: str, *, special: bool) -> tuple[int, ...]:
    tokenizer, max_length = service.loaded.tokenizer, service.loaded.max_length
    if len(text) > max_length * _MAX_CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(f"a prompt of {len(text)} characters can't fit into {max_length} tokens")
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(encode_text, tokenizer, text, special=special)
    return encode_text(tokenizer, text, special=special)


class AnswerText:
    """The text of a served request, and what a choice has beyond it. `tools`: the text may have calls."""

    def __init__(self, service: Service, body: AnyBody, served: ServedRequest) -> None:
        self.body = body
        self.tools = isinstance(body, ChatBody) and bool(body.offered_tools)
        self._engine, self._tokenizer, self._served = service.engine, service.loaded.tokenizer, served
        self._stop = StopStrings(body.stops)
        self._tokens: list[TokenEvent] = []
        self._text = self._finish_reason = ""
        self._prompt_versions: tuple[VersionSpan, ...] = ()

    async def pieces(self) -> AsyncGenerator[tuple[Sequence[TokenEvent], str]]:
        """Yield tokens, and the text that became final with them; the last piece has no tokens.

        Raises the request's error if it was refused, or was cancelled because the server stops.
        """
        text, stop, served = TextStream(plain_decoder(self._tokenizer)), self._stop, self._served
        silent = served.request.sampling.stop_token_ids
        async for batch in served.batches():
            for tokens in ([token] for token in batch) if self.body.stops else [batch]:
                self._tokens += tokens
                read = [event.prompt_versions for event in tokens if event.prompt_versions]
                self._prompt_versions = read[-1] if read else self._prompt_versions
                shown = stop.feed(text.feed([event.token_id for event in tokens if event.token_id not in silent]))
                self._text += shown
                yield tokens, shown
                if stop.found is not None:
                    break
            if stop.found is not None:  # later tokens and versions are no part of the answer
                self._engine.cancel(served.request.id)
                break
        completion = await served.completion()
        if stop.found is None:
            if completion.finish_reason == "cancelled":
                raise unavailable("the request was cancelled")
            self._finish_reason, self._prompt_versions = completion.finish_reason, completion.prompt_versions
        rest = stop.feed(text.rest()) + stop.rest()
        self._text += rest
        yield [], rest

    async def whole(self) -> Answer:
        async for _ in self.pieces():
            pass
        return self.answer(self.beyond(self._tokens))

    def answer(self, beyond: Json) -> Answer:
        """The answer, once all pieces have come. `beyond`: more fields of its choice."""
        parsed = parse_tool_calls(self._text) if self.tools else ParsedText(self._text)
        message = answer_message(parsed, f"call{secrets.token_hex(4)}")
        reason = "stop" if self._stop.found is not None else self._finish_reason
        beyond = dict(beyond)
        if self.body.return_token_ids:
            beyond["prompt_token_ids"] = self._served.request.prompt_ids
        if self.body.return_weight_versions:
            beyond["weight_versions"] = spans_from_versions(event.version for event in self._tokens)
            beyond["prompt_versions"] = self._prompt_versions
        return Answer(
            message=message,
            finish_reason="tool_calls" if parsed.calls and reason == "stop" else reason,
            stop=self._stop.found,
            prompt_tokens=len(self._served.request.prompt_ids),
            completion_tokens=len(self._tokens),
            beyond=beyond,
        )

    def beyond(self, tokens: Sequence[TokenEvent]) -> Json:
        """What was asked for about these tokens. `weight_versions` counts from the completion's first token."""
        fields: Json = {}
        if self.body.wants_logprobs:
            fields["logprobs"] = self._logprobs(tokens)
        if self.body.return_token_ids:
            fields["token_ids"] = [event.token_id for event in tokens]
        if self.body.return_weight_versions:
            first = tokens[0].index if tokens else 0
            fields["weight_versions"] = [
                msgspec.structs.replace(span, start=span.start + first, end=span.end + first)
                for span in spans_from_versions(event.version for event in tokens)
            ]
        return fields

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> Json:
        """As OpenAI's API has them. `bytes` is None for a token that is part of a character."""
        names = [self._tokenizer.decode([event.token_id], skip_special_tokens=False) for event in tokens]
        if isinstance(self.body, CompletionBody):
            return {"tokens": names, "token_logprobs": [event.logprob for event in tokens]}
        content = [
            {
                "token": name,
                "logprob": event.logprob,
                "bytes": None if PART in name else list(name.encode()),
                "top_logprobs": [],
            }
            for name, event in zip(names, tokens, strict=True)
        ]
        return {"content": content, "refusal": None}

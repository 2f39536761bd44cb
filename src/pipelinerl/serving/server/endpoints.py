"""The endpoints of `pipelinerl serve` for chats and texts: from a request to its answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.environments.chat.conversation import (
    ParsedText,
    answer_message,
    encode_text,
    parse_tool_calls,
    plain_message,
    render,
)
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import PART
from pipelinerl.models.encoding import has_chat_template
from pipelinerl.serving.server.chat import Answer, AnyBody, ChatBody, ChoiceWriter, CompletionBody, Json, StopStrings
from pipelinerl.serving.server.dialects import Read, api_routes
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    application,
    body_of,
    server_sent_event,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.types import GenerationRequest, TokenEvent, spans_from_versions

_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a text completion. The default for a chat is as many as fit."""
_MAX_CHARACTERS_PER_TOKEN = 128
"""More than any tokenizer's average. A longer text can't fit, so it is refused without being encoded."""
_LONG_TEXT = 20_000
"""Characters. Encoding a longer text takes more than a few milliseconds, so it is done in a thread."""


def app_of(service: Service) -> Starlette:
    """The endpoints of a service."""
    if service.loaded.learner is not None:
        from pipelinerl.serving.server.tinker.routes import TinkerService  # noqa: PLC0415 - few servers train

        return application(TinkerService(service, service.loaded.learner).routes())
    return application([*service.routes(), *api_routes("/v1", partial(respond, service))])


async def respond(service: Service, request: Request, read: Read) -> Response:
    """Answer a chat or a text. Plain ones are streamed as tokens arrive; others come in one piece, at the end."""
    body, writer_of = read(await body_of(request))
    if body.model not in (None, service.name):
        raise RefusedError("not_found", f"there is no model {body.model!r}; this server has {service.name!r}")
    answer_id = secrets.token_hex(12)
    wanted = await _request(service, body, answer_id)
    with ExitStack() as stack:
        served = stack.enter_context(service.engine.following(wanted))
        text, writer = AnswerText(service, body, served), writer_of(answer_id, service.name)
        if body.stream and isinstance(writer, ChoiceWriter) and not text.tools:
            await unless_gone(request, served.begun())  # refused requests get an error status, not a stream
            return StreamedResponse(_chunks(writer, text), stack.pop_all(), server_sent_event, "text/event-stream")
        return writer.response(await unless_gone(request, text.whole()))


async def _chunks(writer: ChoiceWriter, text: AnswerText) -> AsyncGenerator[bytes]:
    if isinstance(text.body, ChatBody):
        yield writer.part("", {"role": "assistant", "content": ""})
    async for shown in text.pieces():
        if shown:
            yield writer.part(shown)
    yield writer.end(text.answer())


async def _request(service: Service, body: AnyBody, name: str) -> GenerationRequest:
    """The engine's request. Raises RequestError for an invalid prompt or parameters."""
    loaded = service.loaded
    text = ""
    if isinstance(body, ChatBody):
        if not has_chat_template(loaded.tokenizer):
            raise RequestError("this model's tokenizer has no chat template: use /v1/completions with a plain prompt")
        if not body.messages:
            raise RequestError("messages: there are none")
        messages = [plain_message(message) for message in body.messages]
        text = render(loaded.tokenizer, messages, body.offered_tools, body.template_options)
    elif isinstance(body.prompt, str):
        text = body.prompt
    if len(text) > loaded.engine.max_length * _MAX_CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(f"a prompt of {len(text)} characters can't fit into {loaded.engine.max_length} tokens")
    if isinstance(body, CompletionBody) and not isinstance(body.prompt, str):
        prompt_ids = tuple(body.prompt)
    else:
        encoded = partial(encode_text, loaded.tokenizer, text, special=isinstance(body, CompletionBody))
        prompt_ids = await asyncio.to_thread(encoded) if len(text) > _LONG_TEXT else encoded()
    room = loaded.engine.max_length - len(prompt_ids)
    default = room if isinstance(body, ChatBody) else min(room, _COMPLETION_TOKENS)
    sampling = body.sampling(default=default, end_ids=loaded.stop_token_ids)
    by_token = bool(body.stream or body.stops)  # stop strings are matched as tokens arrive
    version = service.engine.holding.version
    return GenerationRequest(id=name, prompt_ids=prompt_ids, sampling=sampling, stream=by_token, reuses_from=version)


class AnswerText:
    """The text of a served request, as it grows. `tools`: the text may have calls."""

    def __init__(self, service: Service, body: AnyBody, served: ServedRequest) -> None:
        self.body = body
        self.tools = isinstance(body, ChatBody) and bool(body.offered_tools)
        self._engine, self._tokenizer, self._served = service.engine, service.loaded.tokenizer, served
        self._stop = StopStrings(body.stops)
        self._tokens: list[TokenEvent] = []
        self._text = self._finish_reason = ""

    async def pieces(self) -> AsyncGenerator[str]:
        """Yield text as it becomes final.

        Raises the request's error if it was refused, or was cancelled because the server stops.
        """
        text, stop, served = TextStream(plain_decoder(self._tokenizer)), self._stop, self._served
        silent = served.request.sampling.stop_token_ids
        async for batch in served.batches():
            for tokens in ([token] for token in batch) if self.body.stops else [batch]:
                self._tokens += tokens
                shown = stop.feed(text.feed([event.token_id for event in tokens if event.token_id not in silent]))
                self._text += shown
                yield shown
                if stop.found is not None:
                    break
            if stop.found is not None:  # later tokens and versions are no part of the answer
                self._engine.cancel(served.request.id)
                break
        completion = await served.completion()
        if stop.found is None and completion.finish_reason == "cancelled":
            raise RefusedError("unavailable", "the request was cancelled")
        rest = stop.feed(text.rest()) + stop.rest()
        self._finish_reason = completion.finish_reason if stop.found is None else "stop"
        self._text += rest
        yield rest

    async def whole(self) -> Answer:
        async for _ in self.pieces():
            pass
        return self.answer()

    def answer(self) -> Answer:
        """The answer, once all pieces have come."""
        parsed = parse_tool_calls(self._text) if self.tools else ParsedText(self._text)
        called = parsed.calls and self._finish_reason == "stop"
        beyond: Json = {}
        if self.body.logprobs is not None and self.body.logprobs is not False:
            beyond["logprobs"] = self._logprobs()
        if self.body.return_token_ids:
            beyond["prompt_token_ids"] = self._served.request.prompt_ids
            beyond["token_ids"] = [event.token_id for event in self._tokens]
        if self.body.return_weight_versions:
            beyond["weight_versions"] = spans_from_versions(event.version for event in self._tokens)
            read = [event.prompt_versions for event in self._tokens if event.prompt_versions]
            beyond["prompt_versions"] = read[-1] if read else ()
        return Answer(
            message=answer_message(parsed, f"call{secrets.token_hex(4)}"),
            finish_reason="tool_calls" if called else self._finish_reason,
            stop=self._stop.found,
            prompt_tokens=len(self._served.request.prompt_ids),
            completion_tokens=len(self._tokens),
            beyond=beyond,
        )

    def _logprobs(self) -> Json:
        """As OpenAI's API has them. `bytes` is None for a token that is part of a character."""
        text = isinstance(self.body, CompletionBody)
        found: Json = {"tokens": [], "token_logprobs": []} if text else {"content": [], "refusal": None}
        for event in self._tokens:
            name = self._tokenizer.decode([event.token_id], skip_special_tokens=False)
            if text:
                found["tokens"].append(name)
                found["token_logprobs"].append(event.logprob)
            else:
                data = None if PART in name else list(name.encode())
                found["content"].append({"token": name, "logprob": event.logprob, "bytes": data, "top_logprobs": []})
        return found

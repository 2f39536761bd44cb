"""OpenAI's endpoints `/v1/chat/completions`, `/v1/completions`, `/v1/models`, and vLLM's `/tokenize` and `/detokenize`.

`/v1/responses` and Anthropic's `/v1/messages` are translated into chats (`dialects`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.environments.chat.messages import ParsedText, answer_message, parse_tool_calls
from pipelinerl.environments.prompts import plain_decoder, text_decoder
from pipelinerl.environments.text_stream import TextStream
from pipelinerl.errors import RequestError
from pipelinerl.serving.server.dialects import messages, responses
from pipelinerl.serving.server.dialects.common import Translated
from pipelinerl.serving.server.exchange import Generation
from pipelinerl.serving.server.extras import ExtendedRequest, Extras, Penalties, Rule
from pipelinerl.serving.server.http import RefusedError, Stream, answer, body_of, decoded, unless_gone
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
from pipelinerl.serving.server.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
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
        return await _Call(service, body, [_Prompt(ids)], body.top, asked.writer).respond(request)

    async def completions(self, request: Request) -> Response:
        service = self._holder.service
        body = read_body(await body_of(request), CompletionBody)
        _require_model(service, body.model)
        texts, prompts = body.prompts, list[_Prompt]()
        _check_choices(service, len(texts) * body.choices)
        for given in texts:
            if isinstance(given, str):
                ids = await service.prompts.of_text(given, special=body.add_special_tokens)
                prompts.append(_Prompt(ids, given))
            else:
                prompts.append(_Prompt(tuple(given)))
        return await _Call(service, body, prompts, body.top, text_writer).respond(request)

    async def tokenize(self, request: Request) -> Response:
        service = self._holder.service
        body = decoded(await body_of(request), TokenizeBody)
        _require_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either `prompt` or `messages`")
        if body.messages is not None:
            ids = await service.prompts.of_chat(body.messages, body.template_options, body.tools or [])
        else:
            ids = await service.prompts.of_text(body.prompt or "", special=body.add_special_tokens is not False)
        texts = [service.loaded.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        return answer(
            {
                "count": len(ids),
                "max_model_len": service.loaded.max_length,
                "tokens": ids,
                "token_strs": texts if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        service = self._holder.service
        body = decoded(await body_of(request), DetokenizeBody)
        _require_model(service, body.model)
        _check_ids(service, body.tokens)
        return answer({"prompt": service.loaded.tokenizer.decode(body.tokens, skip_special_tokens=False)})


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


class _Prompt(NamedTuple):
    """`text`: as the client gave it; None: it gave token ids, or messages."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass
class _Choice:
    """One answer to a prompt. `tokens`, `text` and `last` are what has been generated so far."""

    index: int
    prompt: _Prompt
    generation: Generation
    extras: Extras | None
    tokens: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    last: Piece | None = None


class _Call:
    """A decoded request to either endpoint. `top`: alternatives to each token; None: no log-probs."""

    def __init__(
        self,
        service: Service,
        body: ChatBody | CompletionBody,
        prompts: Sequence[_Prompt],
        top: int | None,
        writer: MakeWriter,
    ) -> None:
        self._service = service
        self._tokenizer = service.loaded.tokenizer
        self._body, self._prompts, self._top = body, prompts, top
        self._chat = chat = isinstance(body, ChatBody)
        self._echo = isinstance(body, CompletionBody) and body.echo
        self._only_echo = isinstance(body, CompletionBody) and body.only_echo
        self._tools = isinstance(body, ChatBody) and bool(body.offered_tools)
        self._shows_tokens = body.return_token_ids or body.return_weight_versions
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._writer = writer(self._id, service.name, len(prompts[0].ids))
        self._logprobs = LogprobWriter(self._tokenizer, top or 0, as_ids=body.return_tokens_as_token_ids)

    async def respond(self, request: Request) -> Response:
        exchange = self._service.exchange
        requests = await self._requests()
        with ExitStack() as stack:
            choices = []
            for index, (prompt, wanted) in enumerate(requests):
                generation = exchange.submit(wanted)
                stack.enter_context(exchange.following(generation))
                extras = wanted.extras if isinstance(wanted, ExtendedRequest) else None
                choices.append(_Choice(index, prompt, generation, extras))
            if not self._body.stream:
                return answer(await unless_gone(request, self._whole(choices)))
            for choice in choices:
                await unless_gone(request, choice.generation.begun())  # refused requests get an error status, not a stream
            return Stream(self._stream(choices), stack.pop_all(), self._writer.error, "text/event-stream")

    # ---- requests to the engine

    async def _requests(self) -> list[tuple[_Prompt, GenerationRequest]]:
        """One request per choice. Raises RequestError for invalid parameters."""
        service, body = self._service, self._body
        count = body.choices * len(self._prompts)
        _check_choices(service, count)
        rules = await self._constraints(count)
        adjustments = body.adjustments(service.loaded.vocabulary)
        requests = []
        for number, prompt in enumerate(self._prompts):
            _check_ids(service, prompt.ids)
            sampling = self._sampling(len(prompt.ids))
            for choice in range(body.choices):
                index = number * body.choices + choice
                seed = None if sampling.seed is None else sampling.seed + choice
                sampled = msgspec.structs.replace(sampling, seed=seed)
                of_choice: list[Rule] = [rules[index]] if rules else []
                if adjustments is not None:
                    of_choice.insert(0, Penalties(prompt.ids, adjustments, sampling.temperature))
                requests.append((prompt, self._request(index, prompt, sampled, of_choice)))
        return requests

    def _request(self, index: int, prompt: _Prompt, sampling: SamplingParams, rules: Sequence[Rule]) -> GenerationRequest:
        request_id = self._id if index == 0 else f"{self._id}-{index}"
        scores_prompt = self._echo and self._top is not None
        if rules or self._top or scores_prompt:
            extras = Extras(top=self._top or 0, scores_prompt=scores_prompt, rules=rules)
            return ExtendedRequest(id=request_id, prompt_ids=prompt.ids, sampling=sampling, stream=True, extras=extras)
        streams = bool(self._body.stream or self._body.stops)  # stop strings are matched as tokens arrive
        return GenerationRequest(id=request_id, prompt_ids=prompt.ids, sampling=sampling, stream=streams)

    def _sampling(self, prompt_tokens: int) -> SamplingParams:
        loaded, body = self._service.loaded, self._body
        if self._only_echo:
            body = msgspec.structs.replace(body, max_tokens=1)
        if body.grammar is not None:
            body = msgspec.structs.replace(body, ignore_eos=False)  # nothing may follow the end of the grammar
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
        """The pieces of one choice, which are also added to it."""
        body = self._body
        if self._only_echo:
            completion = await choice.generation.completion()
            choice.last = Piece([], "", "length", completion.prompt_versions)
            yield choice.last
            return
        text = TextStream(plain_decoder(self._tokenizer, special=not body.skip_special_tokens))
        stop = StopStrings(body.stops, include=body.include_stop_str_in_output)
        singly = self._top is not None or bool(body.stops)
        silent = () if body.include_stop_str_in_output else choice.generation.request.sampling.stop_token_ids
        exchange = self._service.exchange
        async for piece in pieces(exchange, choice.generation, choice.extras, text, stop, singly=singly, silent=silent):
            choice.last = piece
            yield piece
            choice.tokens += piece.tokens
            choice.text += piece.text

    async def _whole(self, choices: Sequence[_Choice]) -> Json:
        written = await asyncio.gather(*map(self._whole_choice, choices))
        return self._writer.whole(written, self._usage(choices))

    async def _whole_choice(self, choice: _Choice) -> Json:
        start = self._prompt_text(choice.prompt) if self._echo else ""
        scored: list[ScoredToken] = []
        async for piece in self._pieces(choice):
            scored += self._scored(choice, piece.tokens, len(start) + len(choice.text))
        if self._echo:
            scored = [*self._scored_prompt(choice), *scored]
        return self._choice(choice, choice.tokens, start + choice.text, scored, choice.last)

    async def _stream(self, choices: Sequence[_Choice]) -> AsyncGenerator[bytes]:
        async for chunk in merged([self._chunks(choice) for choice in choices]):
            yield chunk
        if self._body.include_usage:
            yield self._writer.chunk([], usage=self._usage(choices))
        yield self._writer.end()

    async def _chunks(self, choice: _Choice) -> AsyncGenerator[bytes]:
        no_usage: Json = {"usage": None} if self._body.include_usage else {}
        if self._chat:
            first = choice_of({"delta": {"role": "assistant", "content": ""}}, None, index=choice.index)
            yield self._writer.chunk([first], **no_usage)
        start = ""
        if self._echo:
            start = self._prompt_text(choice.prompt)
            logprobs = self._written(list(self._scored_prompt(choice)))
            yield self._writer.chunk([choice_of({"text": start}, None, logprobs, index=choice.index)], **no_usage)
        calls = ToolCallStream(_call_prefix()) if self._tools else None
        async for piece in self._pieces(choice):
            scored = self._scored(choice, piece.tokens, len(start) + len(choice.text))
            tokens = choice.tokens if piece.end else piece.tokens
            written = self._choice(choice, tokens, piece.text, scored, piece, chunk=True, calls=calls)
            if written["delta" if self._chat else "text"] or piece.end or scored or self._shows_tokens:
                yield self._writer.chunk([written], **no_usage)

    def _choice(
        self,
        choice: _Choice,
        tokens: Sequence[TokenEvent],
        text: str,
        scored: Sequence[ScoredToken],
        piece: Piece | None,
        *,
        chunk: bool = False,
        calls: ToolCallStream | None = None,
    ) -> Json:
        """A choice, or the part of it in one chunk. If `piece` is the last one, `tokens` are all tokens."""
        last = piece if piece is not None and piece.end else None
        reason = last.end if last else None
        if not self._chat:
            content: Json = {"text": text}
        elif chunk:
            content, reason = self._delta(text, reason, calls)
        else:
            content, reason = self._message(text, reason)
        logprobs = self._written(scored) if scored or not chunk else None
        fields = choice_of(content, reason, logprobs, index=choice.index)
        if last and last.stop is not None and (isinstance(last.stop, str) or last.stop in (self._body.stop_token_ids or ())):
            fields["stop_reason"] = last.stop
        provenance = self._provenance(choice, tokens, last)
        if chunk and last:
            provenance.pop("token_ids", None)  # already sent with the earlier chunks
        return fields | provenance

    def _message(self, text: str, reason: str | None) -> tuple[Json, str | None]:
        """The message with this text, and the finish reason, which differs if tools are called."""
        parsed = parse_tool_calls(text) if self._tools else ParsedText(text)
        message = answer_message(parsed, _call_prefix())
        return {"message": message | {"refusal": None}}, self._reason(reason, called=bool(parsed.calls))

    def _delta(self, text: str, reason: str | None, calls: ToolCallStream | None) -> tuple[Json, str | None]:
        """The delta of a chunk with this text, and the finish reason."""
        if calls is None:
            return {"delta": {"content": text} if text else {}}, reason
        delta = calls.feed(text, end=reason is not None)
        return {"delta": delta}, self._reason(reason, called=calls.called)

    def _reason(self, reason: str | None, *, called: bool) -> str | None:
        named = isinstance(self._body, ChatBody) and not isinstance(self._body.tool_choice, str | None)
        return "tool_calls" if called and reason == "stop" and not named else reason

    def _usage(self, choices: Sequence[_Choice]) -> Json:
        return usage_of(sum(len(prompt.ids) for prompt in self._prompts), sum(len(choice.tokens) for choice in choices))

    # ---- parts of a choice

    def _prompt_text(self, prompt: _Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return text_decoder(self._tokenizer, special=not self._body.skip_special_tokens)(prompt.ids)

    def _scored_prompt(self, choice: _Choice) -> Iterator[ScoredToken]:
        """The prompt's tokens, once they are all scored. The first has no log-prob."""
        if self._top is None or choice.extras is None:
            return
        text, offset = TextStream(plain_decoder(self._tokenizer, special=not self._body.skip_special_tokens)), 0
        known = ((token.logprob, token.likeliest) for token in choice.extras.prompt)
        for token_id, (logprob, likeliest) in zip(choice.prompt.ids, [(None, []), *known], strict=True):
            yield ScoredToken(token_id, logprob, likeliest, offset)
            offset += len(text.feed([token_id]))

    def _scored(self, choice: _Choice, tokens: Sequence[TokenEvent], offset: int) -> list[ScoredToken]:
        if self._top is None:
            return []
        tops = choice.extras.tops if choice.extras is not None and self._top else None
        return [ScoredToken(event.token_id, event.logprob, tops[event.index] if tops else [], offset) for event in tokens]

    def _written(self, scored: Sequence[ScoredToken]) -> Json | None:
        """Log-probs of these tokens, if they are wanted."""
        if self._top is None:
            return None
        return self._logprobs.of_chat(scored) if self._chat else self._logprobs.of_text(scored)

    def _provenance(self, choice: _Choice, tokens: Sequence[TokenEvent], whole: Piece | None) -> Json:
        """Fields of a choice beyond OpenAI's API, on request. With `whole`, the last piece, `tokens` are all tokens.

        `weight_versions`: spans over the completion's tokens. In every chunk of a stream, `start` and `end` count from the
        completion's first token; the last chunk has all spans. `prompt_versions`: with `echo` and `logprobs`, those of the
        prompt's log-probs.
        """
        fields: Json = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [event.token_id for event in tokens]
            if whole:
                fields["prompt_token_ids"] = choice.prompt.ids
        if self._body.return_weight_versions:
            first = tokens[0].index if tokens else 0
            spans = spans_from_versions(event.version for event in tokens)
            fields["weight_versions"] = [
                msgspec.structs.replace(span, start=span.start + first, end=span.end + first) for span in spans
            ]
            if whole:
                scored = choice.extras.prompt if choice.extras is not None else []
                versions = [token.version for token in (*scored[:1], *scored)]  # the first token has no log-prob
                fields["prompt_versions"] = spans_from_versions(versions) or whole.prompt_versions
        return fields

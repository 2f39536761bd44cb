"""Requests in progress at a vLLM server: sent, streamed, cancelled, and given up together when the server can't go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.serving.client.adapter import TokenListener
from pipelinerl.serving.client.errors import ServerBusyError, ServerError, ServerUnreachableError
from pipelinerl.serving.client.http import HttpClient, RefusedError
from pipelinerl.serving.vllm.messages import (
    AbortBody,
    Answer,
    Choice,
    GenerateBody,
    Sampling,
    TokenLogprob,
    UnfaithfulError,
    worker_error,
)
from pipelinerl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    VersionSpan,
    versions_from_spans,
)

# ------------------------------------------------------------------------------------------------------------------------
# Requests in vLLM's words, and its answers as completions, exactly. Pure.
#
# Nothing is filled in: an answer without a log-probability or without a weight version for each of its tokens is an error.


LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this without saying so in its answer."""
MISSING_LOGPROB = -9999.0
"""What vLLM writes for -inf, NaN, and where it has none."""


def generate_body(request: GenerationRequest, max_length: int) -> GenerateBody:
    """The request in vLLM's words. Raises PromptTooLongError or RequestError for what vLLM would quietly change."""
    prompt, sampling = request.prompt_ids, request.sampling
    if len(prompt) + sampling.max_tokens > max_length:
        raise PromptTooLongError(
            f"request {request.id!r} can't fit: {len(prompt)} prompt tokens + {sampling.max_tokens} new tokens > "
            f"{max_length} (engine.max_length)"
        )
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RequestError(
            f"request {request.id!r} has temperature {sampling.temperature}; vLLM samples at 0 or from {LOWEST_TEMPERATURE}"
        )
    return GenerateBody(
        request_id=request.id,
        token_ids=prompt,
        stream=request.stream,
        sampling_params=Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
        ),
    )


def tokens_of(choice: Choice) -> list[TokenLogprob]:
    """The tokens of a choice, each with its log-probability. Raises UnfaithfulError."""
    ids = choice.token_ids or ()
    content = (choice.logprobs.content if choice.logprobs else None) or ()
    if [token.token_id for token in content] != list(ids):
        raise UnfaithfulError(f"{len(content)} log-probs for {len(ids)} tokens, or of other tokens")
    for token in content:
        if token.logprob <= MISSING_LOGPROB:
            raise UnfaithfulError(f"token {token.token_id} has no finite log-prob")
    return list(content)


def version_of(label: str) -> int:
    """The version that a label of vLLM stands for. Raises UnfaithfulError for a label that is not ours."""
    if not (label.isascii() and label.isdecimal() and len(label) < 19):
        raise UnfaithfulError(f"weights are labelled {label[:40]!r}, which is not the number of a version")
    return int(label)


def completion_of(request: GenerationRequest, tokens: Sequence[TokenLogprob], end: Choice) -> Completion:
    """The completion of these tokens. `end`: the last choice. Raises UnfaithfulError."""
    ids = tuple(token.token_id for token in tokens)
    spans = tuple(VersionSpan(version_of(span.version), span.start, span.end) for span in end.weight_versions or ())
    try:
        versions_from_spans(spans, len(ids))
    except ValueError as error:
        raise UnfaithfulError(str(error)) from error
    return Completion(
        request_id=request.id,
        token_ids=ids,
        logprobs=tuple(token.logprob for token in tokens),
        weight_versions=spans,
        finish_reason=_finish_reason(request, ids, end.finish_reason),
    )


def same_versions(completion: Completion, streamed: Sequence[TokenEvent]) -> None:
    """Raise RequestError if a token was reported with another version than its completion gives it."""
    versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
    for event, version in zip(streamed, versions, strict=bool(streamed)):
        if event.version != version:
            raise RequestError(
                f"token {event.index} of request {completion.request_id!r} was reported as of version {event.version} and "
                f"is of {version}: vLLM took longer to report it than to change its weights"
            )


def _finish_reason(request: GenerationRequest, ids: Sequence[int], reason: str | None) -> FinishReason:
    stops = set(request.sampling.stop_token_ids)
    if stops.intersection(ids[:-1]):
        raise UnfaithfulError("it goes on after a stop token")
    if reason == "abort":
        return "cancelled"
    if reason == "stop" and ids and ids[-1] in stops:
        return "stop"
    if reason == "length" and len(ids) == request.sampling.max_tokens and ids[-1] not in stops:
        return "length"
    raise UnfaithfulError(f"it ended with reason {reason!r} after {len(ids)} of {request.sampling.max_tokens} tokens")


GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ABORT_TRIES = 3
PATIENCE_S = 1.0
"""How long an abort may take before it is sent again."""


@dataclass(slots=True)
class _Flight:
    """A request in progress: what came of it so far, and whether it is to end early."""

    request: GenerationRequest
    on_token: TokenListener | None
    cancelled: bool = False
    streamed: list[TokenEvent] = field(default_factory=list)
    task: asyncio.Task[Completion] | None = None


class Requests:
    """`prepare` gives a request in vLLM's words, once it is known who answers.

    `version` says which weights the server holds now, for tokens that are reported as they come.
    """

    def __init__(
        self, http: HttpClient, prepare: Callable[[GenerationRequest], Awaitable[GenerateBody]], version: Callable[[], int]
    ) -> None:
        self._http = http
        self._prepare = prepare
        self._version = version
        self._flights: dict[str, _Flight] = {}
        self._given_up = ""

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        """Send it and wait for its completion; errors as of `EngineServer.generate`."""
        if request.id in self._flights:
            raise RequestError(f"request {request.id!r} is already at {self._http.url}; give each request an id of its own")
        flight = self._flights[request.id] = _Flight(request, on_token)
        flight.task = asyncio.ensure_future(self._exchange(flight))
        try:
            return await flight.task
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                raise  # we were cancelled, and the connection was closed with us
            if not flight.cancelled:
                raise ServerError(self._http.url, self._given_up) from None
            return Completion(
                request_id=request.id, token_ids=(), logprobs=(), weight_versions=(), finish_reason="cancelled"
            )
        except UnfaithfulError as error:
            raise ServerError(self._http.url, f"gave a completion that can't be used: {error}") from error
        except RefusedError as error:
            if error.status != 400:
                raise
            raise RequestError(f"vLLM refused request {request.id!r}: {worker_error(error.detail)}") from error
        finally:
            del self._flights[request.id]

    async def cancel(self, request_id: str) -> None:
        """Have vLLM end the request, which then gives what it has; close its connection if vLLM does not."""
        flight = self._flights.get(request_id)
        if flight is None or flight.task is None:
            return
        flight.cancelled = True
        for _ in range(ABORT_TRIES):  # an abort that overtakes its request is ignored
            with suppress(ServerError):
                await self._http.post(ABORT, AbortBody.of(request_id), msgspec.Raw, timeout_s=PATIENCE_S)
            await asyncio.wait([flight.task], timeout=PATIENCE_S)
            if flight.task.done():
                return
        flight.task.cancel()

    def give_up(self, problem: str) -> None:
        """End all requests with a ServerError that says why."""
        self._given_up = problem
        for flight in self._flights.values():
            if flight.task is not None:
                flight.cancelled = False
                flight.task.cancel()

    async def _exchange(self, flight: _Flight) -> Completion:
        body = await self._prepare(flight.request)
        if flight.cancelled:
            return _nothing(flight.request)
        if body.stream:
            tokens, end = await self._stream(flight, body)
        else:
            end = (await self._http.post(GENERATE, body, Answer, timeout_s=None)).only
            tokens = tokens_of(end)
        if end.unlabelled:
            raise ServerUnreachableError(self._http.url, "was restarted: it has forgotten the version of its weights")
        if end.finish_reason == "abort" and not flight.cancelled:
            raise ServerBusyError(self._http.url, f"gave up request {flight.request.id!r} (does it stop?)")
        completion = completion_of(flight.request, tokens, end)
        same_versions(completion, flight.streamed)
        return completion

    async def _stream(self, flight: _Flight, body: GenerateBody) -> tuple[list[TokenLogprob], Choice]:
        """All tokens, each reported as it comes with the version that vLLM holds then, and the last choice.

        vLLM tells versions with the end only. It is paused for far longer at an update than a token takes to get here, so
        what is reported is right; `same_versions` makes sure of it.
        """
        request_id = flight.request.id
        tokens: list[TokenLogprob] = []
        lines = self._http.post_lines(GENERATE, body, timeout_s=None)
        try:
            async for line in lines:
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                choice = self._choice(data)
                for token in tokens_of(choice):
                    event = TokenEvent(request_id, len(tokens), token.token_id, token.logprob, self._version())
                    flight.streamed.append(event)
                    tokens.append(token)
                    if flight.on_token is not None:
                        flight.on_token(event)
                if choice.finish_reason is not None:
                    return tokens, choice
        finally:
            await lines.aclose()
        raise ServerUnreachableError(self._http.url, "broke off a stream before its completion")

    def _choice(self, data: bytes) -> Choice:
        try:
            return msgspec.json.decode(data, type=Answer).only
        except msgspec.DecodeError as error:
            if b'"error"' in data:
                why = worker_error(data.decode(errors="replace"))
                raise ServerBusyError(self._http.url, f"failed in a stream: {why}") from error
            raise self._http.malformed(str(error), data) from error


def _nothing(request: GenerationRequest) -> Completion:
    """Of a request that was cancelled before anything was heard of it."""
    return Completion(request_id=request.id, token_ids=(), logprobs=(), weight_versions=(), finish_reason="cancelled")

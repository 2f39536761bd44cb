"""Sends, streams and cancels requests at a vLLM server, and fails all of them when the server can't continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelinerl.errors import INVALID_DATA, PromptTooLongError, RequestError
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.client.http import HttpClient, RefusedError
from pipelinerl.serving.vllm.messages import Answer, Choice, InvalidAnswerError, Label, TokenLogprob, worker_error
from pipelinerl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    VersionSpan,
    cancelled_completion,
    versions_from_spans,
)

# ---- translating requests and answers (pure functions)
# Nothing is filled in: an answer without a log-probability and a weight version for each token is an error.


LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises temperatures between 0 and this value."""
MISSING_LOGPROB = -9999.0
"""vLLM's value for -inf, NaN, and missing log-probabilities."""
_FINISH_REASONS: dict[str, FinishReason] = {"abort": "cancelled", "stop": "stop", "length": "length"}


def generate_body(request: GenerationRequest, max_length: int) -> dict[str, Any]:
    """Translate a request for vLLM. Raises PromptTooLongError or RequestError for what vLLM would silently change.

    No seed is sent. The model's end tokens stop a completion only if the request names them.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if len(prompt) + sampling.max_tokens > max_length:
        raise PromptTooLongError(
            f"request {request.id!r} can't fit: {len(prompt)} prompt tokens + {sampling.max_tokens} new tokens > "
            f"{max_length} (engine.max_length)"
        )
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RequestError(
            f"request {request.id!r} has temperature {sampling.temperature}; vLLM needs 0 or at least {LOWEST_TEMPERATURE}"
        )
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop_token_ids")
    fixed = {"ignore_eos": True, "logprobs": 0, "detokenize": False}
    return {
        "request_id": request.id,
        "token_ids": prompt,
        "stream": request.stream,
        "sampling_params": {name: getattr(sampling, name) for name in names} | fixed,
    }


def tokens_of(choice: Choice) -> list[TokenLogprob]:
    """The tokens of a choice, each with its log-probability. Raises InvalidAnswerError."""
    ids = choice.token_ids or ()
    content = (choice.logprobs.content if choice.logprobs else None) or ()
    if [token.token_id for token in content] != list(ids):
        raise InvalidAnswerError(f"it has {len(content)} log-probs for {len(ids)} tokens, or log-probs of other tokens")
    for token in content:
        if token.logprob <= MISSING_LOGPROB:
            raise InvalidAnswerError(f"token {token.token_id} has no finite log-prob")
    return list(content)


def version_of(text: str, session: tuple[str, int] | None) -> int:
    """The version in a label. Raises InvalidAnswerError for a text that is none, or names weights of another `session`."""
    label = Label.of(text)
    if session not in (None, label.session):
        raise InvalidAnswerError("its tokens are of weights of another session, which updates this server")
    return label.version


def completion_of(
    request: GenerationRequest, tokens: Sequence[TokenLogprob], end: Choice, session: tuple[str, int] | None = None
) -> Completion:
    """Build the completion from its tokens. `end`: the last choice. Raises InvalidAnswerError.

    `session`: the run and the epoch that all tokens must be of, if the client updates the weights. Whether it can be the
    answer to the request is checked by its caller (`client.adapter.find_fault`).
    """
    if (reason := _FINISH_REASONS.get(end.finish_reason or "")) is None:
        raise InvalidAnswerError(f"it ended with reason {end.finish_reason!r}")
    ids = tuple(token.token_id for token in tokens)
    found = end.weight_versions or ()
    spans = tuple(VersionSpan(version_of(span.version, session), span.start, span.end) for span in found)
    try:
        versions_from_spans(spans, len(ids))
    except ValueError as error:
        raise InvalidAnswerError(str(error)) from error
    return Completion(
        request_id=request.id,
        token_ids=ids,
        logprobs=tuple(token.logprob for token in tokens),
        weight_versions=spans,
        finish_reason=reason,
    )


def same_versions(completion: Completion, streamed: Sequence[TokenEvent]) -> None:
    """Raise RequestError if a token was streamed with a different version than its completion has."""
    versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
    for event, version in zip(streamed, versions, strict=bool(streamed)):
        if event.version != version:
            raise RequestError(
                f"token {event.index} of request {completion.request_id!r} was streamed as version {event.version}, but is "
                f"of version {version}: vLLM took longer to report it than to change its weights"
            )


# ---- requests in progress

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ABORT_TRIES = 3
ABORT_TIMEOUT_S = 1.0
"""How long to wait for an abort to take effect before it is sent again."""


@dataclass(slots=True)
class _InFlight:
    """The state of one request in progress."""

    request: GenerationRequest
    on_token: TokenListener | None
    cancelled: bool = False
    streamed: list[TokenEvent] = field(default_factory=list)
    task: asyncio.Task[Completion] | None = None


class Requests:
    """The requests in progress at one server.

    `prepare`: translates a request after checking which server process answers. `version`: returns the version that the
    server holds now, for streamed tokens. `session`: see `completion_of`.
    """

    def __init__(
        self,
        http: HttpClient,
        prepare: Callable[[GenerationRequest], Awaitable[dict[str, Any]]],
        version: Callable[[], int],
        session: tuple[str, int] | None,
    ) -> None:
        self._http, self._session, self._prepare, self._version = http, session, prepare, version
        self._in_flight: dict[str, _InFlight] = {}
        self._failure = ServerError(http.url, "")

    def __len__(self) -> int:
        return len(self._in_flight)

    async def run(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        """Send a request and return its completion. Raises as `EngineServer.generate` does."""
        if request.id in self._in_flight:
            raise RequestError(f"request {request.id!r} is already at {self._http.url}; give each request a unique id")
        flight = self._in_flight[request.id] = _InFlight(request, on_token)
        flight.task = asyncio.ensure_future(self._exchange(flight))
        try:
            return await flight.task
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                raise  # the caller was cancelled, which has also closed the connection
            if not flight.cancelled:
                raise type(self._failure)(self._failure.url, self._failure.problem) from None
            return cancelled_completion(request.id, ())
        except InvalidAnswerError as error:
            raise ServerError(self._http.url, f"gave a completion that can't be used: {error}") from error
        except RefusedError as error:
            if error.status != 400:
                raise
            raise RequestError(f"vLLM refused request {request.id!r}: {worker_error(error.detail)}") from error
        finally:
            del self._in_flight[request.id]

    async def cancel(self, request_id: str) -> None:
        """Have vLLM end the request, which then completes with its tokens so far. Otherwise close its connection."""
        flight = self._in_flight.get(request_id)
        if flight is None or flight.task is None:
            return
        flight.cancelled = True
        body = {"request_ids": [f"generate-tokens-{request_id}"]}  # vLLM derives its request ids from ours
        for _ in range(ABORT_TRIES):  # an abort that overtakes its request is ignored
            with suppress(ServerError):
                await self._http.post(ABORT, body, msgspec.Raw, timeout_s=ABORT_TIMEOUT_S)
            await asyncio.wait([flight.task], timeout=ABORT_TIMEOUT_S)
            if flight.task.done():
                return
        flight.task.cancel()

    def fail_all(self, error: ServerError) -> None:
        """End all requests with this error."""
        self._failure = error
        for flight in self._in_flight.values():
            if flight.task is not None:
                flight.cancelled = False
                flight.task.cancel()

    async def _exchange(self, flight: _InFlight) -> Completion:
        body = await self._prepare(flight.request)
        if flight.cancelled:
            return cancelled_completion(flight.request.id, ())
        if flight.request.stream:
            tokens, end = await self._stream(flight, body)
        else:
            end = (await self._http.post(GENERATE, body, Answer, timeout_s=None)).only
            tokens = tokens_of(end)
        if end.unlabelled:
            raise ServerUnreachableError(self._http.url, "was restarted: its weights have no version label")
        if end.finish_reason == "abort" and not flight.cancelled:
            raise ServerBusyError(self._http.url, f"aborted request {flight.request.id!r} (is it shutting down?)")
        completion = completion_of(flight.request, tokens, end, self._session)
        same_versions(completion, flight.streamed)
        return completion

    async def _stream(self, flight: _InFlight, body: dict[str, Any]) -> tuple[list[TokenLogprob], Choice]:
        """Return all tokens and the last choice. Each token is reported on arrival, with the version that vLLM then holds.

        vLLM itself reports versions only at the end. An update pauses it for much longer than a token takes to arrive, so
        the versions reported here are right; `same_versions` verifies that.
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
        except INVALID_DATA as error:
            if b'"error"' in data:
                why = worker_error(data.decode(errors="replace"))
                raise ServerBusyError(self._http.url, f"failed in a stream: {why}") from error
            raise self._http.malformed(str(error), data) from error

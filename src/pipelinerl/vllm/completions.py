"""Requests in vLLM's words, and its answers as completions, exactly. Pure.

Nothing is filled in: an answer without a log-probability or without a weight version for each of its tokens is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    VersionSpan,
    versions_from_spans,
)
from pipelinerl.vllm.messages import Choice, GenerateBody, Sampling, TokenLogprob, UnfaithfulError

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

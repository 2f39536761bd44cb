"""Checks of requests before they are sent, and of completions when they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.types import Completion, GenerationRequest, versions_from_spans

_ROUNDING = 1e-3
"""Log-probabilities may be this far above 0."""


class Limits(NamedTuple):
    """Limits that hold for every server."""

    max_length: int
    vocabulary: int


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Raises PromptTooLongError or RequestError if this request can never be served."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise RequestError(f"request {request.id!r} has an empty prompt; give it at least one token")
    if sampling.max_tokens < 1:
        raise RequestError(f"request {request.id!r} asks for {sampling.max_tokens} tokens; ask for at least 1")
    if len(prompt) + sampling.max_tokens > limits.max_length:
        raise PromptTooLongError(
            f"request {request.id!r} can't fit: {len(prompt)} prompt tokens + {sampling.max_tokens} new tokens > "
            f"{limits.max_length} (the engine servers' longest sequence)"
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocabulary:
        raise RequestError(f"request {request.id!r} has token ids outside the model's vocabulary of {limits.vocabulary}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise RequestError(f"request {request.id!r} has sampling parameters out of range: {sampling}")


def find_fault(completion: Completion, request: GenerationRequest, vocabulary: int) -> str | None:
    """Describe why `completion` is not a valid answer to `request`, or return None. Nothing is guessed or repaired."""
    return next(_faults(completion, request, vocabulary), None)


def _faults(completion: Completion, request: GenerationRequest, vocabulary: int) -> Iterator[str]:
    ids, logprobs, limit = completion.token_ids, completion.logprobs, request.sampling.max_tokens
    stops = set(request.sampling.stop_token_ids)
    ended_by_stop = bool(ids) and ids[-1] in stops
    if completion.request_id != request.id:
        yield f"it belongs to request {completion.request_id!r}"
    if len(ids) > limit:
        yield f"it has {len(ids)} tokens, more than the limit of {limit}"
    if len(logprobs) != len(ids):
        yield f"it has {len(ids)} tokens and {len(logprobs)} log-probabilities"
    if not all(math.isfinite(value) and value <= _ROUNDING for value in logprobs):
        yield "it has log-probabilities that are not finite or above 0"
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        yield f"it has tokens outside the vocabulary of {vocabulary}"
    if not stops.isdisjoint(ids[:-1]):
        yield "it continues after a stop token"
    if completion.finish_reason == "stop" and not ended_by_stop:
        yield 'its finish reason is "stop", but its last token is not a stop token'
    if completion.finish_reason == "length" and (len(ids) != limit or ended_by_stop):
        yield f'its finish reason is "length" after {len(ids)} of {limit} tokens'
    try:
        versions_from_spans(completion.weight_versions, len(ids))
    except ValueError as error:
        yield str(error)

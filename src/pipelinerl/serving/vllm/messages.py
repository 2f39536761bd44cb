"""Messages of vLLM's HTTP API: what is decoded here, by the client and by our backend inside vLLM, and translations.

Nothing is filled in: an answer without a log-probability and a weight version for each token is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.types import Completion, FinishReason, GenerationRequest, VersionSpan, versions_from_spans

BACKEND = "pipelinerl"
"""The name of our weight-transfer backend in vLLM."""
REFUSED = "weights refused:"
"""The beginning of the backend's errors that leave the model unchanged."""
UNLABELLED = "default"
"""vLLM's version label of the weights that it was started with, until they get another label."""
LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises temperatures between 0 and this value."""
MISSING_LOGPROB = -9999.0
"""vLLM's value for -inf, NaN, and missing log-probabilities."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class InvalidAnswerError(ValueError):
    """An answer that is incomplete, or contradicts itself or the request."""


class Label(NamedTuple):
    """What vLLM calls its weights: the version, and the session of a run that sent them ("", 0: none did).

    A version is one set of weights only within a session, so each token is labelled with both: `7`, or `7@RUN.EPOCH`.
    """

    version: int
    run: str = ""
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.version}@{self.run}.{self.epoch}" if self.run else str(self.version)

    @classmethod
    def of(cls, text: str) -> Label:
        """Raises InvalidAnswerError for a text that is no label."""
        found = re.fullmatch(r"([0-9]{1,18})(?:@([0-9a-zA-Z]{1,64})\.([0-9]{1,18}))?", text)
        if found is None:
            raise InvalidAnswerError(f"weights are labelled {text[:40]!r}, which is not a version number")
        version, run, epoch = found.groups()
        return cls(int(version), run or "", int(epoch or 0))


# ---- requests and completions


def generate_body(request: GenerationRequest, max_length: int) -> dict[str, Any]:
    """Translate a request for vLLM. Raises PromptTooLongError or RequestError for what vLLM would silently change.

    No seed is sent. The model's end tokens stop a completion only if the request names them. Requests with the same
    `reuses_from` share the cached beginnings of their prompts.
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
        "cache_salt": request.id if request.reuses_from is None else str(request.reuses_from),
        "sampling_params": {name: getattr(sampling, name) for name in names} | fixed,
    }


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...] | None = None


class LabelSpan(msgspec.Struct, frozen=True):
    """vLLM's `WeightVersionSpan`. Its versions are arbitrary text; ours are a `Label`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or the part of it in one line of a stream. Only the last line has spans; they cover all tokens."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: tuple[LabelSpan, ...] | None = None

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Each token with its log-probability. Raises InvalidAnswerError."""
        ids = self.token_ids or ()
        content = (self.logprobs.content if self.logprobs else None) or ()
        if [token.token_id for token in content] != list(ids):
            raise InvalidAnswerError(f"it has {len(content)} log-probs for {len(ids)} tokens, or log-probs of other tokens")
        for token in content:
            if token.logprob <= MISSING_LOGPROB:
                raise InvalidAnswerError(f"token {token.token_id} has no finite log-prob")
        return list(content)


class Choices(msgspec.Struct, frozen=True):
    """An answer, or a line of a stream."""

    choices: tuple[Choice, ...]

    @property
    def only(self) -> Choice:
        """The only choice. Raises InvalidAnswerError if there is not exactly one."""
        if len(self.choices) != 1:
            raise InvalidAnswerError(f"it has {len(self.choices)} choices")
        return self.choices[0]


def completion_of(
    request: GenerationRequest, tokens: Sequence[TokenLogprob], end: Choice, session: tuple[str, int] | None = None
) -> Completion:
    """Build the completion from its tokens. `end`: the last choice. Raises InvalidAnswerError.

    `session`: the run and the epoch that all tokens must be of, if the client updates the weights. Whether it can be the
    answer to the request is checked by its caller (`client.adapter.find_fault`).
    """
    if (reason := _FINISH_REASONS.get(end.finish_reason or "")) is None:
        raise InvalidAnswerError(f"it ended with reason {end.finish_reason!r}")
    spans = []
    for span in end.weight_versions or ():
        label = Label.of(span.version)
        if session not in (None, label[1:]):
            raise InvalidAnswerError("its tokens are of weights of another session, which updates this server")
        spans.append(VersionSpan(label.version, span.start, span.end))
    try:
        versions_from_spans(spans, len(tokens))
    except ValueError as error:
        raise InvalidAnswerError(str(error)) from error
    return Completion(
        request_id=request.id,
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=tuple(token.logprob for token in tokens),
        weight_versions=tuple(spans),
        finish_reason=reason,
    )


# ---- errors


def worker_error(text: str) -> str:
    """Extract the message of a worker process from vLLM's error message around it."""
    _, found, rest = text.partition("Worker failed with error '")
    return rest.rpartition("', please check")[0] or rest if found else text


# ---- the server's configuration


class WeightLabel(msgspec.Struct, frozen=True):
    """GET /weight_info."""

    weight_version: str


class PauseState(msgspec.Struct, frozen=True):
    """GET /is_paused."""

    is_paused: bool


class ModelSection(msgspec.Struct, frozen=True):
    model: str
    max_model_len: int
    logprobs_mode: str


class SchedulerSection(msgspec.Struct, frozen=True):
    max_num_seqs: int


class VllmConfig(msgspec.Struct, frozen=True):
    """The part of vLLM's configuration that is used here."""

    instance_id: str
    model_config: ModelSection
    scheduler_config: SchedulerSection
    weight_transfer_config: dict[str, Any] | None = None

    def problems(self) -> list[str]:
        """Settings that must be changed before the server can be used, each with the flag for it."""
        found = []
        if self.model_config.logprobs_mode != "processed_logprobs":
            found.append("its log-probs are not of the sampled distribution (--logprobs-mode processed_logprobs)")
        if (self.weight_transfer_config or {}).get("backend") != BACKEND:
            found.append(f'it uses another weight transfer (--weight-transfer-config \'{{"backend":"{BACKEND}"}}\')')
        return found


class ServerDescription(msgspec.Struct, frozen=True):
    """GET /server_info?config_format=json."""

    vllm_config: VllmConfig

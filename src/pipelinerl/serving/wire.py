"""The messages between engine servers and their clients: JSON over HTTP.

    GET  /info                    ServerInfo
    POST /generate                GenerationRequest -> Completion; with `stream`, lines: TokenLine ... CompletionLine
    POST /score                   ScoreRequest -> Scores, of the weights that the server has between two of its steps
    POST /init_process_group      ProcessGroupRequest -> {}, once the group is formed
    POST /request_weight_update   WeightUpdateRequest -> UpdateReceipt
    any error                     ErrorBody, with a status in `STATUS`; in a stream, the last line

A request whose connection breaks is cancelled. An id must not be in use by another request.
"""

from __future__ import annotations

import msgspec

from pipelinerl.types import Completion, Segment, TokenEvent, VersionSpan, versions_from_spans

STATUS = {
    "bad_request": 400,  # the request can never be served
    "prompt_too_long": 400,  # the same; the message has the numbers
    "unauthorized": 401,
    "not_found": 404,
    "stale_version": 409,  # weight versions must increase
    "stale_epoch": 409,  # a later session updates the weights now
    "bad_weights": 422,  # checksum, names or shapes differ; the old weights stay
    "overloaded": 429,  # with Retry-After
    "unavailable": 503,  # with Retry-After: the server is starting or stopping, or the engine has failed
}
"""The codes of errors, and the HTTP status of each."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A server's limits, weights and load. `instance` changes at a restart, which loses all requests and weight updates.

    `decode_steps`: steps since the start; 0 if the server does not count them. `vocabulary_digest`: see
    `models.encoding`.
    """

    instance: str
    name: str
    model: str
    slots: int
    max_length: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]
    version: int
    checksum: str
    in_progress: int
    queued: int
    decode_steps: int = 0
    vocabulary_digest: str = ""


class ScoreRequest(msgspec.Struct, frozen=True):
    """Asks for the log-probabilities of the sampled tokens of these segments, at temperature 1."""

    segments: tuple[Segment, ...]


class Scores(msgspec.Struct, frozen=True):
    """For each segment, the log-probabilities of its sampled tokens in order of position."""

    logprobs: list[list[float]]


class ProcessGroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Join the trainer's broadcast at `host`:`port` as receiver number `index` (see `weights.broadcast`).

    `key`: the secret of the broadcast; sender and receivers prove to each other that they have it. `timeout_s`: how long to
    wait for the others. `name`: this receiver's name in the trainer's errors; "": the server's own name. `run`, `epoch`: see
    `WeightUpdateRequest`.
    """

    host: str
    port: int
    key: str
    index: int
    timeout_s: float = 120.0
    name: str = ""
    run: str = ""
    epoch: int = 0


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Apply the weights in the safetensors file at `path`, which must be in a directory that the server allows.

    The file has all weights under the names of the Hugging Face model, tied ones under each of their names. `checksum` is
    `models.state.checksum` of its tensors. Without a path: apply the weights that the trainer has broadcast to the group.
    `run` and `epoch`: the session that updates the weights, by its number. Versions rise within an epoch. Its first update
    may have any version, and the server cancels all requests before it. From then on it refuses earlier epochs of the run,
    and the epoch of another run that it served before. Clients that are no run leave both out.
    """

    version: int
    checksum: str
    path: str | None = None
    run: str = ""
    epoch: int = 0


class TokenLine(msgspec.Struct, frozen=True, tag="token"):
    token: TokenEvent


class CompletionLine(msgspec.Struct, frozen=True, tag="completion"):
    completion: Completion


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    code: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The error body of OpenAI's API, and of Anthropic's."""

    error: ErrorDetail


def token_events(completion: Completion) -> list[TokenEvent]:
    """The tokens that a stream of this completion has. Raises ValueError unless the version spans cover all tokens."""
    versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
    read, spans = completion.prompt_versions, completion.weight_versions
    # A prompt is of the first token's version, at its end, unless an update recomputed it.
    recomputed = bool(read and spans) and read[-1].version != spans[0].version
    first = {span.start: (VersionSpan(span.version, 0, read[-1].end),) if recomputed else read for span in spans}
    return [
        TokenEvent(completion.request_id, index, token_id, logprob, version, first.get(index, ()))
        for index, (token_id, logprob, version) in enumerate(
            zip(completion.token_ids, completion.logprobs, versions, strict=True)
        )
    ]

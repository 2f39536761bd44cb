"""What engine servers and their clients say to each other over HTTP, as JSON.

    GET  /info                    ServerInfo
    POST /generate                GenerationRequest -> Completion; with `stream`, lines: TokenLine ... CompletionLine
    POST /cancel                  CancelRequest -> {}; the request itself then ends with reason "cancelled"
    POST /init_process_group      ProcessGroupRequest -> {}, once the group is formed
    POST /request_weight_update   WeightUpdateRequest -> UpdateReceipt
    any error                     ErrorBody, with the status that `ErrorCode` is listed with

`/generate` is idempotent by request id: sent again while it runs, or soon after it ended, it gives the same completion.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipelinerl.types import Completion, TokenEvent

ErrorCode = Literal[
    "bad_request",  # 400: can never be served as it is
    "prompt_too_long",  # 400: the same, with the numbers
    "unauthorized",  # 401
    "not_found",  # 404
    "stale_version",  # 409: weight versions must rise
    "bad_weights",  # 422: checksum, names or shapes differ; the old weights stay
    "overloaded",  # 429, with Retry-After
    "unavailable",  # 503, with Retry-After: starts, stops, or the engine has failed
    "not_supported",  # 501
]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is and holds. `instance` differs after a restart, when everything it was told is forgotten.

    `decode_steps` counts since the start, 0 from a server that does not count.
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


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class ProcessGroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Join the trainer's broadcast at `host`:`port` as receiver `index` of `receivers` (see `weights.collective`).

    `timeout_s`: how long to wait for the others. `name`: what errors of the trainer call this one; "": its own name.
    """

    host: str
    port: int
    index: int
    receivers: int
    timeout_s: float = 120.0
    name: str = ""


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Take the weights in the safetensors file at `path` (within the directory that the server allows).

    Without a path: those that the trainer broadcasts to the process group.
    """

    version: int
    checksum: str
    path: str | None = None


class TokenLine(msgspec.Struct, frozen=True, tag="token"):
    token: TokenEvent


class CompletionLine(msgspec.Struct, frozen=True, tag="completion"):
    completion: Completion


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    code: ErrorCode
    param: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of OpenAI's API."""

    error: ErrorDetail

"""The protocol of one engine server: its methods, its errors, its timeouts, and what completions must be.

To use another kind of engine, implement `EngineServer` for it.

All methods are called in one event loop. Each has its own timeout, except `generate`, which takes as long as the server
needs: its caller watches the server's health and cancels.

All methods raise ServerUnreachableError, ServerBusyError, and ServerError for what a retry would not help; `generate` also
RequestError (as PromptTooLongError) for a request that can never be served, and those for weights WeightUpdateError if the
server refuses, with its reason, or if they may be half applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipelinerl.errors import PipelineRLError
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, UpdateReceipt, versions_from_spans

TokenListener = Callable[[TokenEvent], None]


class EngineServer(Protocol):
    """One engine behind HTTP."""

    @property
    def url(self) -> str:
        """Its address; also identifies the server in messages."""

    async def info(self) -> ServerInfo:
        """Describe the server and its weights. `instance` must change at a restart; `checksum` is "" if it is unknown."""

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """Return one completion. With `on_token` and `request.stream`, also report each token as it arrives, from index 0.

        Cancelling the awaiting task closes the connection, which ends the request. One that is sent again has a new id.
        """

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver. Returns when all receivers have joined; raises after its timeout."""

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        """Apply the weights from the file or the broadcast in flight, between two tokens: all of them or none.

        A broadcast has already been received and verified. A file does not change before this has returned.

        The receipt's checksum is of the weights that the server then holds; a server that can't compute it returns the
        checksum that it verified before loading. Applying the version and checksum that it already holds is no error.
        """

    async def close(self) -> None:
        """Close all connections."""


# ---- errors


class ServerError(PipelineRLError):
    """A server can't be used as it is: wrong key, wrong address, or an answer that violates the protocol.

    A retry would not help. The message begins with `url`, the server's address.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"engine server {url} {problem}")
        self.url = url
        self.problem = problem


class ServerUnreachableError(ServerError):
    """No connection, a broken one, or no answer in time. The server may have received the request.

    `refused`: nothing listens at the address, so the process that may have had the request has exited or is exiting.
    """

    def __init__(self, url: str, problem: str, *, refused: bool = False) -> None:
        super().__init__(url, problem)
        self.refused = refused


class ServerBusyError(ServerError):
    """The server did not accept the request (429, 503 or another 5xx)."""


class EngineUnavailableError(PipelineRLError):
    """No engine server can serve requests; the message names each server and its last error."""


# ---- timeouts


class Bounds(NamedTuple):
    """Timeouts in seconds, and `tries`.

    A server is gone when it has failed for `silent_s`, or for `refused_s` if nothing listens at its address now.
    """

    startup_s: float = 180.0
    """For all servers to answer for the first time."""
    health_every_s: float = 2.0
    refused_s: float = 3.0
    silent_s: float = 30.0
    join_s: float = 120.0
    """For all servers and the trainer to form a group, if weights are broadcast."""
    update_s: float = 120.0
    """For a server to apply new weights."""
    tries: int = 300
    """How often servers may fail to serve one request, which takes about 10 minutes; then the engine fails."""


def back_off_s(failures: int) -> float:
    """Pause after this many consecutive failures (1, 2, ...): 0.05 s, doubled each time, up to 2 s."""
    return min(2.0, 0.05 * 2.0 ** (min(failures, 10) - 1))


# ---- checks of completions when they arrive


_ROUNDING = 1e-3
"""Log-probabilities may be this far above 0."""


def find_fault(completion: Completion, request: GenerationRequest, vocabulary: int) -> str | None:
    """Describe why `completion` is not a valid answer to `request`, or return None. Nothing is guessed or repaired."""
    ids, logprobs, limit = completion.token_ids, completion.logprobs, request.sampling.max_tokens
    stops, reason = set(request.sampling.stop_token_ids), completion.finish_reason
    ended_by_stop = bool(ids) and ids[-1] in stops
    faults = {
        f"it belongs to request {completion.request_id!r}": completion.request_id != request.id,
        f"it has {len(ids)} tokens, more than the limit of {limit}": len(ids) > limit,
        f"it has {len(ids)} tokens and {len(logprobs)} log-probabilities": len(logprobs) != len(ids),
        "it has log-probabilities that are not finite or above 0": not all(
            math.isfinite(value) and value <= _ROUNDING for value in logprobs
        ),
        f"it has tokens outside the vocabulary of {vocabulary}": any(not 0 <= token < vocabulary for token in ids),
        "it continues after a stop token": not stops.isdisjoint(ids[:-1]),
        'its finish reason is "stop", but its last token is not a stop token': reason == "stop" and not ended_by_stop,
        f'its finish reason is "length" after {len(ids)} of {limit} tokens': reason == "length"
        and (len(ids) != limit or ended_by_stop),
    }
    if found := [fault for fault, is_so in faults.items() if is_so]:
        return found[0]
    try:
        versions_from_spans(completion.weight_versions, len(ids))
    except ValueError as error:
        return str(error)
    return None

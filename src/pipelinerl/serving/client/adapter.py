"""The protocol of one engine server. To use another kind of engine, implement `EngineServer` for it.

All methods are called in one event loop. Each has its own timeout, except `generate`, which takes as long as the server
needs: its caller watches the server's health and cancels.

Errors, the same for every kind of server:

    ServerUnreachableError   no connection, a broken one, no answer in time: the server may have received the request
    ServerBusyError          429, 503, other 5xx: the server did not accept the request; it may say when to retry
    RequestError             only `generate` (including PromptTooLongError): this request can never be served
    WeightUpdateError        `update_weights`, `join_broadcast`: refused, with the server's reason; or possibly half applied
    ServerError              all others (wrong key, no such address, a malformed answer): a retry would not help
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, UpdateReceipt

TokenListener = Callable[[TokenEvent], None]


class EngineServer(Protocol):
    """One engine behind HTTP."""

    @property
    def url(self) -> str:
        """Its address; also identifies the server in messages."""
        ...

    async def info(self) -> ServerInfo:
        """Describe the server and its weights. `instance` must change at a restart; `checksum` is "" if it is unknown."""
        ...

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """Return one completion. With `on_token` and `request.stream`, also report each token as it arrives, from index 0.

        If the request is sent again under the same id after a ServerUnreachableError, a server that supports it returns the
        same completion, and its tokens from index 0. Cancelling the awaiting task closes the connection.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request early: its `generate` returns what exists, with reason "cancelled". Unknown ids are ignored."""
        ...

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver. Returns when all receivers have joined; raises after its timeout."""
        ...

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        """Apply the weights from the file or the broadcast in flight, between two tokens: all of them or none.

        A broadcast has already been received and verified. A file does not change before this has returned.

        The receipt's checksum is of the weights that the server then holds; a server that can't compute it returns the
        checksum that it verified before loading. Applying the version and checksum that it already holds is no error.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

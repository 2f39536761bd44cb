"""One engine server, as the client sees it. To bring another kind of engine, implement `EngineServer` for it.

All methods are called in one event loop. Each returns within a bound of its own or raises, but for `generate`, which lasts
as long as the server needs: its caller watches the server's health and cancels.

Errors, whichever the kind of server:

    ServerUnreachableError   no connection, a broken one, no answer in time: the server may have got what was asked
    ServerBusyError          429, 503, other 5xx: it did not take it, and says when to ask again
    RequestError             `generate` alone; also PromptTooLongError: this request can never be served
    WeightUpdateError        `update_weights`, `join_broadcast`: refused, the server says why; or not known to be whole
    ServerError              all else (wrong key, no such address, a malformed answer): asking again would not help
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, UpdateReceipt

TokenListener = Callable[[TokenEvent], None]


class SavedWeights(NamedTuple):
    """A whole set of weights in a safetensors file, under the names of the Hugging Face model.

    Every name is in the file with its data, tied ones too, so that `checksum` is `models.state.checksum` of what is read.
    The file stays as it is until `update_weights` has returned.
    """

    version: int
    checksum: str
    path: Path


class BroadcastWeights(NamedTuple):
    """A whole set of weights that the trainer has broadcast: servers that joined have received and verified them already."""

    version: int
    checksum: str


WeightOffer = SavedWeights | BroadcastWeights


class EngineServer(Protocol):
    """One engine behind HTTP."""

    @property
    def url(self) -> str:
        """Its address, for people and as its name."""
        ...

    async def info(self) -> ServerInfo:
        """What it is and holds. `instance` must differ after a restart; `checksum` is "" where a server can't tell."""
        ...

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """One completion. With `on_token` (and `request.stream`), every token is also reported as it comes, from index 0.

        Sent again under the same id after a ServerUnreachableError, a server that can gives the same completion, and its
        tokens from the beginning. Cancelling the awaiting task closes the connection.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request soon: its `generate` returns what there is, with reason "cancelled". Unknown ids are ignored."""
        ...

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Become one of the receivers of the trainer's broadcasts. Returns once all of them have; raises after its bound."""
        ...

    async def update_weights(self, update: WeightOffer) -> UpdateReceipt:
        """Take the weights in the file, or those received, in flight, between two tokens: all of them or none.

        The receipt's checksum is of what the server holds then; a server that can't compute one echoes that of what it
        verified. Taking the version and checksum that it holds already is no error.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

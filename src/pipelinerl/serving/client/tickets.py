"""Requests that the client serves: their state, and the tokens of a stream, which are forwarded once."""

from __future__ import annotations

import asyncio

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.serving.client.adapter import TokenListener
from pipelinerl.serving.client.fleet import Replica
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, cancelled_completion


class TokenRelay:
    """Forwards each token of a stream once and in order, even if a retry restarts the stream.

    `request_id` is the id of the forwarded tokens.
    """

    def __init__(self, request_id: str, forward: TokenListener) -> None:
        self._request_id = request_id
        self._forward = forward
        self._seen: list[TokenEvent] = []

    @property
    def count(self) -> int:
        """Number of tokens forwarded."""
        return len(self._seen)

    def take(self, event: TokenEvent) -> None:
        """Forward the token if it is the next one. Repeated tokens, and tokens after a gap, are left to `complete`."""
        if event.index == len(self._seen):
            self._forward_token(msgspec.structs.replace(event, request_id=self._request_id))

    def complete(self, completion: Completion) -> bool:
        """Forward the remaining tokens. Returns False and forwards nothing if the completion contradicts those forwarded."""
        events = token_events(msgspec.structs.replace(completion, request_id=self._request_id))
        if self._seen != events[: self.count]:
            return False
        for event in events[self.count :]:
            self._forward_token(event)
        return True

    def partial_completion(self) -> Completion:
        """A completion of the tokens forwarded so far, for a stream that can't continue."""
        return cancelled_completion(self._request_id, self._seen)

    def _forward_token(self, event: TokenEvent) -> None:
        self._seen.append(event)
        self._forward(event)


class Ticket:
    """A request that is being served. `name` is its id at the servers, unique also among their other clients.

    `slot`: the server of which it has a slot. `asked`: the server that may be serving it now. `rejections`: the errors of
    the servers that can never serve it. `failures`: how often a server that is well did not serve it.
    """

    def __init__(self, name: str, request: GenerationRequest, forward: TokenListener) -> None:
        self.name = name
        self.request = request
        self.relay = TokenRelay(request.id, forward)
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Completion] = loop.create_future()
        self.placed: asyncio.Future[Replica] = loop.create_future()
        self.slot: Replica | None = None
        self.asked: Replica | None = None
        self.attempt = self.failures = 0
        self.rejections: dict[Replica, RequestError] = {}

    @property
    def cancelled(self) -> bool:
        return self.answer.cancelled()

    @property
    def restricted(self) -> bool:
        """Whether only some servers may serve it."""
        return self.request.copy is not None or bool(self.rejections)

    @property
    def wire_request(self) -> GenerationRequest:
        return msgspec.structs.replace(self.request, id=f"{self.name}.{self.attempt}", copy=None)

"""Connects the engine's thread with the coroutines that answer requests, by one call into the event loop per step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from pipelinerl.errors import PipelineRLError, RequestError
from pipelinerl.serving.server.engine_thread import Delivery, EngineThread
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, TokenEvent


class Generation:
    """One submitted request. Any number of coroutines may follow it.

    `outcome` is None while the request is in progress. `abandoned`: cancelled because it had no followers. `keep`: the
    completion is kept for a repeated request.
    """

    def __init__(self, request: GenerationRequest, *, keep: bool) -> None:
        self.request = request
        self.keep = keep
        self.followers = 0
        self.abandoned = False
        self.outcome: Completion | PipelineRLError | None = None
        self._tokens: list[TokenEvent] = []
        self._changed = asyncio.Event()

    async def ended(self) -> None:
        while self.outcome is None:
            await self._changed.wait()

    async def begun(self) -> None:
        """Wait for the first token or the end. Raises the request's error, if it failed."""
        while not self._tokens and self.outcome is None:
            await self._changed.wait()
        if isinstance(self.outcome, PipelineRLError):
            raise self.outcome

    async def completion(self) -> Completion:
        """Wait for the completion. Raises the request's error, if it failed."""
        await self.ended()
        if isinstance(self.outcome, Completion):
            return self.outcome
        raise self.outcome or AssertionError

    async def batches(self) -> AsyncGenerator[list[TokenEvent]]:
        """Yield all tokens in order, in one batch per engine step. If the request does not stream: one batch at the end."""
        sent = 0
        while True:
            tokens = self._tokens if self.outcome is None else token_events(await self.completion())
            if len(tokens) > sent:
                batch, sent = tokens[sent:], len(tokens)
                yield batch
            elif self.outcome is not None:
                return
            else:
                await self._changed.wait()

    def add(self, event: TokenEvent) -> None:
        self._tokens.append(event)

    def end(self, outcome: Completion | PipelineRLError) -> None:
        self.outcome = outcome
        self._tokens = []

    def wake(self) -> None:
        """Wake all waiting coroutines; each checks its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()


class _Kept(NamedTuple):
    request_id: str
    size: int
    at_s: float


class Exchange:
    """Starts the engine's thread and receives its deliveries. Used only in the event loop that it was created in.

    Of the generations that `submit_once` started, it keeps the completed ones for `keep_s`, up to `keep_tokens` tokens.
    """

    def __init__(
        self,
        engine: EngineThread,
        *,
        keep_s: float = 600.0,
        keep_tokens: int = 500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self._keep_s, self._keep_tokens, self._clock = engine, keep_s, keep_tokens, clock
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Generation] = {}  # in progress or kept
        self._kept: deque[_Kept] = deque()
        self._kept_tokens = 0
        engine.start(self._from_engine)

    def submit(self, request: GenerationRequest, *, keep: bool = False) -> Generation:
        """Submit a request with a new id. Raises as `EngineThread.submit` does."""
        self.engine.submit(request)
        generation = self._known[request.id] = Generation(request, keep=keep)
        return generation

    async def submit_once(self, request: GenerationRequest) -> Generation:
        """Submit the request, or return the generation of the same request that was submitted before.

        Raises as `EngineThread.submit` does, and RequestError if the id was used for another request.
        """
        while (known := self._known.get(request.id)) is not None:
            if msgspec.structs.replace(known.request, stream=request.stream) != request:
                raise RequestError(f"request id {request.id!r} was used for another request; give each request a unique id")
            if not known.abandoned:
                return known
            # The known one was just cancelled for lack of followers. It ends with the next step; then start a new one.
            await known.ended()
        return self.submit(request, keep=True)

    def forget(self) -> None:
        """Answer no request with what was completed before now: the next one with its id generates again."""
        for kept in self._kept:
            del self._known[kept.request_id]
        self._kept.clear()
        self._kept_tokens = 0

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary. Unknown ids are ignored."""
        self.engine.cancel(request_id)

    @contextmanager
    def following(self, generation: Generation, grace_s: float = 0.0) -> Iterator[None]:
        """Follow the generation inside the context. It is cancelled if it has no followers `grace_s` after one has left."""
        generation.followers += 1
        try:
            yield
        finally:
            generation.followers -= 1
            if grace_s > 0:
                self._loop.call_later(grace_s, self._cancel_unless_followed, generation)
            else:
                self._cancel_unless_followed(generation)

    def _cancel_unless_followed(self, generation: Generation) -> None:
        if not generation.followers and generation.outcome is None:
            generation.abandoned = True
            self.cancel(generation.request.id)

    def _from_engine(self, delivery: Delivery) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, delivery)

    def _deliver(self, delivery: Delivery) -> None:
        changed: dict[str, Generation] = {}
        for event in delivery.tokens:
            generation = changed[event.request_id] = self._known[event.request_id]
            generation.add(event)
        for completion in delivery.finished:
            changed[completion.request_id] = self._end(completion.request_id, completion)
        for request_id, error in delivery.failed:
            changed[request_id] = self._end(request_id, error)
        for generation in changed.values():
            generation.wake()

    def _end(self, request_id: str, outcome: Completion | PipelineRLError) -> Generation:
        """Keep a completed generation for a retry, or forget it; a retry then generates again."""
        generation = self._known[request_id]
        generation.end(outcome)
        if not isinstance(outcome, Completion) or generation.abandoned or not generation.keep:
            del self._known[request_id]
            return generation
        now_s = self._clock()
        size = len(generation.request.prompt_ids) + len(outcome.token_ids)
        self._kept.append(_Kept(request_id, size, now_s))
        self._kept_tokens += size
        while self._kept and (self._kept_tokens > self._keep_tokens or now_s - self._kept[0].at_s > self._keep_s):
            oldest = self._kept.popleft()
            self._kept_tokens -= oldest.size
            del self._known[oldest.request_id]
        return generation

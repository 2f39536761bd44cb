"""Between the engine's thread and the coroutines that answer requests: one call into the event loop for each engine step."""

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
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, versions_from_spans


class Generation:
    """One request, from its submission on. Any number of coroutines may follow it.

    `outcome` is None while it is in progress. `abandoned` once it was cancelled because nobody followed it any more.
    """

    def __init__(self, request: GenerationRequest, on_end: Callable[[Generation], None]) -> None:
        self.request = request
        self._on_end = on_end
        self.followers = 0
        self.abandoned = False
        self.outcome: Completion | PipelineRLError | None = None
        self._tokens: list[TokenEvent] = []
        self._changed = asyncio.Event()

    async def ended(self) -> None:
        while self.outcome is None:
            await self._changed.wait()

    async def begun(self) -> None:
        """Wait for its first token, or its end. Raises why there will be none."""
        while not self._tokens and self.outcome is None:
            await self._changed.wait()
        if isinstance(self.outcome, PipelineRLError):
            raise self.outcome

    async def completion(self) -> Completion:
        """Raises why there is none."""
        await self.ended()
        if isinstance(self.outcome, Completion):
            return self.outcome
        raise self.outcome or AssertionError

    async def batches(self) -> AsyncGenerator[list[TokenEvent]]:
        """All tokens, in order: those there are, then each step's; all at once at the end if the request does not stream."""
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
        self._on_end(self)

    def wake(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()


def token_events(completion: Completion) -> list[TokenEvent]:
    """A completion's tokens, as they would have been streamed."""
    versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
    return [
        TokenEvent(completion.request_id, index, token_id, logprob, version)
        for index, (token_id, logprob, version) in enumerate(
            zip(completion.token_ids, completion.logprobs, versions, strict=True)
        )
    ]


class Exchange:
    """Starts the engine's thread and takes its deliveries. All methods belong to the event loop it was made in."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Generation] = {}
        engine.start(self._from_engine)

    def submit(self, request: GenerationRequest, on_end: Callable[[Generation], None] = lambda _: None) -> Generation:
        """`on_end` is called when it has an outcome. Raises as `EngineThread.submit` does."""
        self.engine.submit(request)
        generation = self._open[request.id] = Generation(request, on_end)
        return generation

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary. Unknown ids are ignored."""
        self.engine.cancel(request_id)

    @contextmanager
    def following(self, generation: Generation, grace_s: float = 0.0) -> Iterator[None]:
        """While inside somebody wants the generation. It is cancelled when nobody has wanted it for `grace_s`."""
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
            generation = changed[event.request_id] = self._open[event.request_id]
            generation.add(event)
        for completion in delivery.finished:
            generation = changed[completion.request_id] = self._open.pop(completion.request_id)
            generation.end(completion)
        for request_id, error in delivery.failed:
            generation = changed[request_id] = self._open.pop(request_id)
            generation.end(error)
        for generation in changed.values():
            generation.wake()


# ------------------------------------------------------------------------------------------------------------------------
# A request that is sent again is answered with what the first one made, and never generated twice.


class _Ended(NamedTuple):
    request_id: str
    size: int
    at_s: float


class OncePerId:
    """Generations by request id: those in progress and, for `keep_s`, those that ended (the last `keep_tokens` of them)."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        keep_s: float = 600.0,
        keep_tokens: int = 500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._keep_s = keep_s
        self._keep_tokens = keep_tokens
        self._clock = clock
        self._known: dict[str, Generation] = {}
        self._ended: deque[_Ended] = deque()
        self._size = 0

    async def generation(self, request: GenerationRequest) -> Generation:
        """The generation of this request: the one there is, or a new one.

        Raises as `EngineThread.submit` does, and RequestError if the id was that of another request.
        """
        while (known := self._known.get(request.id)) is not None:
            if msgspec.structs.replace(known.request, stream=request.stream) != request:
                raise RequestError(f"request id {request.id!r} was used for another request; give each an id of its own")
            if not known.abandoned:
                return known
            # Given up a moment ago, as nobody wanted it: it ends with the next step, and this one begins anew.
            await known.ended()
        generation = self._known[request.id] = self._exchange.submit(request, on_end=self._keep)
        return generation

    def _keep(self, generation: Generation) -> None:
        """Keep what ended, and forget what is too old or too much."""
        request, outcome = generation.request, generation.outcome
        if not isinstance(outcome, Completion) or generation.abandoned:
            del self._known[request.id]  # there is nothing that a second try should get
            return
        now_s = self._clock()
        size = len(request.prompt_ids) + len(outcome.token_ids)
        self._ended.append(_Ended(request.id, size, now_s))
        self._size += size
        while self._ended and (self._size > self._keep_tokens or now_s - self._ended[0].at_s > self._keep_s):
            oldest = self._ended.popleft()
            self._size -= oldest.size
            del self._known[oldest.request_id]

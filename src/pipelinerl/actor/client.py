"""Connects rollouts (coroutines that await tokens) with an engine, in one event loop.

rollout ─▶ RolloutClient ─▶ AsyncEngine: `EngineClient` over an engine in this process, or a client of engine servers
                └ Awake: which rollouts run code of their own, instead of waiting for tokens
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import CANCELLED_KEPT, AsyncEngine, StepOutput, Tokenizer, WeightUpdate
from pipelinerl.types import (
    Completion,
    EngineProgress,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Turn,
    UpdateReceipt,
    cancelled_completion,
)

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine

MOST_PASSES = 8
"""Passes of the event loop after which a rollout that is still awake is taken to wait for something else than tokens."""


class EngineClient:
    """An engine in this process as an `AsyncEngine`: `advance` runs one step and wakes the coroutines that wait for it."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._open: dict[str, Callable[[Any], object]] = {}  # what takes the tokens and the completion of each request
        self._cancelled: deque[Completion] = deque(maxlen=CANCELLED_KEPT)

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def in_progress(self) -> int:
        return self._engine.in_progress

    @property
    def queued(self) -> int:
        return self._engine.queued

    @property
    def copies(self) -> int:
        return self._engine.copies

    def progress(self) -> EngineProgress:
        return self._engine.progress()

    def take_cancelled(self) -> list[Completion]:
        taken, self._cancelled = list(self._cancelled), deque(maxlen=CANCELLED_KEPT)
        return taken

    async def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        return self._engine.update_weights(update)

    async def advance(self) -> bool:
        """Run one step, deliver its output and give the event loop one pass.

        Raises RuntimeError for a completion of an unknown request, unless it was cancelled, and any error of the engine.
        """
        if self.in_progress + self.queued == 0:
            return False
        self._deliver(self._engine.step())
        await asyncio.sleep(0)
        return True

    def _deliver(self, output: StepOutput) -> None:
        for event in output.tokens:
            if (take := self._open.get(event.request_id)) is not None:
                take(event)
        for completion in output.finished:
            if (take := self._open.pop(completion.request_id, None)) is not None:
                take(completion)
            elif completion.finish_reason == "cancelled":
                self._cancelled.append(completion)
            else:
                raise RuntimeError(f"the engine finished {completion.request_id!r}, which is not awaited")

    async def generate(self, request: GenerationRequest) -> Completion:
        """Submit at once and await. Raises RequestError at once if the request can't be served."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._submit(request, lambda answer: None if done.done() else done.set_result(answer))  # done: it was cancelled
        try:
            return await done
        finally:
            self._withdraw(request.id)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        events: asyncio.Queue[TokenEvent | Completion] = asyncio.Queue()
        self._submit(msgspec.structs.replace(request, stream=True), events.put_nowait)
        try:
            while not isinstance(event := await events.get(), Completion):
                yield event
            yield event
        finally:
            self._withdraw(request.id)

    def _submit(self, request: GenerationRequest, take: Callable[[Any], object]) -> None:
        if request.id in self._open:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request an id of its own")
        self._engine.submit(request)
        self._open[request.id] = take

    def _withdraw(self, request_id: str) -> None:
        """Cancel the request unless it has ended."""
        if self._open.pop(request_id, None) is not None:
            self._engine.cancel(request_id)


class Awake(set["RolloutClient"]):
    """The rollouts that were started or got tokens, and have neither asked for more tokens nor ended since."""

    async def settle(self) -> None:
        """Let rollouts run until none is awake. Those that are awake after `MOST_PASSES` passes are not waited for again."""
        for _ in range(MOST_PASSES):
            if not self:
                return
            await asyncio.sleep(0)
        self.clear()


class RolloutClient:
    """One rollout's view of the engine; implements `interfaces.GenerationClient`.

    `name` identifies the rollout in the run (`g12.a3`): its requests are `g12.a3.t0`, `g12.a3.t1`, ... `sampling` holds
    the run's parameters; its `max_tokens` is both the default and the upper limit. `seed` is the rollout's; each request
    gets a seed derived from it. The rollout is in `awake` whenever it does not wait for tokens, from now on until `close`.
    `reuses_from` is asked at each request: see `GenerationRequest`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        name: str,
        seed: int,
        awake: Awake | None = None,
        reuses_from: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._reuses_from = reuses_from
        self._awake = Awake() if awake is None else awake
        self._awake.add(self)
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.name = name
        self._seed = seed
        self._turns = 0
        self._closed = False
        self._produced: dict[str, Turn] = {}
        self._streamed: dict[str, tuple[tuple[int, ...], list[TokenEvent]]] = {}

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        """One completion of at most `max_tokens` tokens (never more than the run's limit).

        Raises PromptTooLongError or RequestError at once if the engine can't serve the request.
        """
        request = self._request(prompt_ids, max_tokens)
        self._awake.discard(self)
        try:
            completion = await self._engine.generate(request)
        finally:
            self._wake()
        self._produced[request.id] = Turn(prompt_ids=request.prompt_ids, completion=completion)
        return completion

    async def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> AsyncIterator[TokenEvent]:
        """The same, token by token. Leaving the loop early cancels the request; `completions[-1]` has its tokens so far."""
        request = self._request(prompt_ids, max_tokens)
        seen: list[TokenEvent] = []
        self._streamed[request.id] = (request.prompt_ids, seen)
        events = self._engine.stream(request)
        try:
            while True:
                self._awake.discard(self)
                try:
                    event = await anext(events)
                finally:
                    self._wake()
                if isinstance(event, Completion):
                    break
                seen.append(event)
                yield event
        finally:
            await events.aclose()
        del self._streamed[request.id]
        self._produced[request.id] = Turn(prompt_ids=request.prompt_ids, completion=event)

    def _wake(self) -> None:
        if not self._closed:
            self._awake.add(self)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All completions so far. Streams that were left early (reason `cancelled`) come last."""
        return tuple(turn.completion for turn in self.produced().values())

    def produced(self) -> dict[str, Turn]:
        """Prompts and completions so far, by request id, as turns without a text."""
        unfinished = {
            request_id: Turn(prompt_ids=prompt_ids, completion=cancelled_completion(request_id, events))
            for request_id, (prompt_ids, events) in self._streamed.items()
        }
        return self._produced | unfinished

    def close(self) -> None:
        """End the rollout. Code of it that still runs gets a RolloutError from then on."""
        self._closed = True
        self._awake.discard(self)

    def _request(self, prompt_ids: Sequence[int], max_tokens: int | None) -> GenerationRequest:
        if self._closed:
            raise RolloutError(f"rollout {self.name} is over; its client can't be used any more")
        limit = self.sampling.max_tokens if max_tokens is None else min(max_tokens, self.sampling.max_tokens)
        turn, self._turns = self._turns, self._turns + 1
        return GenerationRequest(
            id=f"{self.name}.t{turn}",
            prompt_ids=tuple(map(int, prompt_ids)),
            sampling=msgspec.structs.replace(self.sampling, max_tokens=limit, seed=derive_seed(self._seed, turn)),
            reuses_from=self._reuses_from(),
            turn=turn,
        )


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed derived from `parts`, which identify its use. Equal parts give equal seeds on any machine."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

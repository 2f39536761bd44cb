"""Connects rollouts (coroutines that await tokens) with the engine, which runs one step at a time in the same thread.

A rollout submits a request through its `RolloutClient` and awaits the completion. After each engine step, `EngineClient`
delivers the step's output, which wakes the rollouts that wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from pipelinerl.actor.deadline import own_code
from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import Engine, StepOutput, Tokenizer
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, TokenEvent, spans_from_versions

PASSES_TO_REACT = 2
"""Event-loop passes that a rollout needs from a finished completion to its end or its next request. If its code awaits more
often, the result is seen one engine step later."""
CANCELLED = 4096
"""Limit on the completions of cancelled requests kept for `take_cancelled`."""


class _Open(NamedTuple):
    """A request in the engine. `tokens` is set for a stream; None in the queue marks its end."""

    completion: asyncio.Future[Completion]
    tokens: asyncio.Queue[TokenEvent | None] | None


class EngineClient:
    """Lets coroutines await completions of an `Engine`. The owner of the client calls `step`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[str, _Open] = {}
        self._cancelled: deque[Completion] = deque(maxlen=CANCELLED)

    def take_cancelled(self) -> list[Completion]:
        """Completions of cancelled requests that the engine has ended since the last call."""
        taken, self._cancelled = list(self._cancelled), deque(maxlen=CANCELLED)
        return taken

    @property
    def open_requests(self) -> int:
        """Number of requests that are awaited."""
        return len(self._open)

    def deliver(self, output: StepOutput) -> None:
        """Pass one step's tokens and completions to the coroutines that await them.

        Raises RuntimeError for a completion of an unknown request, unless it was cancelled.
        """
        for event in output.tokens:
            request = self._open.get(event.request_id)
            if request is not None and request.tokens is not None:
                request.tokens.put_nowait(event)
        for completion in output.finished:
            request = self._open.pop(completion.request_id, None)
            if request is None:
                if completion.finish_reason != "cancelled":
                    raise RuntimeError(f"the engine finished {completion.request_id!r}, which is not awaited")
                self._cancelled.append(completion)
                continue
            if not request.completion.done():  # done if the awaiting task was just cancelled
                request.completion.set_result(completion)
            if request.tokens is not None:
                request.tokens.put_nowait(None)
        for request_id, error in output.failed:
            request = self._open.pop(request_id, None)
            if request is not None and not request.completion.done():
                request.completion.set_exception(error)
            if request is not None and request.tokens is not None:
                request.tokens.put_nowait(None)

    async def step(self) -> bool:
        """Run one engine step, deliver its output and let rollouts react. Returns False, without a step, if it is empty."""
        if self.engine.in_progress + self.engine.queued == 0:
            return False
        output = self.engine.step()
        self.deliver(output)
        await let_rollouts_run(PASSES_TO_REACT if output.finished or output.failed else 1)
        return True

    async def generate(self, request: GenerationRequest) -> Completion:
        """Submit and await. Raises RequestError, at once or later, if it can't be served. Cancelling cancels the request."""
        opened = self._submit(request, None)
        try:
            return await opened.completion
        finally:
            self._cancel(request.id)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        """Every token as it is sampled, then the completion. Closing the iterator early cancels the request."""
        tokens: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        opened = self._submit(msgspec.structs.replace(request, stream=True), tokens)
        try:
            while (event := await tokens.get()) is not None:
                yield event
            yield opened.completion.result()
        finally:
            self._cancel(request.id)

    def _submit(self, request: GenerationRequest, tokens: asyncio.Queue[TokenEvent | None] | None) -> _Open:
        if request.id in self._open:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request an id of its own")
        with own_code():
            self.engine.submit(request)
            opened = _Open(asyncio.get_running_loop().create_future(), tokens)
            self._open[request.id] = opened
        return opened

    def _cancel(self, request_id: str) -> None:
        if request_id in self._open:
            with own_code():
                del self._open[request_id]
                self.engine.cancel(request_id)


class Produced(NamedTuple):
    """Prompt and completion of one request of a rollout."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class RolloutClient:
    """One rollout's view of the engine; implements `interfaces.GenerationClient`.

    `name` identifies the rollout in the run (`g12.a3`): its requests are `g12.a3.t0`, `g12.a3.t1`, ... `sampling` holds
    the run's parameters; its `max_tokens` is both the default and the upper limit. `seed` is the rollout's; each request
    gets a seed derived from it.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, sampling: SamplingParams, *, name: str, seed: int
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._name = name
        self._seed = seed
        self._turns = 0
        self._closed = False
        self._produced: dict[str, Produced] = {}
        self._streamed: dict[str, tuple[tuple[int, ...], list[TokenEvent]]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        """One completion of at most `max_tokens` tokens (never more than the run's limit).

        Raises PromptTooLongError or RequestError at once if the engine can't serve the request.
        """
        request = self._request(prompt_ids, max_tokens)
        completion = await self._client.generate(request)
        self._produced[request.id] = Produced(request.prompt_ids, completion)
        return completion

    async def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> AsyncIterator[TokenEvent]:
        """The same, token by token. Leaving the loop early cancels the request; `completions[-1]` has its tokens so far."""
        request = self._request(prompt_ids, max_tokens)
        seen: list[TokenEvent] = []
        self._streamed[request.id] = (request.prompt_ids, seen)
        async with aclosing(self._client.stream(request)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    del self._streamed[request.id]
                    self._produced[request.id] = Produced(request.prompt_ids, event)
                else:
                    seen.append(event)
                    yield event

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All completions so far. Streams that were left early (reason `cancelled`) come last."""
        return tuple(produced.completion for produced in self.produced().values())

    def produced(self) -> dict[str, Produced]:
        """Prompts and completions so far, by request id."""
        unfinished = {
            request_id: Produced(prompt_ids, _completion_of(request_id, events))
            for request_id, (prompt_ids, events) in self._streamed.items()
        }
        return self._produced | unfinished

    def close(self) -> None:
        """End the rollout. Code of it that still runs gets a RolloutError from then on."""
        self._closed = True

    def _request(self, prompt_ids: Sequence[int], max_tokens: int | None) -> GenerationRequest:
        if self._closed:
            raise RolloutError(f"rollout {self._name} is over; its client can't be used any more")
        limit = self._sampling.max_tokens if max_tokens is None else min(max_tokens, self._sampling.max_tokens)
        turn, self._turns = self._turns, self._turns + 1
        return GenerationRequest(
            id=f"{self._name}.t{turn}",
            prompt_ids=tuple(map(int, prompt_ids)),
            sampling=msgspec.structs.replace(self._sampling, max_tokens=limit, seed=derive_seed(self._seed, turn)),
        )


async def let_rollouts_run(passes: int = PASSES_TO_REACT) -> None:
    """Let every ready coroutine run, for `passes` passes of the event loop."""
    for _ in range(passes):
        await asyncio.sleep(0)


def rollout_of(request_id: str) -> str:
    """The name of the request's rollout: `g12.a3` for `g12.a3.t0`."""
    return request_id.rpartition(".")[0]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed derived from `parts`, which identify its use. Equal parts give equal seeds on any machine."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _completion_of(request_id: str, events: Sequence[TokenEvent]) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=tuple(event.token_id for event in events),
        logprobs=tuple(event.logprob for event in events),
        weight_versions=spans_from_versions(event.version for event in events),
        finish_reason="cancelled",
    )

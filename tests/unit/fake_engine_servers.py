"""Engine servers without HTTP, for tests of their client: they answer by a script and fail on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import Bounds, ServerUnreachableError, TokenListener
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, TokenEvent, UpdateReceipt
from tests.unit.group_parts import completion, receipt

VOCABULARY = 50


async def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def request(name: str, tokens: int = 5, *, stream: bool = False, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, **sampling)
    return GenerationRequest(id=name, prompt_ids=(3, 4, 5), sampling=params, stream=stream)


def completion_of(request: GenerationRequest, version: int = 0, offset: int = 0) -> Completion:
    """`max_tokens` tokens that follow from the prompt alone (and `offset`)."""
    count = request.sampling.max_tokens
    tokens = [(sum(request.prompt_ids) + offset + index) % VOCABULARY for index in range(count)]
    logprobs = [-(index + 1) / 8 for index in range(count)]
    return completion(tokens, logprobs, version, name=request.id, reason="length")


FAST = Bounds(startup_s=0.2, health_every_s=0.01, refused_s=0.05, silent_s=0.2, update_s=0.3, tries=8)


@asynccontextmanager
async def engine_over(*servers: FakeServer, **options: Any) -> AsyncIterator[RemoteEngine]:
    """An engine that does not wait long for its servers."""
    async with RemoteEngine.connect(servers, **{"bounds": FAST} | options) as engine:
        yield engine


class FakeServer:
    """While `held` it answers nothing; with a `problem` it answers that. `applied` changes what it answers to an update."""

    def __init__(self, url: str, *, slots: int = 4, max_length: int = 100, vocabulary: int = VOCABULARY) -> None:
        self.url = url
        self.slots, self.max_length, self.vocabulary = slots, max_length, vocabulary
        self.instance = self.version = 0
        self.checksum = "start"
        self.problem: Exception | None = None
        self.applied: Callable[[UpdateReceipt], Awaitable[UpdateReceipt]] | None = None
        self.answer: Callable[[GenerationRequest], Completion] = lambda request: completion_of(request, self.version)
        self.held = False
        self.calls: list[GenerationRequest] = []
        self.updates: list[WeightUpdateRequest] = []
        self.joined: ProcessGroupRequest | None = None
        self.running = self.most_running = 0
        self.closed = False

    def restart(self) -> None:
        """Another process at the same address: it has forgotten everything."""
        self.instance += 1
        self.version, self.checksum = 0, "start"
        self.joined = None

    def refuse(self) -> None:
        """Nothing listens any more."""
        self.problem = ServerUnreachableError(self.url, "refuses the connection", refused=True)

    async def info(self) -> ServerInfo:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        return ServerInfo(
            instance=str(self.instance),
            name=self.url,
            model="fake",
            slots=self.slots,
            max_length=self.max_length,
            vocabulary=self.vocabulary,
            stop_token_ids=(),
            version=self.version,
            checksum=self.checksum,
            in_progress=self.running,
            queued=0,
        )

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        self.calls.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if self.problem is not None:
                raise self.problem
            while self.held:
                await asyncio.sleep(0.001)
            if self.problem is not None:
                raise self.problem
            completion = self.answer(request)
            for index, (token_id, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=False)):
                if on_token is not None and request.stream:
                    on_token(TokenEvent(request.id, index, token_id, logprob, self.version))
            return completion
        finally:
            self.running -= 1

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        await asyncio.sleep(0)
        self.joined = group

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        if update.path is None and self.joined is None:
            raise WeightUpdateError("no process group to receive from")
        self.updates.append(update)
        self.version, self.checksum = update.version, update.checksum
        busy = {"pause_s": 0.25 * self.slots, "sequences_in_flight": self.running}
        done = receipt(update.version, update.checksum, engine=self.url, **busy)
        return done if self.applied is None else await self.applied(done)

    async def close(self) -> None:
        self.closed = True

"""One engine samples for all clients: it has the weights of one target at a time, and targets take turns.

A request for the weights in the engine starts at once, unless requests for others wait. Then the engine finishes what it
has, takes the weights that have waited longest, and starts all requests for them. New weights of a target that clients
sample from in flight (`publish`) are applied between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.adapters import Adapter, tensors_of
from pipelinerl.serving.server.chat import StopStrings
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.serving.server.tinker.wire import SampledTokens
from pipelinerl.types import GenerationRequest, Segment


@dataclass(eq=False)
class SamplerTarget:
    """Weights that are sampled from: an adapter after `version` optimizer steps; the base model's has no layers."""

    name: str
    adapter: Adapter = field(default_factory=dict)
    version: int = 0


class SampledFrom(NamedTuple):
    """Which weights sampled the tokens from `start` to before `end` of a sequence."""

    weights: str
    version: int
    start: int
    end: int


class Sampler:
    """Used only in one event loop."""

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._held: SamplerTarget | None = None
        self._waiting: list[SamplerTarget] = []
        self._users = 0
        self._changed = asyncio.Condition()
        self._loaded: dict[int, tuple[str, int]] = {}  # by version of the engine: the target's name and version

    @asynccontextmanager
    async def _turn(self, target: SamplerTarget) -> AsyncIterator[None]:
        """Inside, the engine has the weights of `target`. Raises WeightUpdateError if it can't take them."""
        async with self._changed:
            self._waiting.append(target)
            try:
                await self._changed.wait_for(
                    lambda: self._waiting[0] is target and (self._held is target or not self._users)
                )
                if self._held is not target:
                    await self._load(target)
                    self._waiting.sort(key=lambda one: one is not target)  # all that wait for them begin now
            finally:
                self._waiting.remove(target)
                self._changed.notify_all()
            self._users += 1
        try:
            yield
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def _load(self, target: SamplerTarget) -> None:
        about, self._held = (target.name, target.version), None
        version = self._engine.holding.version + 1
        self._loaded[version] = about
        await self._engine.update(WeightUpdate(version, "", tensors_of(target.adapter), adapter=True))
        self._held = target

    async def publish(self, target: SamplerTarget, adapter: Adapter, version: int) -> None:
        """Give a target new weights. If the engine has its old ones, it takes the new ones between two tokens.

        Raises WeightUpdateError if it can't; requests in progress then go on with the old ones.
        """
        async with self._changed:
            target.adapter, target.version = adapter, version
            if self._held is target:
                await self._load(target)

    async def sample(
        self, target: SamplerTarget, request: GenerationRequest, count: int, stops: Sequence[str], prompt_logprobs: bool
    ) -> tuple[list[SampledTokens], list[float]]:
        """Sample a request `count` times with the weights of `target`, each with a seed of its own.

        Sequences also end after a string of `stops`. Returns them, and the log-probabilities of the prompt's tokens after
        the first, if wanted. Raises the errors of the engine for a request that it can't serve.
        """
        sampling, ids, served = request.sampling, request.prompt_ids, []
        async with self._turn(target):
            version = self._engine.holding.version  # keys and values of other weights are not reused
            request = replace(request, stream=bool(stops), reuses_from=version)
            with ExitStack() as stack:
                for index in range(count):
                    own = replace(sampling, seed=None if sampling.seed is None else (sampling.seed + index) % (1 << 63))
                    one = replace(request, id=f"{request.id}/{index}", sampling=own)
                    served.append(stack.enter_context(self._engine.following(one)))
                found = [await self._sequence(one, stops) for one in served]
            if not prompt_logprobs or len(ids) == 1:
                return found, []
            segment = Segment(token_ids=ids, sampled=((1, len(ids)),))
            (logprobs,) = await self._engine.between_steps(lambda: self._service.scores([segment]))
            return found, logprobs

    async def _sequence(self, served: ServedRequest, stops: Sequence[str]) -> SampledTokens:
        count = await self._stopped_after(served, stops) if stops else None
        completion = await served.completion()
        if count is None and completion.finish_reason == "cancelled":
            raise RefusedError("unavailable", "the request was cancelled: the server is stopping")
        tokens, logprobs = completion.token_ids[:count], completion.logprobs[:count]
        stopped = count is not None or completion.finish_reason == "stop"
        spans = [(self._loaded[span.version], span) for span in completion.weight_versions if span.start < len(tokens)]
        weights = [SampledFrom(*about, span.start, min(span.end, len(tokens))) for about, span in spans]
        return SampledTokens(tokens, logprobs, stopped, weights)

    async def _stopped_after(self, served: ServedRequest, stops: Sequence[str]) -> int | None:
        """End a sequence at the token that completes a stop string. Returns the number of tokens, or None without one."""
        text, stop, count = TextStream(plain_decoder(self._service.loaded.tokenizer)), StopStrings(stops), 0
        async for batch in served.batches():
            for event in batch:
                count += 1
                stop.feed(text.feed([event.token_id]))
                if stop.found is not None:
                    self._engine.cancel(served.request.id)
                    return count
        stop.feed(text.rest())
        return count if stop.found is not None else None

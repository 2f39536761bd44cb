"""Our own endpoints, with the messages of `wire`: generation by token ids, and weight updates."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from pipelinerl.serving.server.exchange import Generation
from pipelinerl.serving.server.http import (
    Stream,
    answer,
    body_of,
    check_request,
    decoded,
    json_line,
    unavailable,
    unless_gone,
)
from pipelinerl.serving.server.service import ServiceHolder
from pipelinerl.serving.wire import CancelRequest, CompletionLine, ProcessGroupRequest, TokenLine, WeightUpdateRequest
from pipelinerl.types import GenerationRequest

RETRY_GRACE_S = 5.0
"""How long a generation continues after its connection broke, so that the client can retry."""


class Native:
    """Handlers of the endpoints. They raise RefusedError (503) until `holder` has a service."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    async def info(self, _: Request) -> Response:
        return answer(self._holder.service.info())

    async def health(self, _: Request) -> Response:
        """200 while requests are accepted, else 503 with the reason."""
        service = self._holder.service
        if service.engine.refusing is not None:
            raise unavailable(service.engine.refusing)
        return answer({"status": "ready", "version": service.engine.holding.version})

    async def generate(self, request: Request) -> Response:
        service = self._holder.service
        wanted = decoded(await body_of(request), GenerationRequest)
        check_request(wanted)
        with ExitStack() as stack:
            generation = await service.exchange.submit_once(wanted)
            stack.enter_context(service.exchange.following(generation, RETRY_GRACE_S))
            if not wanted.stream:
                return answer(await unless_gone(request, generation.completion()))
            await unless_gone(request, generation.begun())  # refused requests get an error status, not a stream
            return Stream(_lines(generation), stack.pop_all(), json_line, "application/x-ndjson")

    async def cancel(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), CancelRequest)
        self._holder.service.exchange.cancel(wanted.request_id)
        return answer({})

    async def request_weight_update(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), WeightUpdateRequest)
        return answer(await self._holder.service.updates.take(wanted))

    async def init_process_group(self, request: Request) -> Response:
        """Answers once the trainer and all its receivers have formed the group."""
        wanted = decoded(await body_of(request), ProcessGroupRequest)
        await self._holder.service.updates.join(wanted)
        return answer({})


async def _lines(generation: Generation) -> AsyncGenerator[bytes]:
    async for batch in generation.batches():
        yield b"".join(json_line(TokenLine(token=event)) for event in batch)
    yield json_line(CompletionLine(completion=await generation.completion()))

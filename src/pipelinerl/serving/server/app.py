"""The server's application: access control, our own endpoints, with the messages of `wire`, and routes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.ports import is_this_machine
from pipelinerl.serving.server.api import api_routes
from pipelinerl.serving.server.api.endpoints import respond
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    answer,
    application,
    body_of,
    decoded,
    error_answer,
    json_line,
    unavailable,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.serving.wire import CompletionLine, ProcessGroupRequest, TokenLine, WeightUpdateRequest
from pipelinerl.types import GenerationRequest

_OPEN_PATH = "/health"
"""It needs no key, for health checks."""


class ServerApp:
    """Answers 503 until `open`. Requires the key, sent as OpenAI's clients do or as Anthropic's do.

    A server without a key answers only requests to a name of this machine itself, and none of web pages from other origins.
    Otherwise a web page could reach it, also through a name of its own that resolves to this machine (DNS rebinding).
    """

    def __init__(self, api_key: str | None) -> None:
        self._app: ASGIApp = error_answer(unavailable("the server is starting: the model is being loaded"))
        self._key = None if api_key is None else api_key.encode()

    def open(self, app: ASGIApp) -> None:
        """Have `app` answer from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _OPEN_PATH and (reason := self._refusal_reason(scope)):
            await error_answer(RefusedError("unauthorized", reason))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal_reason(self, scope: Scope) -> str | None:
        headers = dict(scope["headers"])
        if self._key is not None:
            sent = ((b"authorization", b"Bearer " + self._key), (b"x-api-key", self._key))
            right = [hmac.compare_digest(headers.get(name, b""), value) for name, value in sent]
            return None if any(right) else "send this server's key: `Authorization: Bearer KEY`, or `x-api-key: KEY`"
        given = [headers[name].decode("latin-1") for name in (b"host", b"origin") if name in headers]
        if not all(map(is_this_machine, given)):
            return "a server without a key answers only this machine's own names, and no web pages: use --api-key-env"
        return None


def app_of(service: Service) -> Starlette:
    """The endpoints of a service."""
    native = Native(service)
    return application(
        [
            Route("/health", native.health),
            Route("/info", native.info),
            Route("/v1/models", native.models),
            *api_routes("/v1", partial(respond, service)),
            Route("/generate", native.generate, methods=["POST"]),
            Route("/request_weight_update", native.request_weight_update, methods=["POST"]),
            Route("/init_process_group", native.init_process_group, methods=["POST"]),
        ]
    )


class Native:
    """Handlers of our own endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def info(self, _: Request) -> Response:
        return answer(self._service.info())

    async def health(self, _: Request) -> Response:
        """200 while requests are accepted, else 503 with the reason."""
        engine = self._service.engine
        if engine.refusing is not None:
            raise unavailable(engine.refusing)
        return answer({"status": "ready", "version": engine.holding.version})

    async def models(self, _: Request) -> Response:
        service = self._service
        about = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pipelinerl"}
        return answer({"object": "list", "data": [about | {"max_model_len": service.loaded.max_length}]})

    async def generate(self, request: Request) -> Response:
        engine = self._service.engine
        wanted = decoded(await body_of(request), GenerationRequest)
        with ExitStack() as stack:
            served = engine.submit(wanted)
            stack.enter_context(engine.following(served))
            if not wanted.stream:
                return answer(await unless_gone(request, served.completion()))
            await unless_gone(request, served.begun())  # refused requests get an error status, not a stream
            return StreamedResponse(_lines(served), stack.pop_all(), json_line, "application/x-ndjson")

    async def request_weight_update(self, request: Request) -> Response:
        return answer(await self._service.updates.take(decoded(await body_of(request), WeightUpdateRequest)))

    async def init_process_group(self, request: Request) -> Response:
        """Answers once the trainer and all its receivers have formed the group. Gives up if the client leaves before."""
        wanted = decoded(await body_of(request), ProcessGroupRequest)
        await unless_gone(request, self._service.updates.join(wanted))
        return answer({})


async def _lines(served: ServedRequest) -> AsyncGenerator[bytes]:
    async for batch in served.batches():
        yield b"".join(json_line(TokenLine(token=event)) for event in batch)
    yield json_line(CompletionLine(completion=await served.completion()))

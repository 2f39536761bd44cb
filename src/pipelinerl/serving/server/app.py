"""The server's application: our own endpoints, with the messages of `wire`; metrics; access control; routes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl._version import __version__
from pipelinerl.ports import is_this_machine
from pipelinerl.serving.server.api import api_routes
from pipelinerl.serving.server.api.endpoints import Endpoints
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    answer,
    application,
    body_of,
    check_request,
    decoded,
    error_answer,
    json_line,
    unavailable,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import ServiceHolder
from pipelinerl.serving.wire import CancelRequest, CompletionLine, ProcessGroupRequest, TokenLine, WeightUpdateRequest
from pipelinerl.types import GenerationRequest

# ---- our own endpoints


class Native:
    """Handlers of the endpoints. They raise RefusedError (503) until `holder` has a service."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    async def info(self, _: Request) -> Response:
        return answer(self._holder.service.info())

    async def package_version(self, _: Request) -> Response:
        return answer({"version": __version__})

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
            served = service.engine.submit(wanted)
            stack.enter_context(service.engine.following(served))
            if not wanted.stream:
                return answer(await unless_gone(request, served.completion()))
            await unless_gone(request, served.begun())  # refused requests get an error status, not a stream
            return StreamedResponse(_lines(served), stack.pop_all(), json_line, "application/x-ndjson")

    async def cancel(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), CancelRequest)
        self._holder.service.engine.cancel(wanted.request_id)
        return answer({})

    async def request_weight_update(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), WeightUpdateRequest)
        return answer(await self._holder.service.updates.take(wanted))

    async def init_process_group(self, request: Request) -> Response:
        """Answers once the trainer and all its receivers have formed the group. Gives up if the client leaves before."""
        wanted = decoded(await body_of(request), ProcessGroupRequest)
        await unless_gone(request, self._holder.service.updates.join(wanted))
        return answer({})

    async def metrics(self, _: Request) -> Response:
        """The engine's counts, in Prometheus' text format."""
        found: list[tuple[str, str, float]] = []
        try:
            service = self._holder.service
        except RefusedError:
            found.append(("ready", "gauge", 0))
        else:
            progress, info = service.engine.progress, service.info()
            found += [
                ("ready", "gauge", service.engine.refusing is None),
                ("slots", "gauge", info.slots),
                ("requests_in_progress", "gauge", info.in_progress),
                ("requests_waiting", "gauge", info.queued),
                ("weight_version", "gauge", info.version),
                ("tokens_generated_total", "counter", progress.tokens_generated),
                ("engine_steps_total", "counter", progress.decode_steps),
                ("engine_busy_seconds_total", "counter", progress.busy_s),
                ("weight_updates_total", "counter", progress.weight_updates),
                ("weight_update_pause_seconds_total", "counter", service.updates.paused_s),
            ]
        lines = [f"# TYPE pipelinerl_{name} {kind}\npipelinerl_{name} {float(value)}\n" for name, kind, value in found]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")


async def _lines(served: ServedRequest) -> AsyncGenerator[bytes]:
    async for batch in served.batches():
        yield b"".join(json_line(TokenLine(token=event)) for event in batch)
    yield json_line(CompletionLine(completion=await served.completion()))


# ---- routes and access control


_OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that need no key, for health checks."""


def make_app(holder: ServiceHolder, *, api_key: str | None) -> ASGIApp:
    endpoints, native = Endpoints(holder), Native(holder)
    routes = [
        Route("/health", native.health),
        Route("/ping", native.health),
        Route("/version", native.package_version),
        Route("/info", native.info),
        Route("/metrics", native.metrics),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        *api_routes("/v1", endpoints.respond),
        Route("/generate", native.generate, methods=["POST"]),
        Route("/cancel", native.cancel, methods=["POST"]),
        Route("/request_weight_update", native.request_weight_update, methods=["POST"]),
        Route("/init_process_group", native.init_process_group, methods=["POST"]),
    ]
    return Guard(application(routes), api_key)


class Guard:
    """Requires the key, sent as OpenAI's clients do or as Anthropic's do.

    A server without a key answers only requests to a name of this machine itself, and none of web pages from other origins.
    Otherwise a web page could reach it, also through a name of its own that resolves to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and (reason := self._refusal_reason(scope)):
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

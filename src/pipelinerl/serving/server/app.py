"""The server's applications: our own endpoints, with the messages of `wire`; metrics; access control; routes."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl._version import __version__
from pipelinerl.ports import is_this_machine
from pipelinerl.serving.server.dialects.messages import with_its_errors
from pipelinerl.serving.server.exchange import Generation
from pipelinerl.serving.server.http import (
    RefusedError,
    Stream,
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
from pipelinerl.serving.server.openai.endpoints import OpenAI
from pipelinerl.serving.server.service import ServiceHolder
from pipelinerl.serving.wire import CancelRequest, CompletionLine, ProcessGroupRequest, TokenLine, WeightUpdateRequest
from pipelinerl.types import GenerationRequest

# ---- our own endpoints

RETRY_GRACE_S = 5.0
"""How long a generation continues after its connection broke, so that the client can retry."""


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
        """Answers once the trainer and all its receivers have formed the group. Gives up if the client leaves before."""
        wanted = decoded(await body_of(request), ProcessGroupRequest)
        await unless_gone(request, self._holder.service.updates.join(wanted))
        return answer({})


async def _lines(generation: Generation) -> AsyncGenerator[bytes]:
    async for batch in generation.batches():
        yield b"".join(json_line(TokenLine(token=event)) for event in batch)
    yield json_line(CompletionLine(completion=await generation.completion()))


# ---- Prometheus metrics


_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in a private registry: the engine's counts, and requests by path and status."""

    def __init__(self, holder: ServiceHolder) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(holder))
        self._requests = Counter(
            "pipelinerl_http_requests", "Requests answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "pipelinerl_http_request_seconds",
            "From a request's arrival to the last byte of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )

    async def endpoint(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    def record(self, path: str, status: int, seconds: float) -> None:
        """Record one request. `status` 499: the client disconnected before the answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)


class CountedApp:
    """Records every request of `app` in `metrics`. All unknown paths are recorded as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started_s = 499, time.perf_counter()

        async def recording_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, recording_send)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.record(path, status, time.perf_counter() - started_s)


class _EngineCollector(Collector):
    def __init__(self, holder: ServiceHolder) -> None:
        self._holder = holder

    def collect(self) -> Iterable[Metric]:
        try:
            service = self._holder.service
        except RefusedError:
            yield GaugeMetricFamily("pipelinerl_ready", "1 while requests are taken.", 0)
            return
        progress, info = service.engine.progress(), service.info()
        yield GaugeMetricFamily("pipelinerl_ready", "1 while requests are taken.", service.engine.refusing is None)
        yield GaugeMetricFamily("pipelinerl_slots", "Sequences that may be in progress at once.", info.slots)
        yield GaugeMetricFamily("pipelinerl_requests_in_progress", "Requests in a slot.", info.in_progress)
        yield GaugeMetricFamily("pipelinerl_requests_waiting", "Requests without a slot.", info.queued)
        yield GaugeMetricFamily("pipelinerl_weight_version", "Optimizer steps behind the weights.", info.version)
        yield CounterMetricFamily("pipelinerl_tokens_generated", "Tokens sampled.", progress.tokens_generated)
        yield CounterMetricFamily("pipelinerl_engine_steps", "Forwards of the model.", progress.decode_steps)
        yield CounterMetricFamily("pipelinerl_engine_busy_seconds", "Time in steps and updates.", progress.busy_s)
        yield CounterMetricFamily("pipelinerl_weight_updates", "Weight updates taken.", progress.weight_updates)
        yield CounterMetricFamily(
            "pipelinerl_weight_update_pause_seconds", "Time in which updates made sequences wait.", service.updates.paused_s
        )


# ---- routes and access control


_OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that need no key, for health checks."""


def make_apps(holder: ServiceHolder, *, api_key: str | None, apart: bool) -> tuple[ASGIApp, ASGIApp]:
    """The public application and the trainer's. With `apart`, only the second one accepts weight updates."""
    metrics, openai, native = Metrics(holder), OpenAI(holder), Native(holder)
    state = [
        Route("/health", native.health),
        Route("/ping", native.health),
        Route("/version", native.package_version),
        Route("/info", native.info),
        Route("/metrics", metrics.endpoint),
    ]
    updates = [
        Route("/request_weight_update", native.request_weight_update, methods=["POST"]),
        Route("/init_process_group", native.init_process_group, methods=["POST"]),
    ]
    generation = [
        Route("/v1/models", openai.models),
        Route("/v1/models/{name:path}", openai.model),
        Route("/tokenize", openai.tokenize, methods=["POST"]),
        Route("/detokenize", openai.detokenize, methods=["POST"]),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/responses", openai.responses, methods=["POST"]),
        Route("/v1/messages", with_its_errors(openai.messages), methods=["POST"]),
        Route("/generate", native.generate, methods=["POST"]),
        Route("/cancel", native.cancel, methods=["POST"]),
    ]
    public = [*state, *generation] if apart else [*state, *generation, *updates]
    return _app(public, metrics, api_key), _app([*state, *updates], metrics, api_key)


def _app(routes: list[Route], metrics: Metrics, api_key: str | None) -> ASGIApp:
    return CountedApp(Guard(application(routes), api_key), metrics, frozenset(route.path for route in routes))


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

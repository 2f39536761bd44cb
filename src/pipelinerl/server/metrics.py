"""What Prometheus scrapes: the engine's counts as they are now, and how requests were answered."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.server.refusal import RefusedError
from pipelinerl.server.service import Front

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """A registry of its own, of which nothing is global."""

    def __init__(self, front: Front) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(front))
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

    def note(self, path: str, status: int, seconds: float) -> None:
        """`status` 499: whoever asked was gone before there was an answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)


class Counted:
    """Notes every request of `app`; those to unknown paths as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started_s = 499, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.note(path, status, time.perf_counter() - started_s)


class _EngineCollector(Collector):
    def __init__(self, front: Front) -> None:
        self._front = front

    def collect(self) -> Iterable[Metric]:
        try:
            service = self._front.service
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
            "pipelinerl_weight_update_pause_seconds",
            "Time in which updates made sequences wait.",
            service.updates.paused_s,
        )

"""The addresses of a server, and who may use them."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.errors import PipelineRLError
from pipelinerl.server.http import answer_bug, answer_error, error_answer
from pipelinerl.server.metrics import Counted, Metrics
from pipelinerl.server.native import Native
from pipelinerl.server.openai import OpenAI
from pipelinerl.server.refusal import RefusedError
from pipelinerl.server.service import Front

_OPEN_PATHS = frozenset({"/health"})
"""For whoever looks whether the server lives: they need no key."""


def make_apps(front: Front, *, api_key: str | None, apart: bool) -> tuple[ASGIApp, ASGIApp]:
    """The application for everyone, and that for the trainer. With `apart`, weights are updated through the second alone."""
    metrics, openai, native = Metrics(front), OpenAI(front), Native(front)
    state = [
        Route("/health", native.health),
        Route("/info", native.info),
        Route("/metrics", metrics.endpoint),
    ]
    updates = [
        Route("/request_weight_update", native.request_weight_update, methods=["POST"]),
        Route("/init_process_group", native.init_process_group, methods=["POST"]),
    ]
    generation = [
        Route("/v1/models", openai.models),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/generate", native.generate, methods=["POST"]),
        Route("/cancel", native.cancel, methods=["POST"]),
    ]
    public = [*state, *generation] if apart else [*state, *generation, *updates]
    return _app(public, metrics, api_key), _app([*state, *updates], metrics, api_key)


def _app(routes: list[Route], metrics: Metrics, api_key: str | None) -> ASGIApp:
    handlers = {
        PipelineRLError: answer_error,
        ClientDisconnect: _nobody,
        HTTPException: _not_here,
        Exception: answer_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    return Counted(Guard(app, api_key), metrics, frozenset(route.path for route in routes))


class Guard:
    """Lets in who has the key. Without one the server is for this machine's programs alone: not for pages in a browser."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and (reason := self._objection(scope)):
            await error_answer(RefusedError("unauthorized", reason))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        headers = dict(scope["headers"])
        if self._key is not None:
            right = hmac.compare_digest(headers.get(b"authorization", b""), self._key)
            return None if right else "send this server's key: `Authorization: Bearer KEY`"
        origin = headers.get(b"origin")
        if origin is not None and not _is_local(origin.decode("latin-1")):
            return "a server without a key does not answer web pages: start it with --api-key-env"
        return None


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _not_here(request: Request, error: HTTPException) -> Response:
    return error_answer(RefusedError("not_found", f"{request.method} {request.url.path}: {error.detail}"))


def _nobody(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)

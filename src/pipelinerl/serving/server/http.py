"""HTTP helpers of the endpoints: limits, one shape of errors, streams that end when the client leaves, access control."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.channel import is_this_machine
from pipelinerl.errors import (
    INVALID_DATA,
    PipelineRLError,
    PromptTooLongError,
    RequestError,
    StaleEpochError,
    UserError,
    WeightUpdateError,
)
from pipelinerl.serving.wire import STATUS, ErrorBody, ErrorDetail
from pipelinerl.types import GenerationRequest

# ---- limits on requests, beyond what the engine checks
# The engine computes many requests in one batch, so a number that it can't compute with would end all of them.


MAX_BODY_BYTES = 8 << 20
MAX_ID_LENGTH = 256
MAX_STOPS = 64
MAX_STOP_STRING = 256
_TEMPERATURES = (0.01, 100.0)
_MAX_INTEGER = 2**31 - 1


def check_request(request: GenerationRequest) -> None:
    """Raises RequestError that names the parameter and its valid values."""
    sampling, (lowest, highest) = request.sampling, _TEMPERATURES
    if not 0 < len(request.id) <= MAX_ID_LENGTH:
        raise RequestError(f"a request id has 1 to {MAX_ID_LENGTH} characters, not {len(request.id)}")
    if sampling.temperature != 0 and not lowest <= sampling.temperature <= highest:
        raise RequestError(f"temperature {sampling.temperature:g}: give 0 (greedy), or {lowest:g} to {highest:g}")
    if sampling.top_k > _MAX_INTEGER:
        raise RequestError(f"top_k {sampling.top_k}: give 0 (off), or how many of the likeliest tokens to keep")
    stops = sampling.stop_token_ids
    if len(stops) > MAX_STOPS or any(not 0 <= stop <= _MAX_INTEGER for stop in stops):
        raise RequestError(f"stop_token_ids: give at most {MAX_STOPS} token ids")


def check_stops(stops: Sequence[str]) -> None:
    """Raises RequestError for too many stop strings, or for one of the wrong length."""
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_STRING for stop in stops):
        raise RequestError(f"stop: give at most {MAX_STOPS} strings of 1 to {MAX_STOP_STRING} characters")


# ---- errors and answers


class RefusedError(PipelineRLError):
    """One request is refused, with one of the codes in `STATUS`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


T = TypeVar("T")

_RETRY_AFTER_S = {"overloaded": 1, "unavailable": 5}
_CODES: tuple[tuple[type[PipelineRLError], str], ...] = (
    (PromptTooLongError, "prompt_too_long"),
    (RequestError, "bad_request"),
    (StaleEpochError, "stale_epoch"),
    (WeightUpdateError, "bad_weights"),
    (PipelineRLError, "unavailable"),
)

_log = logging.getLogger(__name__)


async def body_of(request: Request) -> bytes:
    """Read the body. Raises RequestError if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def decoded(data: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises RequestError that names the wrong field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except INVALID_DATA as error:
        raise RequestError(f"the body is invalid: {error}") from error


def answer_of(message: object) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")


def error_body(error: PipelineRLError) -> ErrorBody:
    code = error.code if isinstance(error, RefusedError) else next(code for kind, code in _CODES if isinstance(error, kind))
    kind = "invalid_request_error" if STATUS[code] < 429 else "server_error"
    message = str(error).replace("engine.max_length", "the model's max_model_len")  # clients don't see the run file
    return ErrorBody(error=ErrorDetail(message=message, type=kind, code=code))


def error_answer(error: PipelineRLError) -> Response:
    """The answer to a request that failed."""
    body = error_body(error)
    code = body.error.code
    headers = {"Retry-After": str(_RETRY_AFTER_S[code])} if code in _RETRY_AFTER_S else {}
    return Response(msgspec.json.encode(body), STATUS[code], headers, media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ClientDisconnect as soon as the client closes the connection."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        done, _ = await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            raise ClientDisconnect
        return task.result()
    finally:
        task.add_done_callback(retrieve)
        task.cancel()
        gone.cancel()


def retrieve(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task that nobody waits for any more; else asyncio logs it."""
    if not task.cancelled():
        task.exception()


def json_line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def server_sent_event(message: object) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


class StreamedResponse(StreamingResponse):
    """Sends chunks as they arrive. `following` and `chunks` are closed after the last one, or when the client leaves.

    If `chunks` raises an error, the error is sent as the last chunk, encoded by `frame`.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        following: AbstractContextManager[object],
        frame: Callable[[ErrorBody], bytes],
        media_type: str,
    ) -> None:
        async def sent() -> AsyncIterator[bytes]:
            try:
                async for chunk in chunks:
                    yield chunk
            except PipelineRLError as error:
                yield frame(error_body(error))

        super().__init__(sent(), media_type=media_type)
        self._following, self._chunks = following, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._following:
            async with aclosing(self._chunks):
                await super().__call__(scope, receive, send)


def application(routes: Sequence[Route]) -> Starlette:
    """An application that answers every error in the usual shape."""

    def not_found(request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow")
        why = f"takes only {allowed}" if allowed else "this server has no such path; docs/engines.md lists all"
        return error_answer(RefusedError("not_found", f"{request.method} {request.url.path}: {why}"))

    def bug(_: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        detail = ErrorDetail(message=f"internal error: {type(error).__name__}", type="server_error", code="unavailable")
        return Response(msgspec.json.encode(ErrorBody(error=detail)), 500, media_type="application/json")

    handlers: dict[Any, Callable[[Request, Any], Response]] = {
        PipelineRLError: lambda _, error: error_answer(error),
        HTTPException: not_found,
        ClientDisconnect: lambda _, __: Response(status_code=499),
        Exception: bug,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


# ---- access control


_OPEN_PATH = "/health"
"""It needs no key, for health checks."""


class ServerApp:
    """Answers 503 until it has an `app`. Requires the key, sent as OpenAI's clients do or as Anthropic's do.

    A server without a key answers only requests to a name of this machine itself, and none of web pages from other origins.
    Otherwise a web page could reach it, also through a name of its own that resolves to this machine (DNS rebinding).
    """

    def __init__(self, api_key: str | None) -> None:
        self.app: ASGIApp = error_answer(RefusedError("unavailable", "the server is starting: the model is being loaded"))
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _OPEN_PATH and (reason := self._refusal_reason(scope)):
            await error_answer(RefusedError("unauthorized", reason))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

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


# ---- sockets and settings of our HTTP servers


def uvicorn_config(app: ASGIApp, *, close_s: int, tls: tuple[Path, Path] | None = None) -> uvicorn.Config:
    """Settings of our HTTP servers. `close_s`: how long requests in progress may take when the server stops.

    `tls`: PEM files of a certificate and its key.
    """
    certificate, key = tls or (None, None)
    return uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of every invalid request, so strangers could fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        # Longer than clients keep idle connections, so that no connection is closed just when a client uses it.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=close_s,
    )


class QuietServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen at a host's port. Raises UserError.

    Connections send at once (asyncio sets this only on sockets that name their protocol). Otherwise a response's body waits
    until the client has confirmed its head: 40 ms on Linux.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(found[:2], family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"can't listen on {address[0]}:{address[1]}: {reason}; choose another port") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket, *, encrypted: bool = False) -> str:
    """The URL for clients on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any address: the loopback one is among them
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

"""JSON over HTTP to one server, with a distinct error for each kind of failure; and the client of our own server.

Only this module uses the HTTP library.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.extras import require
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.wire import (
    STATUS,
    CompletionLine,
    ErrorBody,
    ProcessGroupRequest,
    ServerInfo,
    TokenLine,
    WeightUpdateRequest,
)
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

CONNECT_S, WRITE_S, UPDATE_S = 5.0, 30.0, 120.0
_KEEP_ALIVE_S = 4.0
"""Shorter than servers keep idle connections (often 5 s), so that no request uses a connection that is being closed."""
_PROBES = [
    (level, getattr(socket, option), value)
    for level, option, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 30),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    )
    if hasattr(socket, option)
]
"""The kernel asks a silent peer whether it is there, so that a request that takes long does not wait for a dead one."""
_LONGEST_MESSAGE = 500


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    code: str | int = ""


class _ErrorAnswer(msgspec.Struct, frozen=True):
    """The error body of OpenAI's API, of our server and of others."""

    error: _ErrorDetail


class RefusalError(ServerError):
    """The server refused the request (4xx, 501). `detail` is its message, `code` its code, if it gave one."""

    def __init__(self, url: str, status: int, detail: str, code: str = "") -> None:
        super().__init__(url, f"refused ({status}): {detail}")
        self.status, self.detail, self.code = status, detail, code


class HttpClient:
    """Connections to one server. `api_key` is sent as a bearer token.

    The constructor raises UserError for an invalid URL, MissingDependencyError without the HTTP library. All calls raise
    ServerUnreachableError, ServerBusyError, RefusalError, and ServerError for a malformed answer.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        require("http", "engines over HTTP")
        import httpx2  # noqa: PLC0415 - an optional dependency

        self.url = url.rstrip("/")
        self._library: Any = httpx2
        try:
            parsed = httpx2.URL(self.url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise ValueError("it needs the form http://HOST:PORT")
        except (httpx2.InvalidURL, ValueError) as error:
            raise UserError(f"{url!r} is not the URL of an engine server: {error}") from error
        transport = httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            # What this machine trusts, or the file that SSL_CERT_FILE names.
            verify=ssl.create_default_context() if parsed.scheme == "https" else False,
            socket_options=_PROBES,
        )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # Without the environment's proxies: engines are reached directly.
        self._client = httpx2.AsyncClient(base_url=parsed, headers=headers, transport=transport, trust_env=False)

    async def ask(
        self, method: str, path: str, answer: type[T], body: object = None, *, timeout_s: float | None = None
    ) -> T:
        """Send `body` as JSON, if there is one, and decode the answer.

        `timeout_s` limits each wait for bytes; None: the caller limits the call.
        """
        async with self._open(method, path, body, timeout_s) as response:
            data = await response.aread()
        try:
            return msgspec.json.decode(data, type=answer)
        except INVALID_DATA as error:
            raise self.malformed(str(error), data) from error

    async def lines(self, path: str, body: object) -> AsyncGenerator[bytes, None]:
        """POST, and yield the lines of the answer as they arrive, without line ends. Empty lines are skipped."""
        async with self._open("POST", path, body, None) as response:
            rest = b""
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(bytes.strip, lines):
                    yield line
            if rest.strip():
                yield rest

    def error_of(self, status: int, body: bytes) -> ServerError:
        """The error for an answer with this status and body, or for an error line in a stream."""
        try:
            error = msgspec.json.decode(body, type=_ErrorAnswer).error
            detail, code = error.message[:_LONGEST_MESSAGE], str(error.code)
        except INVALID_DATA:  # a body of an unknown form is the message
            detail = " ".join(body[:_LONGEST_MESSAGE].decode(errors="replace").split()) or "no explanation"
            code = ""
        if status in (401, 403):
            return RefusalError(self.url, status, f"{detail} (is the API key right?)", code)
        if status == 429 or (status >= 500 and status != 501):
            return ServerBusyError(self.url, f"answered {status}: {detail}")
        return RefusalError(self.url, status, detail, code)

    def malformed(self, what: str, data: bytes) -> ServerError:
        """The error for an answer that violates the protocol."""
        shown = data[:200].decode(errors="replace")
        return ServerError(self.url, f"gave a malformed answer ({what}): {shown!r}; is it an engine server?")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: object, timeout_s: float | None) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield the response, unread, if its status is a success."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = self._library.Timeout(connect=CONNECT_S, write=WRITE_S, pool=None, read=timeout_s)
        try:
            async with self._client.stream(method, path, content=content, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise self.error_of(response.status_code, await response.aread())
                yield response
        except self._library.TimeoutException as error:
            limit = "" if timeout_s is None else f" within {timeout_s:g} s"
            raise ServerUnreachableError(self.url, f"gave no answer in time ({type(error).__name__}{limit})") from error
        except self._library.TransportError as error:
            why = f"can't be reached ({str(error) or type(error).__name__})"
            raise ServerUnreachableError(self.url, why, refused=_is_refusal(error)) from error
        except self._library.DecodingError as error:
            raise ServerError(self.url, f"gave an answer whose encoding is damaged: {error}") from error


def _is_refusal(error: BaseException | None) -> bool:
    """Whether nothing listens at the address. The library wraps the system's error in several layers."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__ or error.__context__,)
    return any(map(_is_refusal, parts))


# ---- our own server (`pipelinerl serve`)


_ABOUT_THE_REQUEST = (400, 409, 413, 422)


class PipelineServer:
    """One `pipelinerl serve`; implements `EngineServer`.

    `run` and `epoch`: see `WeightUpdateRequest`. `timeout_s` limits short calls.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, run: str = "", epoch: int = 0, timeout_s: float = 10.0
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self.url = self._http.url
        self._run, self._epoch = run, epoch
        self._timeout_s = timeout_s
        lines = TokenLine | CompletionLine | ErrorBody
        self._decoder: msgspec.json.Decoder[TokenLine | CompletionLine | ErrorBody] = msgspec.json.Decoder(lines)

    async def info(self) -> ServerInfo:
        return await self._http.ask("GET", "/info", ServerInfo, timeout_s=self._timeout_s)

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            if request.stream:
                return await self._stream(request, on_token)
            return await self._http.ask("POST", "/generate", Completion, request)
        except RefusalError as error:
            if error.code == "prompt_too_long":
                raise PromptTooLongError(error.detail) from error
            if error.status in _ABOUT_THE_REQUEST:
                raise RequestError(str(error)) from error
            raise

    async def _stream(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        async with aclosing(self._http.lines("/generate", request)) as lines:
            async for data in lines:
                try:
                    line = self._decoder.decode(data)
                except INVALID_DATA as error:
                    raise self._http.malformed(str(error), data) from error
                if isinstance(line, ErrorBody):
                    raise self._http.error_of(STATUS.get(line.error.code, 400), data)
                if isinstance(line, CompletionLine):
                    return line.completion
                if on_token is not None:
                    on_token(line.token)
        raise ServerUnreachableError(self.url, "broke off a stream before its completion")

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        await self._for_weights("/init_process_group", group, dict, group.timeout_s + self._timeout_s)

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        return await self._for_weights("/request_weight_update", update, UpdateReceipt, UPDATE_S)

    async def _for_weights(
        self, path: str, request: ProcessGroupRequest | WeightUpdateRequest, answer: type[T], timeout_s: float
    ) -> T:
        request = msgspec.structs.replace(request, run=self._run, epoch=self._epoch)
        try:
            return await self._http.ask("POST", path, answer, request, timeout_s=timeout_s)
        except RefusalError as error:
            raise WeightUpdateError(str(error)) from error

    async def close(self) -> None:
        await self._http.close()

"""JSON over HTTP to one server, with a distinct error for each kind of failure; and the client of our own server.

Only this module uses the HTTP library.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.extras import require
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.wire import (
    CancelRequest,
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

MAX_ANSWER_BYTES = 64 << 20
"""Limit for an answer, and for each line of a streamed one."""
_KEEP_ALIVE_S = 4.0
"""Shorter than servers keep idle connections (often 5 s), so that no request uses a connection that is being closed."""
_LONGEST_MESSAGE = 500


class RefusedError(ServerError):
    """The server refused the request (4xx, 501). `detail` is its message, `code` its `ErrorCode` if it gave one."""

    def __init__(self, url: str, status: int, detail: str, code: str = "") -> None:
        super().__init__(url, f"refused ({status}): {detail}")
        self.status, self.detail, self.code = status, detail, code


class HttpClient:
    """Connections to one server. `api_key` is sent as a bearer token.

    The constructor raises UserError for an invalid URL, MissingDependencyError without the HTTP library. All calls raise
    ServerUnreachableError, ServerBusyError, RefusedError, and ServerError for a malformed answer.
    """

    def __init__(self, url: str, *, api_key: str | None = None, connect_timeout_s: float = 5.0) -> None:
        library = _library()
        self.url = url.rstrip("/")
        self._library = library
        self._timeouts = {"connect": connect_timeout_s, "write": 30.0, "pool": None}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            parsed = library.URL(self.url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise ValueError("it needs the form http://HOST:PORT")
            self._client = library.AsyncClient(
                base_url=parsed,
                headers=headers,
                limits=library.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
                trust_env=False,  # ignore the environment's proxies: engines are reached directly
                # What this machine trusts, or the file that SSL_CERT_FILE names.
                verify=ssl.create_default_context() if parsed.scheme == "https" else False,
            )
        except (library.InvalidURL, ValueError) as error:
            raise UserError(f"{url!r} is not the URL of an engine server: {error}") from error

    async def get(self, path: str, answer: type[T], *, timeout_s: float) -> T:
        """GET, decoded as `answer`."""
        async with self._open("GET", path, None, timeout_s) as response:
            return self._decode(await self._read(response), answer)

    async def post(
        self, path: str, body: object, answer: type[T], *, timeout_s: float | None, params: dict[str, str] | None = None
    ) -> T:
        """POST `body` as JSON (None: no body). `timeout_s` limits each wait for bytes; None: the caller limits the call."""
        async with self._open("POST", path, body, timeout_s, params) as response:
            return self._decode(await self._read(response), answer)

    async def post_lines(self, path: str, body: object, *, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        """POST, and yield the lines of the answer as they arrive, without line ends. Empty lines are skipped."""
        async with self._open("POST", path, body, timeout_s) as response:
            rest = b""
            async for chunk in self._chunks(response):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line
                if len(rest) > MAX_ANSWER_BYTES:
                    raise self._too_long()
            if rest.strip():
                yield rest

    def decode_error(self, status: int, body: bytes) -> ServerError:
        """The error for an answer with this status and body, or for an error line in a stream."""
        detail, code = _message(body)
        if status in (401, 403):
            return RefusedError(self.url, status, f"{detail} (is the API key right?)", code)
        if status == 429 or (status >= 500 and status != 501):
            return ServerBusyError(self.url, f"answered {status}: {detail}")
        return RefusedError(self.url, status, detail, code)

    def malformed(self, what: str, data: bytes) -> ServerError:
        """The error for an answer that violates the protocol."""
        shown = data[:200].decode(errors="replace")
        return ServerError(self.url, f"gave a malformed answer ({what}): {shown!r}; is it an engine server?")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: object, timeout_s: float | None, params: dict[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield the response, unread, if its status is a success."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = self._library.Timeout(**self._timeouts, read=timeout_s)
        try:
            async with self._client.stream(
                method, path, content=content, headers=headers, timeout=timeout, params=params
            ) as response:
                if not response.is_success:
                    await self._raise_status(response)
                yield response
        except self._library.TransportError as error:
            raise ServerUnreachableError(self.url, _why(error, timeout_s), refused=_is_refusal(error)) from error

    async def _raise_status(self, response: httpx2.Response) -> None:
        error = self.decode_error(response.status_code, await self._read(response))
        if isinstance(error, ServerBusyError):
            error.retry_after_s = _seconds(response.headers.get("retry-after"))
        raise error

    async def _read(self, response: httpx2.Response) -> bytes:
        parts = []
        size = 0
        async for chunk in self._chunks(response):
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise self._too_long()
            parts.append(chunk)
        return b"".join(parts)

    async def _chunks(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        try:
            async for chunk in response.aiter_bytes():
                yield chunk
        except self._library.DecodingError as error:
            raise ServerError(self.url, f"gave an answer whose encoding is damaged: {error}") from error

    def _decode(self, data: bytes, answer: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=answer)
        except INVALID_DATA as error:
            raise self.malformed(str(error), data) from error

    def _too_long(self) -> ServerError:
        return ServerError(self.url, f"gave an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")


def _library() -> Any:
    require("http", "engines over HTTP")
    import httpx2  # noqa: PLC0415 - an optional dependency

    return httpx2


def _message(body: bytes) -> tuple[str, str]:
    """Message and code of an error body; a body of an unknown form is the message."""
    try:
        error = msgspec.json.decode(body, type=ErrorBody).error
    except INVALID_DATA:
        return " ".join(body[:_LONGEST_MESSAGE].decode(errors="replace").split()) or "no explanation", ""
    return error.message[:_LONGEST_MESSAGE], error.code


def _seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds. None for its other form, a date, which engine servers do not use."""
    try:
        seconds = float(header) if header is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def _why(error: Exception, timeout_s: float | None) -> str:
    name = type(error).__name__
    if "Timeout" in name:
        return f"gave no answer in time ({name}, {timeout_s:g} s)" if timeout_s is not None else f"timed out ({name})"
    return f"can't be reached ({str(error) or name})"


def _is_refusal(error: BaseException | None) -> bool:
    """Whether nothing listens at the address. The library wraps the system's error in several layers."""
    for _ in range(8):
        if error is None or isinstance(error, ConnectionRefusedError):
            break
        inner = error.__cause__ or error.__context__
        if isinstance(inner, BaseExceptionGroup):
            return any(_is_refusal(part) for part in inner.exceptions)
        error = inner
    return isinstance(error, ConnectionRefusedError)


# ---- our own server (`pipelinerl serve`)


_ABOUT_THE_REQUEST = (400, 409, 413, 422)
_STATUS_IN_A_STREAM = {"overloaded": 429, "unavailable": 503}
"""Statuses for errors that arrive in a stream; any other error is about the request."""


class PipelineServer:
    """One `pipelinerl serve`; implements `EngineServer`.

    `run` and `epoch`: see `WeightUpdateRequest`. `timeout_s` limits short calls, `update_timeout_s` an update, `silence_s`
    the time without a byte on a connection. A request may take longer than `silence_s`: it is then sent again under its id,
    over another connection.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        run: str = "",
        epoch: int = 0,
        timeout_s: float = 10.0,
        update_timeout_s: float = 120.0,
        silence_s: float = 300.0,
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self._run, self._epoch = run, epoch
        self._timeout_s, self._update_timeout_s, self._silence_s = timeout_s, update_timeout_s, silence_s
        self._decoder: msgspec.json.Decoder[TokenLine | CompletionLine] = msgspec.json.Decoder(TokenLine | CompletionLine)

    @property
    def url(self) -> str:
        return self._http.url

    async def info(self) -> ServerInfo:
        return await self._http.get("/info", ServerInfo, timeout_s=self._timeout_s)

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            if request.stream:
                return await self._stream(request, on_token)
            return await self._http.post("/generate", request, Completion, timeout_s=self._silence_s)
        except RefusedError as error:
            if error.code == "prompt_too_long":
                raise PromptTooLongError(error.detail) from error
            if error.status in _ABOUT_THE_REQUEST:
                raise RequestError(str(error)) from error
            raise

    async def _stream(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        lines = self._http.post_lines("/generate", request, timeout_s=self._silence_s)
        try:
            async for data in lines:
                line = self._line(data)
                if isinstance(line, CompletionLine):
                    return line.completion
                if on_token is not None:
                    on_token(line.token)
        finally:
            await lines.aclose()
        raise ServerUnreachableError(self.url, "broke off a stream before its completion")

    def _line(self, data: bytes) -> TokenLine | CompletionLine:
        try:
            return self._decoder.decode(data)
        except INVALID_DATA as error:
            raise self._error_line(data) or self._http.malformed(str(error), data) from error

    def _error_line(self, data: bytes) -> ServerError | None:
        try:
            code = msgspec.json.decode(data, type=ErrorBody).error.code
        except INVALID_DATA:
            return None
        return self._http.decode_error(_STATUS_IN_A_STREAM.get(code, 400), data)

    async def cancel(self, request_id: str) -> None:
        await self._http.post("/cancel", CancelRequest(request_id=request_id), dict, timeout_s=self._timeout_s)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        request = msgspec.structs.replace(group, run=self._run, epoch=self._epoch)
        try:
            await self._http.post("/init_process_group", request, dict, timeout_s=group.timeout_s + self._timeout_s)
        except RefusedError as error:
            raise WeightUpdateError(str(error)) from error

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        request = msgspec.structs.replace(update, run=self._run, epoch=self._epoch)
        try:
            return await self._http.post("/request_weight_update", request, UpdateReceipt, timeout_s=self._update_timeout_s)
        except RefusedError as error:
            raise WeightUpdateError(str(error)) from error

    async def close(self) -> None:
        await self._http.close()

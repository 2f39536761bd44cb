"""The HTTP client against a server that answers whatever a test says, to the byte."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.channel import free_port
from pipelinerl.errors import PipelineRLError, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError
from pipelinerl.serving.client.http import PipelineServer, RefusalError
from pipelinerl.serving.wire import CompletionLine, ErrorBody, ErrorDetail, TokenLine, WeightUpdateRequest
from pipelinerl.types import TokenEvent
from tests.unit.fake_engine_servers import FakeServer, completion_of, request

Handler = Callable[[asyncio.StreamWriter, str, bytes], Awaitable[None]]


@asynccontextmanager
async def server_of(handler: Handler, **options: Any) -> AsyncIterator[PipelineServer]:
    """A server that calls `handler` with (writer, first line and headers, body) for the request of each connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
        await handler(writer, head, body)
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    client = PipelineServer(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/", **options)
    try:
        yield client
    finally:
        await client.close()
        listening.close()


def answering(status: str, body: bytes, *headers: str) -> Handler:
    async def handler(writer: asyncio.StreamWriter, head: str, _: bytes) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return handler


def error_body(code: str, message: str = "because") -> bytes:
    return msgspec.json.encode(ErrorBody(error=ErrorDetail(message=message, type="x", code=code)))


async def outcome(handler: Handler, *, stream: bool = False) -> Any:
    """What `generate` returns or raises, and the tokens that it reported."""
    tokens: list[TokenEvent] = []
    async with server_of(handler) as client, asyncio.timeout(5):
        try:
            return await client.generate(request("r", 3, stream=stream), tokens.append), tokens
        except PipelineRLError as error:
            return error, tokens


COMPLETION = completion_of(request("r", 3))
EVENTS = [
    TokenEvent("r", index, token_id, logprob, 0)
    for index, (token_id, logprob) in enumerate(zip(COMPLETION.token_ids, COMPLETION.logprobs, strict=True))
]


async def test_a_stream_in_any_pieces() -> None:
    lines = [TokenLine(token=event) for event in EVENTS]
    data = b"\n".join([*map(msgspec.json.encode, lines), b"", msgspec.json.encode(CompletionLine(completion=COMPLETION))])
    for size in (1, 7, 10_000):

        async def handler(writer: asyncio.StreamWriter, head: str, _: bytes, size: int = size) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()

        assert await outcome(handler, stream=True) == (COMPLETION, EVENTS)


FIRST = msgspec.json.encode(TokenLine(token=EVENTS[0])) + b"\n"


@pytest.mark.parametrize(
    ("data", "length", "kind"),
    [
        (FIRST, len(FIRST), ServerUnreachableError),  # it may be asked for again
        (FIRST, 9999, ServerUnreachableError),
        (FIRST + error_body("unavailable", "the engine failed") + b"\n", None, ServerBusyError),
        (FIRST + error_body("bad_request", "the engine failed") + b"\n", None, RequestError),
        (FIRST + b"garbage\n", None, ServerError),
    ],
)
async def test_a_stream_that_breaks_off_or_has_an_error(data: bytes, length: int | None, kind: type[Exception]) -> None:
    async def handler(writer: asyncio.StreamWriter, head: str, _: bytes) -> None:
        header = "" if length is None else f"content-length: {length}\r\n"
        writer.write(f"HTTP/1.1 200 OK\r\n{header}connection: close\r\n\r\n".encode() + data)

    error, tokens = await outcome(handler, stream=True)
    assert isinstance(error, kind)
    assert tokens == EVENTS[:1]


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        ("400 Bad Request", error_body("bad_request"), RequestError, "because"),
        ("400 Bad Request", error_body("prompt_too_long", "9 + 9 > 10"), PromptTooLongError, "9 \\+ 9"),
        ("401 Unauthorized", error_body("unauthorized"), ServerError, "API key"),
        ("404 Not Found", b"<html>nothing   here</html>", ServerError, "nothing here"),
        ("501 Not Implemented", error_body("not_supported"), ServerError, "because"),
        ("429 Too Many Requests", error_body("overloaded"), ServerBusyError, "429"),
        ("400 Bad Request", b'{"error": {"message": "of vLLM", "code": 400}}', RequestError, "400\\): of vLLM"),
        ("500 Internal Server Error", b"", ServerBusyError, "no explanation"),
        ("302 Found", b"", ServerError, "302"),
        ("200 OK", b"hello", ServerError, "malformed.*is it an engine server"),
        ("200 OK", b'{"request_id": 7}', ServerError, "malformed"),
    ],
)
async def test_every_failure_is_told_apart(status: str, body: bytes, kind: type[PipelineRLError], words: str) -> None:
    error, _ = await outcome(answering(status, body))
    assert type(error) is kind or (kind is ServerError and isinstance(error, RefusalError))
    with pytest.raises(kind, match=words):
        raise error
    if isinstance(error, ServerError):
        assert error.url in str(error)


@pytest.mark.parametrize(
    ("wait_s", "words", "refused"),
    [(0.0, "can't be reached", False), (1.0, "in time", False), (None, "can't be reached", True)],
)
async def test_nothing_listens_or_nothing_comes(wait_s: float | None, words: str, refused: bool) -> None:
    async def close(writer: asyncio.StreamWriter, head: str, _: bytes) -> None:
        await asyncio.sleep(wait_s or 0.0)
        writer.close()

    async with server_of(close, timeout_s=0.05) as client:
        asked = client if wait_s is not None else PipelineServer(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(ServerUnreachableError, match=words) as caught:
            await asked.info()
        assert caught.value.refused == refused


@pytest.mark.parametrize(("status", "code"), [("409 Conflict", "stale_version"), ("422 Unprocessable", "bad_weights")])
async def test_a_refused_update_says_why(status: str, code: str) -> None:
    async with server_of(answering(status, error_body(code, "checksum differs"))) as client:
        with pytest.raises(WeightUpdateError, match="checksum differs"):
            await client.update_weights(WeightUpdateRequest(version=1, checksum="0" * 32, path="/x"))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://a:b:c"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="not the URL of an engine server"):
        PipelineServer(url)


def test_code_that_blocks_the_event_loop_does_not_make_a_server_late(tmp_path: Path) -> None:
    """Its answer came in time, at whatever point of the call the loop was blocked for longer than the time limit."""
    info = asyncio.run(FakeServer("x").info())
    (tmp_path / "info").write_bytes(msgspec.json.encode(info))

    async def ask(url: str) -> None:
        for passes in (2, 5, 8, 11):
            client = PipelineServer(url, timeout_s=0.2)
            answer = asyncio.create_task(client.info())
            for _ in range(passes):
                await asyncio.sleep(0)
            time.sleep(0.3)
            assert await answer == info
            await client.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asyncio.run(ask(f"http://127.0.0.1:{server.server_address[1]}"))
        server.shutdown()

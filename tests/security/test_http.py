"""Hostile requests to the HTTP server: no crash, no error of the server, nothing written, and the next client is served."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from safetensors.torch import save

from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.agents.gateway import AgentSession, Gateway
from tests.integration.test_serve import serving
from tests.security.mutations import body, false_safetensors
from tests.unit.chat_parts import SamplingClient, make_tokenizer
from tests.unit.server_parts import byte_model, running

PLAIN = {"model": "bytes", "prompt": "hello", "max_tokens": 3, "seed": 1, "temperature": 1.0}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 1, "stop": ["x"]}
NATIVE = {"id": "a", "prompt_ids": [5, 6, 7], "sampling": {"max_tokens": 3, "seed": 1}}
UPDATE = {"version": 1, "checksum": "0" * 16, "path": "weights.safetensors"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EXACT = {"n": 1, "presence_penalty": 0, "return_token_ids": True, "return_weight_versions": True}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}], "tool_choice": "auto"}
ITEMS: list[Any] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "5"},
]
RESPONSE = {"model": "bytes", "input": ITEMS, "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 3}
BLOCKS: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5", "is_error": True}]},
]
MESSAGE = {"model": "bytes", "messages": BLOCKS, "tools": [{"name": "f", "input_schema": PARAMETERS}], "max_tokens": 3}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PLAIN),
    ("/v1/completions", PLAIN | EXACT | {"prompt": [5, 6, 7], "logprobs": 0, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "chat_template_kwargs": {"a": 1}} | EXACT),
    ("/v1/chat/completions", CHAT | TOOLS),
    ("/v1/responses", RESPONSE),
    ("/v1/messages", MESSAGE),
    ("/generate", NATIVE),
    ("/request_weight_update", UPDATE),
]
AGENT_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", CHAT),
    ("/completions", PLAIN),
    ("/responses", RESPONSE),
    ("/messages", MESSAGE),
]
TOKENIZER = make_tokenizer()
ALLOWED = {501}
"""What is not built is refused with this status."""


def files_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize(("seed", "count"), [(0, 400), pytest.param(1, 6000, marks=pytest.mark.exhaustive)])
async def test_mutated_requests(seed: int, count: int, tmp_path: Path) -> None:
    rng = Random(seed)
    allowed_folder = tmp_path / "weights"
    allowed_folder.mkdir()

    async with running(allowed_folder) as (service, client):
        before, holding = (await client.post("/v1/completions", json=PLAIN)).json()["choices"], service.engine.holding
        statuses: dict[int, int] = {}
        for _ in range(count):
            path, valid = rng.choice(REQUESTS)
            response = await client.post(path, content=body(valid, rng))
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500 or response.status_code in ALLOWED, (path, response.text)
            if response.status_code >= 400:
                assert json.loads(response.content)["error"]["message"]
        assert statuses.keys() >= {200, 400}
        assert (await client.post("/v1/completions", json=PLAIN)).json()["choices"] == before
        assert service.engine.holding == holding
    assert files_below(tmp_path) == {str(allowed_folder)}


@pytest.mark.parametrize(("seed", "count"), [(0, 60), pytest.param(1, 1500, marks=pytest.mark.exhaustive)])
async def test_weight_files_with_false_headers_and_paths_outside_the_folder(seed: int, count: int, tmp_path: Path) -> None:
    rng = Random(seed)
    folder = tmp_path / "weights"
    folder.mkdir()
    weights = {name: value.clone() for name, value in named_weights(byte_model(1)).items()}
    right, whole = checksum(weights), save(weights)
    outside, link, directory = tmp_path / "outside.safetensors", folder / "link.safetensors", folder / "directory"
    outside.write_bytes(whole)
    link.symlink_to(outside)
    directory.mkdir()
    os.mkfifo(folder / "pipe")

    async with running(folder) as (service, client):

        async def status(version: int, name: object) -> int:
            update = {"version": version, "checksum": right, "path": str(name)}
            return (await client.post("/request_weight_update", json=update)).status_code

        version = 1
        for name in (outside, "../outside.safetensors", link, directory, folder / "pipe", "/dev/zero", "\x00", "~", ""):
            assert 400 <= await status(1, name) < 500, name
        for number in range(count):
            path = folder / f"{number}.safetensors"
            path.write_bytes(false_safetensors(whole, rng))
            answered = await status(version, path)
            version += answered == 200  # a mutation of nothing that counts: the checksum says that all are right
            assert answered < 500
            path.unlink()
            assert service.engine.refusing is None
        (folder / "right.safetensors").write_bytes(whole)
        assert await status(version, folder / "right.safetensors") == 200


def raw_request(rng: Random) -> bytes:
    """What a client may send that is no valid HTTP request, or more than a server should take."""
    path, valid = rng.choice(REQUESTS)
    content = body(valid, rng)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    target = rng.choice(("/../etc/passwd", "//x", "/%00", "/%2e%2e/", "*", "http://x/", "/" + "a" * 100_000))
    kinds = (
        rng.randbytes(rng.randint(1, 500)),
        f"GET {target} HTTP/{rng.choice(('1.1', '9.9', 'x'))}\r\n\r\n".encode(),
        b"GET /info HTTP/1.1\r\n" + b"X: y" * 50_000 + b"\r\n\r\n",
        b"GET /info HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(3000)) + b"\r\n",
        f"{head}Content-Length: {rng.choice((-1, 2**63, 10**30, 'x'))}\r\n\r\n".encode() + content,
        f"{head}Content-Length: {len(content)}\r\nContent-Length: 1\r\n\r\n".encode() + content,
        f"{head}Content-Length: {len(content) + 50}\r\n\r\n".encode() + content,
        f"{head}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n".encode() + content,
        f"{head}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nzz\r\n".encode() + content,
        rng.choice((b"GET", b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 1000)),
        b"GET /info HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n" * 20,
    )
    return rng.choice(kinds)


def sent(address: tuple[str, int], data: bytes) -> bytes:
    """Send `data`, close this side, and return the first bytes that come back."""
    with socket.create_connection(address, timeout=30) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)
        except OSError:  # it closed the connection
            return b""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 100), pytest.param(1, 3000, marks=pytest.mark.exhaustive)])
def test_connections_that_speak_no_http_or_are_slow(seed: int, count: int, tmp_path: Path) -> None:
    """Meanwhile 50 clients send a byte of a request and then nothing."""
    rng = Random(seed)
    with serving(tmp_path, "--engine.slots", "4", "--max-queue", "8") as server, ExitStack() as stack:
        url = urlsplit(server.url)
        address = (url.hostname or "", url.port or 0)
        for _ in range(50):
            slow = stack.enter_context(socket.create_connection(address, timeout=30))
            slow.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"[: rng.randint(1, 50)])
        for _ in range(count):
            answer = sent(address, data := raw_request(rng))
            assert not answer.startswith(b"HTTP/1.1 5") or int(answer[9:12]) in ALLOWED, (data[:300], answer[:300])
        assert server.info().version == 0
        assert server.process.poll() is None
    assert files_below(tmp_path) <= {str(tmp_path / "weights"), str(tmp_path / "ready.json")}


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 500, marks=pytest.mark.exhaustive)])
async def test_the_agents_gateway(seed: int, count: int) -> None:
    """An agent's own address, and addresses that nobody was given."""
    rng = Random(seed)

    async with httpx2.AsyncClient(timeout=30) as client:
        session = AgentSession(SamplingClient.saying(TOKENIZER, *["fine"] * count * 2))
        with closing(Gateway()) as gateway, gateway.serving(session) as url:
            for _ in range(count):
                base = rng.choice((url, url, url.replace("rollouts/", "rollouts/x"), f"{url}/../../.."))
                path, valid = rng.choice(AGENT_REQUESTS)
                response = await client.post(base + path, content=body(valid, rng))
                assert response.status_code < 500 or response.status_code in ALLOWED, response.text
                assert base == url or response.status_code == 404
            assert (await client.get(f"{url}/models")).status_code == 200

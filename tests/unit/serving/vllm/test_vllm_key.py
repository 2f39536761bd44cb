"""vLLM's routes on other machines than this one's clients: each asks for the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipelinerl.serving.vllm.key import KEY_VARIABLE, RequireKey
from pipelinerl.serving.vllm.start import command_line, environment
from tests.unit.serving.vllm.test_vllm_start import SETTINGS


def answer(kind: str, *headers: tuple[bytes, bytes]) -> list[Any]:
    """What a client of a guarded app gets."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> None: ...

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": kind, "headers": headers, "path": "/update_weights"}, receive, send))
    return sent


def test_every_route_asks_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert answer("http", (b"authorization", b"Bearer secret"))[0]["status"] == 200
    assert answer("lifespan")[0]["status"] == 200
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]):
        assert answer("http", *headers)[0]["status"] == 401
    assert answer("websocket")[0]["status"] == 401


def test_a_guarded_server_has_its_key_in_the_environment_not_on_the_command_line() -> None:
    command = command_line(SETTINGS, 8000, "10.0.0.5", guarded=True)
    assert command[command.index("--host") + 1] == "10.0.0.5"
    assert command[command.index("--middleware") + 1] == "pipelinerl.serving.vllm.key.RequireKey"
    assert environment(SETTINGS, {}, "secret")[KEY_VARIABLE] == "secret"
    assert KEY_VARIABLE not in environment(SETTINGS, {})
    assert "--middleware" not in command_line(SETTINGS, 8000)

"""The contract of an engine server, as tests that run against any address.

    PIPELINERL_ENGINE_URL=http://127.0.0.1:8000 python -m pytest tests/contract

`PIPELINERL_ENGINE_KIND`: its protocol, `http` (ours, the default) or `vllm`. `PIPELINERL_ENGINE_KEY`: its API key.
`PIPELINERL_ENGINE_MODEL`: the served model; with it, log-probs and weight updates are tested too, for which the server must
be idle. `PIPELINERL_ENGINE_WEIGHTS`: the folder for weight files (default: /dev/shm).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pipelinerl.serving.client.adapter import EngineServer, TokenListener, find_fault
from pipelinerl.serving.client.http import PipelineServer
from pipelinerl.serving.vllm.adapter import VllmServer
from pipelinerl.serving.wire import ServerInfo
from pipelinerl.types import Completion, GenerationRequest, SamplingParams

TEST_S = 120.0
"""Time limit of each test."""


@dataclass
class Subject:
    """The server under test. `prompt` returns random token ids, the same for the same number."""

    server: EngineServer
    info: ServerInfo
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    sent: int = 0

    def prompt(self, number: int, length: int = 5) -> tuple[int, ...]:
        draw = random.Random(number)
        allowed = [token for token in range(min(self.info.vocabulary, 1000)) if token not in self.info.stop_token_ids]
        return tuple(draw.choices(allowed, k=length))

    def request(
        self, prompt_ids: Sequence[int], *, max_tokens: int = 16, stream: bool = False, **sampling: Any
    ) -> GenerationRequest:
        """A request with an unused id."""
        self.sent += 1
        return GenerationRequest(
            id=f"check-{self.run}-{self.sent}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            stream=stream,
        )

    async def complete(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """Send the request and return its completion, which must be valid."""
        completion = await self.server.generate(request, on_token)
        fault = find_fault(completion, request, self.info.vocabulary)
        assert fault is None, f"the completion of {len(request.prompt_ids)} + {request.sampling} is wrong: {fault}"
        return completion

    async def idle(self, within_s: float) -> None:
        """Wait until the server has no requests."""
        async with asyncio.timeout(within_s):
            while (info := await self.server.info()).in_progress + info.queued:
                await asyncio.sleep(0.05)


async def first_event(begun: asyncio.Event, tasks: Sequence[asyncio.Task[Completion]], timeout_s: float = 1.0) -> None:
    """Wait until a first token has set `begun` or one of `tasks` has ended; not for long, as servers may not stream."""
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    waiting.cancel()


def setting(name: str) -> str | None:
    return os.environ.get(f"PIPELINERL_ENGINE_{name}")


def only_ours() -> None:
    """Skip what vLLM is known to lack."""
    if setting("KIND") == "vllm":
        pytest.skip("vLLM has none")


@pytest.fixture
def subject() -> Subject:
    url = setting("URL")
    if url is None:
        pytest.skip("tests the server at PIPELINERL_ENGINE_URL")

    def client() -> EngineServer:
        return (VllmServer if setting("KIND") == "vllm" else PipelineServer)(url, api_key=setting("KEY"))

    async def info() -> ServerInfo:
        server = client()
        try:
            return await server.info()
        finally:
            await server.close()

    return Subject(client(), asyncio.run(info()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test in an event loop of its own, and then close the connections to the server."""
    subject = cast("Subject", pyfuncitem.funcargs["subject"])

    async def run() -> None:
        try:
            async with asyncio.timeout(TEST_S):
                await pyfuncitem.obj(subject)
        finally:
            await subject.server.close()

    asyncio.run(run())
    return True

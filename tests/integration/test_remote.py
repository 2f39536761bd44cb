"""Two real servers behind one engine: updates in flight, a server that is killed, one that comes back, the contract."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.schema import ModelConfig
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import checksum, named_weights, write_safetensors
from pipelinerl.serving.client.adapter import Bounds, EngineUnavailableError
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.http import PipelineServer
from pipelinerl.types import Completion, GenerationRequest, SamplingParams
from tests.integration.runs import start, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SLOTS = 8
BOUNDS = Bounds(startup_s=90.0, health_every_s=0.2, refused_s=1.0, silent_s=20.0)
PATIENCE_S = 60.0
TOLERANCE = 1e-4


class Server:
    """A server process; `wait` for it to be ready."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self._ready_file = folder / "ready.json"
        self._ready_file.unlink(missing_ok=True)
        flags = f"--port {port} --engine.threads 1 --engine.slots {SLOTS}".split()
        files = ("--weights-dir", str(folder.parent), "--ready-file", str(self._ready_file))
        self.process: subprocess.Popen[str] = start("serve", "demo", *flags, *files)
        self.url = ""

    def wait(self) -> None:
        until(self._ready_file.exists, self.process)
        self.url = json.loads(self._ready_file.read_bytes())["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@asynccontextmanager
async def engine_over(servers: Sequence[Server]) -> AsyncIterator[RemoteEngine]:
    clients = [PipelineServer(server.url) for server in servers]
    async with RemoteEngine.connect(clients, bounds=BOUNDS) as engine:
        yield engine


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    """Two of them, or as many as the test's parameter says."""
    running = [Server(tmp_path / name) for name in "ab"[: getattr(request, "param", 2)]]
    try:
        for server in running:
            server.wait()
        yield running
    finally:
        for server in running:
            server.kill()


def requests(count: int, max_tokens: int) -> list[GenerationRequest]:
    """Groups of four, of many lengths."""
    return [
        GenerationRequest(
            id=f"r{number}",
            prompt_ids=(1 + number // 4 % 9, 3, 5),
            sampling=SamplingParams(max_tokens=max_tokens - number % 13 * max_tokens // 20, seed=number),
        )
        for number in range(count)
    ]


async def serve(
    engine: RemoteEngine,
    wanted: Sequence[GenerationRequest],
    between: Callable[[int], None] = lambda _: None,
) -> dict[str, Completion]:
    """The answers; `between` sees how many there are."""
    asked = {request.id: asyncio.create_task(engine.generate(request)) for request in wanted}
    async with asyncio.timeout(PATIENCE_S):
        while (done := sum(task.done() for task in asked.values())) < len(asked):
            await asyncio.sleep(0)
            await engine.advance()
            between(done)
    assert engine.in_progress == engine.queued == 0
    return {request_id: task.result() for request_id, task in asked.items()}


def demo() -> Any:
    return load_model(ModelConfig(path="demo"))


def changed(seed: int) -> Any:
    """The model with every weight changed, so that it says something else."""
    model = demo()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def update_of(model: Any, version: int, directory: Path) -> WeightUpdate:
    """In a file, as servers get it."""
    tensors, path = named_weights(model), directory / f"{version}.safetensors"
    write_safetensors(tensors, path)
    return WeightUpdate(version, checksum(tensors), {}, path=str(path))


def test_a_killed_server_loses_nothing_and_has_the_weights_before_it_has_requests_again(
    servers: list[Server], tmp_path: Path
) -> None:
    wanted = requests(6 * SLOTS, 100)
    killed = []

    def kill(done: int) -> None:
        if done >= SLOTS and not killed:
            killed.append(done)
            servers[0].kill()

    async def main() -> None:
        async with engine_over(servers) as engine:
            undisturbed = await serve(engine, wanted)
            done = await serve(engine, wanted, kill)
            assert engine.slots == SLOTS
            # The same seeds and weights: the same tokens, whichever server made them.
            assert all(done[key].token_ids == completion.token_ids for key, completion in undisturbed.items())

            await engine.update_weights(update_of(changed(1), 7, tmp_path))
            done = await serve(engine, requests(4 * SLOTS, 20))
            assert {span.version for completion in done.values() for span in completion.weight_versions} == {7}
            servers[0] = Server(tmp_path / "a", servers[0].port)
            servers[0].wait()  # this blocks the event loop for seconds
            async with asyncio.timeout(PATIENCE_S):
                while engine.slots < 2 * SLOTS:
                    await asyncio.sleep(0.01)
            pinned = GenerationRequest(id="p", prompt_ids=(4,), sampling=SamplingParams(max_tokens=5), copy=0)
            (completion,) = (await serve(engine, [pinned])).values()
            assert {span.version for span in completion.weight_versions} == {7}

            for server in servers:
                server.kill()
            with pytest.raises(EngineUnavailableError, match=f"{servers[0].url}.*{servers[1].url}"):
                await serve(engine, requests(1, 5))

    asyncio.run(main())


@pytest.mark.parametrize("servers", [1], indirect=True)
def test_our_own_server_keeps_the_contract(servers: list[Server], tmp_path: Path) -> None:
    done = contract_of(servers[0].url, MODEL="demo", WEIGHTS=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


def contract_of(url: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The tests of the contract against this server."""
    variables = {f"PIPELINERL_ENGINE_{name}": value for name, value in {"URL": url, **settings}.items()}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/contract"]
    return subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False)

"""Two real servers behind one engine: updates in flight, a server that is killed, one that comes back, the contract."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.vllm_switch import perturbed, save

from pipelinerl.config.schema import ModelConfig
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.loading import load_model
from pipelinerl.serving.client.adapter import Bounds, EngineUnavailableError
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.http import PipelineServer
from pipelinerl.types import GenerationRequest, SamplingParams
from tests.integration.test_serve import Server, serving
from tests.unit.serving.client.test_remote_engine import serve

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SLOTS = 8
BOUNDS = Bounds(startup_s=90.0, health_every_s=0.2, refused_s=1.0, silent_s=20.0)
PATIENCE_S = 180.0


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


def test_a_killed_server_loses_nothing_and_has_the_weights_before_it_has_requests_again(tmp_path: Path) -> None:
    stack = ExitStack()
    flags = ("--engine.slots", str(SLOTS), "--weights-dir", str(tmp_path))

    def start(name: str, *more: str) -> Server:
        return stack.enter_context(serving(tmp_path / name, *flags, *more))

    async def main() -> None:
        killed, other = start("a"), start("b")
        clients = [PipelineServer(server.url) for server in (killed, other)]
        wanted = requests(6 * SLOTS, 100)
        async with RemoteEngine.connect(clients, bounds=BOUNDS) as engine, asyncio.timeout(PATIENCE_S):
            undisturbed = await serve(engine, wanted)
            half = engine.progress().tokens_generated * 1.5

            def kill() -> None:
                if engine.progress().tokens_generated > half:
                    killed.process.kill()

            done = await serve(engine, wanted, kill)
            assert engine.slots == SLOTS
            # The same seeds and weights: the same tokens, whichever server made them.
            assert all(done[key].token_ids == completion.token_ids for key, completion in undisturbed.items())

            other_weights = save(perturbed(load_model(ModelConfig()), 1), 7, tmp_path)
            await engine.update_weights(WeightUpdate(7, other_weights.checksum, {}, path=other_weights.path or ""))
            done = await serve(engine, requests(4 * SLOTS, 20))
            assert {span.version for completion in done.values() for span in completion.weight_versions} == {7}
            start("a", "--port", killed.url.rpartition(":")[2])  # this blocks the event loop for seconds
            while engine.slots < 2 * SLOTS:
                await asyncio.sleep(0.01)
            pinned = GenerationRequest(id="p", prompt_ids=(4,), sampling=SamplingParams(max_tokens=5), copy=0)
            (completion,) = (await serve(engine, [pinned])).values()
            assert {span.version for span in completion.weight_versions} == {7}

            stack.close()
            with pytest.raises(EngineUnavailableError, match=f"{killed.url}.*{other.url}"):
                await serve(engine, requests(1, 5))

    with stack:
        asyncio.run(main())


def test_our_own_server_keeps_the_contract(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine.slots", str(SLOTS)) as server:
        done = contract_of(server.url, MODEL="demo", WEIGHTS=str(server.weights_dir))
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


def contract_of(url: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The tests of the contract against this server."""
    variables = {f"PIPELINERL_ENGINE_{name}": value for name, value in {"URL": url, **settings}.items()}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/contract"]
    return subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False)

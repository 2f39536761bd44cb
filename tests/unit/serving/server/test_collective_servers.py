"""A broadcast to engine servers: they receive, and a coordinator without weights says when they take it, and answers."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.models.state import named_weights
from pipelinerl.serving.client.adapter import Bounds, TokenListener
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.server.service import Service
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, UpdateReceipt, versions_from_spans
from pipelinerl.weights.broadcast.group import Gpu, choose_backend, gpu_of, staging_device
from tests.unit.server_parts import byte_model, running
from tests.unit.weights.test_collective import BOUND_S, KEY, Rig, eventually, taken
from tests.unit.weights.test_collective import rig as rig  # noqa: PLC0414 - a fixture
from tests.unit.weights.test_weights import Tied

# -------------------------------------------------------------------------------------------------- which backend


A, B, C = (Gpu(f"GPU-{name}", "2.29.7") for name in "abc")
NEWER_C = Gpu("GPU-c", "2.30.7")


@pytest.mark.parametrize(
    ("sender", "receivers", "why_gloo"),
    [
        (A, [B], ""),
        (A, [B, C], ""),
        (A, [A], "share a GPU"),
        (A, [B, B], "share a GPU"),
        (A, [B, None], "has no GPU"),
        (None, [B], "has no GPU"),
        (None, [None], "has no GPU"),
        (A, [NEWER_C], r"NCCL differ \(2.29.7, 2.30.7\)"),
        (A, [B, NEWER_C], r"NCCL differ \(2.29.7, 2.30.7\)"),
        (NEWER_C, [A, B], r"NCCL differ \(2.29.7, 2.30.7\)"),
    ],
)
def test_nccl_is_for_a_gpu_of_its_own_and_the_same_version_at_every_end(
    sender: Gpu | None, receivers: list[Gpu | None], why_gloo: str
) -> None:
    backend, why = choose_backend(sender, receivers)
    assert backend == ("gloo" if why_gloo else "nccl")
    assert re.search(why_gloo, why) if why_gloo else not why


def test_what_nccl_sends_stays_on_the_gpu_and_what_gloo_sends_does_not_go_there() -> None:
    gpu = torch.device("cuda:1")
    assert staging_device("nccl", gpu) == gpu
    assert staging_device("gloo", gpu) == torch.device("cpu")
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.parametrize(("last", "why"), [(None, "no GPU"), (NEWER_C, "NCCL differ")])
def test_receivers_say_which_gpu_they_have(
    rig: Rig, last: Gpu | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that has none, or another NCCL, is enough for gloo, which the sender says."""
    gpus = {"sender": [A], "receiver": [B, last]}
    for side, found in gpus.items():
        monkeypatch.setattr(f"pipelinerl.weights.broadcast.{side}.gpu_of", lambda _, found=found: found.pop(0))
    sender = rig.sender(2, timeout_s=BOUND_S)
    first = rig.receiver(sender, 0)
    eventually(lambda: len(gpus["receiver"]) == 1)
    sending = threading.Thread(target=sender.send, args=(0, named_weights(Tied())))
    sending.start()  # waits: where its copy has to be is not known yet
    receivers = [first, rig.receiver(sender, 1)]
    assert [taken(receiver).version for receiver in receivers] == [0, 0]
    sending.join()
    assert sender._backend == "gloo"
    assert why in caplog.text


# ------------------------------------------------------------------------------------------------- engine servers


class HostedServer:
    """A real service in this process, asked without HTTP: the service's own event loop does it."""

    def __init__(self, url: str, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.service, self._loop = service, loop

    async def _there(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def info(self) -> ServerInfo:
        return self.service.info()

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        async def work() -> Completion:
            served = self.service.engine.submit(request)
            with self.service.engine.following(served):
                return await served.completion()

        return await self._there(work())

    async def cancel(self, request_id: str) -> None: ...

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        await self._there(self.service.updates.join(group))

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        return await self._there(self.service.updates.take(update))

    async def close(self) -> None: ...


@asynccontextmanager
async def hosted(directory: Path) -> AsyncIterator[list[HostedServer]]:
    loop = asyncio.get_running_loop()
    async with running(directory) as (left, _), running(directory) as (right, _):
        yield [HostedServer("http://left", left, loop), HostedServer("http://right", right, loop)]
        for service in (left, right):
            await service.updates.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[HostedServer]]:
    """Two services, in an event loop of a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    around = hosted(tmp_path)
    yield asyncio.run_coroutine_threadsafe(around.__aenter__(), loop).result(30)
    asyncio.run_coroutine_threadsafe(around.__aexit__(None, None, None), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_servers_receive_for_themselves_and_the_engine_only_says_when(rig: Rig, servers: list[HostedServer]) -> None:
    weights = {version: named_weights(byte_model(version)) for version in range(3)}
    sender = rig.sender(2, engines=1, timeout_s=BOUND_S)
    coordinator = rig.coordinator(sender)
    sampling = SamplingParams(max_tokens=80, seed=1)
    wanted = [GenerationRequest(id=f"r{i}", prompt_ids=(5, 6, i), sampling=sampling) for i in range(8)]

    async def update_in_flight() -> list[Completion]:
        async with RemoteEngine.connect(servers, bounds=Bounds(join_s=BOUND_S)) as engine:
            await engine.join_broadcast("127.0.0.1", sender.port, KEY)
            asked: list[asyncio.Task[Completion]] = []
            for version in (0, 1, 2):  # the first is what the servers have loaded
                digest = sender.send(version, weights[version])
                eventually(lambda: coordinator.offered() is not None)
                if version == 1:
                    asked += [asyncio.create_task(engine.generate(request)) for request in wanted]
                update = coordinator.poll()
                assert update is not None
                coordinator.acknowledge(await engine.update_weights(update))
                assert [server.service.engine.holding for server in servers] == [(version, digest)] * 2
                eventually(lambda: not sender.unanswered())
                assert {one.checksum for one in sender.receipts()} == {digest}
            assert engine.version == 2
            async with asyncio.timeout(BOUND_S):
                return await asyncio.gather(*asked)

    for completion in asyncio.run(update_in_flight()):
        versions = versions_from_spans(completion.weight_versions, 80)
        assert versions == sorted(versions)

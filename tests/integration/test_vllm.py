"""The real vLLM, on CPU, as an engine: what it says of each token holds while all of its weights are replaced in flight.

It needs vLLM in an environment of its own: `scripts/install_vllm_cpu.sh DIR`, then PIPELINERL_VLLM_PYTHON=DIR/bin/python.
"""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.vllm_switch import VllmProcess, float32_settings, mixed_logprobs, perturbed, running_vllm, save

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.folder import resolve_path
from pipelinerl.models.loading import load_model, load_tokenizer
from pipelinerl.models.state import checksum, named_weights, write_safetensors
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.scoring import ServerScorer
from pipelinerl.serving.vllm.adapter import VllmServer
from pipelinerl.serving.vllm.start import VllmSettings, members
from pipelinerl.serving.wire import WeightUpdateRequest
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.types import Completion, Segment, versions_from_spans
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from pipelinerl.weights.receiving import Receiver
from tests.chaos.invariants import check
from tests.integration.runs import alive, assert_gone_on, process_ids, wait
from tests.integration.test_remote import contract_of
from tests.integration.test_restart import GOAL, going, kill
from tests.unit.fake_engine_servers import request
from tests.unit.serving.vllm.test_vllm_start import until
from tests.unit.weights.relay import Relay

PYTHON = os.environ.get("PIPELINERL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON, reason="needs vLLM: scripts/install_vllm_cpu.sh DIR, then PIPELINERL_VLLM_PYTHON=DIR/bin/python"
    ),
]
SLOTS = 16
LENGTH = 448
LONGEST = LENGTH - 8
TOLERANCE = 5e-4


def settings(**changes: Any) -> VllmSettings:
    return replace(float32_settings(PYTHON, resolve_path("demo"), slots=SLOTS, max_length=LENGTH), **changes)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """One server for all tests here: starting it takes longest. Its weights' version rises from test to test."""
    with running_vllm(settings(), tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server


def at(server: VllmProcess, work: Any) -> Any:
    """What `work`, given a client of the server, returns."""

    async def run() -> Any:
        client = VllmServer(server.url)
        try:
            return await asyncio.wait_for(work(client), 120.0)
        finally:
            await client.close()

    return asyncio.run(run())


def version_at(server: VllmProcess) -> int:
    return at(server, lambda client: client.info()).version


def logprob_error(model: Any, done: Completion) -> float:
    """Against a plain forward over the whole sequence."""
    expected = mixed_logprobs({0: model}, request("any"), done, [0] * len(done.token_ids))
    return max(abs(ours - theirs) for ours, theirs in zip(done.logprobs, expected, strict=True))


def test_it_keeps_the_contract(vllm: VllmProcess, tmp_path: Path) -> None:
    """Exact tokens, stop tokens, cancellation, clients that leave, refused requests and updates, and updates in flight."""
    done = contract_of(vllm.url, KIND="vllm", MODEL="demo", WEIGHTS=str(tmp_path))
    assert done.returncode == 0, done.stdout


def test_a_tied_head_follows_the_embedding(vllm: VllmProcess, tmp_path: Path) -> None:
    """Also when an update has but one name for both, as checkpoints have."""
    newest = perturbed(load_model(ModelConfig()), 3)
    tensors = {name: tensor for name, tensor in named_weights(newest).items() if name != "lm_head.weight"}
    version = version_at(vllm) + 1
    path = tmp_path / "tied.safetensors"
    update = WeightUpdateRequest(version=version, checksum=checksum(tensors), path=str(path))
    write_safetensors(tensors, path)

    async def after(client: VllmServer) -> Completion:
        assert (await client.update_weights(update)).checksum == update.checksum
        return await client.generate(request("tied", 24))

    assert logprob_error(newest, at(vllm, after)) < TOLERANCE


def test_it_is_a_teacher(vllm: VllmProcess, tmp_path: Path) -> None:
    newest, path = perturbed(load_model(ModelConfig()), 5), tmp_path / "teacher.safetensors"
    tensors = named_weights(newest)
    write_safetensors(tensors, path)
    update = WeightUpdateRequest(version=version_at(vllm) + 1, checksum=checksum(tensors), path=str(path))
    at(vllm, lambda client: client.update_weights(update))
    tokenizer, teacher = load_tokenizer(ModelConfig()), ServerScorer(vllm.url)
    prompt = tokenizer.encode("84,36:")
    teacher.check(tokenizer, prompt, longest=60)
    answers = ["48,36;12,36;12,24;12,12>12", ">12", "48"]
    segments = [
        Segment(token_ids=(*prompt, *ids), sampled=((len(prompt), len(prompt) + len(ids)),))
        for ids in (tokenizer.encode(answer) for answer in answers)
    ]
    expected = FrozenModelScorer(newest, temperature=1.0, micro_batch_tokens=256).score(segments)
    for ours, theirs in zip(expected, teacher.score(segments), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_it_takes_what_the_trainer_broadcasts_into_its_worker(vllm: VllmProcess) -> None:
    """Two updates over torch.distributed while requests are in progress."""
    first = version_at(vllm) + 1
    models = {first + index: perturbed(load_model(ModelConfig()), 5 + index) for index in range(2)}
    relay = Relay()
    options: Any = {"timeout_s": 60.0, "bucket_bytes": 1 << 18}
    with closing(CollectiveWeightSender("127.0.0.1", "key", 1, relay.trainer, **options)) as sender:
        coordinator = Receiver(relay.engine())
        assert coordinator.offered() is None

        async def main() -> list[Completion]:
            asked: list[asyncio.Task[Completion]] = []
            async with RemoteEngine.connect([VllmServer(vllm.url)]) as engine, asyncio.timeout(60):
                await engine.join_broadcast(sender.host, sender.port, "key")
                for version, model in models.items():
                    digest = sender.send(version, named_weights(model))
                    assert until(lambda version=version: coordinator.offered() == version)
                    wanted = [request(f"v{version}-{i}", tokens=200) for i in range(4)]
                    asked += [asyncio.create_task(engine.generate(one)) for one in wanted]
                    await asyncio.sleep(0)
                    update = coordinator.poll()
                    assert update is not None
                    receipt = await engine.update_weights(update)
                    assert (receipt.error, receipt.version, receipt.checksum) == (None, version, digest)
                    coordinator.acknowledge(receipt)
                    assert until(lambda: not sender.unanswered())
                    new = await engine.generate(request(f"new-{version}", 24))
                    assert {span.version for span in new.weight_versions} == {version}
                    assert logprob_error(model, new) < TOLERANCE
                return await asyncio.gather(*asked)

        with closing(coordinator):
            done = asyncio.run(main())
    for completion in done:
        versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
        assert versions == sorted(versions)


def test_the_first_weights_of_a_session_may_be_older_and_end_all_requests(vllm: VllmProcess, tmp_path: Path) -> None:
    """As after the death of a trainer; and what comes late from the session before is refused, or not taken."""
    models = [perturbed(load_model(ModelConfig()), seed) for seed in (7, 8)]

    async def main(_: VllmServer) -> Completion:
        first, second = (VllmServer(vllm.url, run="cafe", epoch=epoch) for epoch in (1, 2))
        newer, begun = save(models[1], 2, tmp_path), asyncio.Event()
        try:
            await first.update_weights(save(models[0], 90, tmp_path))
            asked = request("given-up", tokens=LONGEST, stream=True)
            running = asyncio.ensure_future(first.generate(asked, lambda _: begun.set()))
            await begun.wait()
            await second.update_weights(newer)
            with pytest.raises(ServerBusyError, match="aborted request"):
                await running
            with pytest.raises(WeightUpdateError, match="a later session updates"):
                await first.update_weights(save(models[0], 91, tmp_path))
            with pytest.raises(ServerError, match="of weights of another session"):
                await first.generate(request("late"))
            return await second.generate(request("new", 24))
        finally:
            await asyncio.gather(first.close(), second.close())

    done = at(vllm, main)
    assert [span.version for span in done.weight_versions] == [2]
    assert logprob_error(models[1], done) < TOLERANCE
    assert version_at(vllm) == 2


def test_a_run_goes_on_after_the_death_of_its_server(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    served = {"engine__kind": "vllm", "engine__python": PYTHON, "engine__slots": SLOTS, "engine__max_length": LENGTH}
    process = going(run_dir, 2, **served)
    before = process_ids(run_dir)
    kill(run_dir, "server-0")
    ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, GOAL)
    assert counts["restarts"] == {"run": 1}
    assert check(run_dir) == []
    assert not any(alive(pid) for pid in before.values())


def test_requests_share_beginnings_of_prompts_within_a_version_only(vllm: VllmProcess) -> None:
    prompt = tuple(range(3, 15)) * 12

    def tokens_shared() -> float:
        with urllib.request.urlopen(f"{vllm.url}/metrics") as answer:  # noqa: S310 - our own server
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    async def ask(client: VllmServer) -> list[int]:
        await client.info()
        found = [tokens_shared()]
        for number, version in enumerate([None, 1, 1, 2, None, 1]):
            one = msgspec.structs.replace(request(f"share{number}", tokens=4), prompt_ids=prompt, reuses_from=version)
            await client.generate(one)
            found.append(tokens_shared())
        return [int(after - before) for before, after in pairwise(found)]

    shared = at(vllm, ask)
    assert [count > len(prompt) / 2 for count in shared] == [False, False, True, False, False, True], shared


def test_a_killed_server_is_noticed_and_leaves_nothing_behind(vllm: VllmProcess) -> None:
    """The last test of the server. Its processes: vLLM's API server, which leads the group, and its engine."""
    group = int(Path(f"/proc/{vllm.pid}/task/{vllm.pid}/children").read_text().split()[0])
    assert "api_server" in Path(f"/proc/{group}/cmdline").read_text()

    async def kill(client: VllmServer) -> list[BaseException | Completion]:
        await client.info()
        running = [asyncio.ensure_future(client.generate(request(f"k{i}", tokens=LONGEST))) for i in range(SLOTS)]
        await asyncio.sleep(0.3)
        os.kill(group, signal.SIGKILL)
        return await asyncio.gather(*running, return_exceptions=True)

    assert vllm.running
    shared = [path for pid in members(group) for path in shared_memory(pid)]
    assert shared
    results = at(vllm, kill)
    assert any(isinstance(result, ServerUnreachableError) for result in results)
    assert all(isinstance(result, ServerUnreachableError | Completion) for result in results)  # some may have been done
    assert until(lambda: not vllm.running)
    assert "was killed by SIGKILL" in vllm.log_excerpt(100)
    assert until(lambda: not members(group))
    assert not any(path.exists() for path in shared)  # hundreds of megabytes


def shared_memory(pid: int) -> set[Path]:
    """What the process maps of Python's shared memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {path for line in lines if "/psm_" in line and (path := Path(line.split()[-1])).exists()}


def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_dtype"), running_vllm(settings(dtype="no_such_dtype"), tmp_path / "log"):
        pass

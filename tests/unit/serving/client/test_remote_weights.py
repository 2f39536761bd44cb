"""Weights for several servers: one file, all at once, one receipt; servers that come back are brought up to date first."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.errors import BroadcastEndedError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.models.tensor_file import write_safetensors
from pipelinerl.serving.client.adapter import EngineUnavailableError, ServerUnreachableError
from pipelinerl.serving.client.weights_file import WeightFiles
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import GenerationRequest, SamplingParams, UpdateReceipt
from tests.unit.fake_engine_servers import FAST, FakeServer, engine_over, in_event_loop, wait_until


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "embed": weight,
        "head": weight,  # tied
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(2, 6, generator=generator).T,
        "steps": torch.arange(3),
    }


def update(version: int) -> WeightUpdate:
    named = tensors(version)
    return WeightUpdate(version, checksum(named), named)


def files(directory: Path) -> list[str]:
    return sorted(map(str, directory.rglob("*.safetensors")))


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    written = tensors()
    write_safetensors(written, tmp_path / "w.safetensors")
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) and read[name].dtype == written[name].dtype for name in read)
    assert checksum(read) == checksum(written)


def test_a_type_that_files_do_not_have_is_an_error_of_the_update(tmp_path: Path) -> None:
    odd = {"x": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(WeightUpdateError, match=r"servers: .*x is of type torch\.complex128"):
        WeightFiles(tmp_path).write(WeightUpdate(1, "", odd))
    assert files(tmp_path) == []


def test_a_file_is_written_over_once_it_is_not_needed(tmp_path: Path) -> None:
    weights = WeightFiles(tmp_path)
    larger = {**tensors(), "more": torch.ones(500)}
    first = weights.write(WeightUpdate(1, checksum(larger), larger))
    second = weights.write(update(2))
    weights.remove(first.path)
    third = weights.write(update(3))
    assert files(tmp_path) == sorted([second.path, third.path])
    for saved in (second, third):  # the smaller ends where it should
        assert checksum(load_file(saved.path)) == saved.checksum == update(saved.version).checksum
    for saved in (second, third):
        weights.remove(saved.path)
    assert files(tmp_path) == [third.path]
    weights.close()
    assert not files(tmp_path)


@in_event_loop
async def test_all_servers_take_an_update_and_the_receipt_is_for_all(tmp_path: Path) -> None:
    servers = [FakeServer("a", slots=2), FakeServer("b", slots=4)]
    async with engine_over(*servers, weight_dirs=[tmp_path]) as engine:
        assert engine.version == 0
        for version in (1, 2):
            sent = update(version)
            receipt = await engine.update_weights(sent)
            assert receipt == UpdateReceipt(
                engine="engine", version=version, checksum=sent.checksum, pause_s=1.0, sequences_in_flight=0
            )
            assert engine.version == version
        assert [server.version for server in servers] == [2, 2]
        (kept,) = [offer for offer in servers[0].updates if offer.version == 2]
        assert kept.path in files(tmp_path)  # the last one stays, for servers that come back
        assert engine.progress().weight_updates == 2
        assert engine.progress().pauses_s == (1.0, 1.0)
    assert list(tmp_path.iterdir()) == []


@in_event_loop
async def test_a_refusal_is_in_the_receipt_and_names_the_server(tmp_path: Path) -> None:
    servers = [FakeServer("http://a"), FakeServer("http://b")]
    servers[1].update_problem = WeightUpdateError("the weights do not fit")
    async with engine_over(*servers, weight_dirs=[tmp_path]) as engine:
        receipt = await engine.update_weights(update(1))
        assert receipt.error is not None
        assert "http://b" in receipt.error
        assert "do not fit" in receipt.error
        assert "http://a" not in receipt.error
        assert receipt.checksum == ""
        assert engine.version == 0


@in_event_loop
async def test_an_echo_of_other_weights_is_an_error(tmp_path: Path) -> None:
    class Liar(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            receipt = await super().update_weights(update)
            return UpdateReceipt(engine="", version=receipt.version, checksum="0" * 32, pause_s=0.0, sequences_in_flight=0)

    async with engine_over(FakeServer("http://a"), Liar("http://b"), weight_dirs=[tmp_path]) as engine:
        receipt = await engine.update_weights(update(1))
    assert receipt.error is not None
    assert "http://b" in receipt.error
    assert "0" * 32 in receipt.error


@in_event_loop
async def test_a_server_that_does_not_answer_an_update_is_named(tmp_path: Path) -> None:
    class Stuck(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            await asyncio.sleep(60)
            raise AssertionError

    async with engine_over(FakeServer("http://a"), Stuck("http://b"), weight_dirs=[tmp_path]) as engine:
        with pytest.raises(WeightUpdateError, match=r"http://b did not answer weights of version 1"):
            await engine.update_weights(update(1))


@in_event_loop
async def test_an_answer_that_came_while_the_event_loop_was_blocked_is_in_time(tmp_path: Path) -> None:
    class Blocked(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            receipt = await super().update_weights(update)
            time.sleep(2 * FAST.update_s)
            await asyncio.sleep(0)  # the answer is there, and takes some passes to read
            await asyncio.sleep(0)
            return receipt

    async with engine_over(Blocked("a"), weight_dirs=[tmp_path]) as engine:
        assert (await engine.update_weights(update(1))).error is None


@in_event_loop
async def test_an_update_whose_answer_was_lost_is_sent_again(tmp_path: Path) -> None:
    class Breaking(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            receipt = await super().update_weights(update)
            if len(self.updates) < 3:
                raise ServerUnreachableError(self.url, "broke off")
            return receipt

    server = Breaking("a")
    async with engine_over(server, weight_dirs=[tmp_path]) as engine:
        assert (await engine.update_weights(update(1))).error is None
        assert engine.slots == server.slots
    assert len(server.updates) == 3


@in_event_loop
async def test_versions_do_not_go_back(tmp_path: Path) -> None:
    async with engine_over(FakeServer("a"), weight_dirs=[tmp_path]) as engine:
        await engine.update_weights(update(2))
        with pytest.raises(WeightUpdateError, match="older"):
            await engine.update_weights(update(1))


@in_event_loop
async def test_a_server_that_comes_back_takes_the_weights_before_it_gets_requests(tmp_path: Path) -> None:
    a, b = FakeServer("a"), FakeServer("b")
    async with engine_over(a, b, weight_dirs=[tmp_path]) as engine:
        await engine.update_weights(update(1))
        b.refuse()
        await wait_until(lambda: engine.slots == 4)
        await engine.update_weights(update(2))  # of those that are there
        assert engine.version == 2
        versions = []

        async def note(request: GenerationRequest, call: int) -> None:
            versions.append(b.version)

        b.before_answer = note
        b.restart()
        b.problem = None
        await wait_until(lambda: engine.slots == 8)
        a.held = b.held = True
        asked = []
        for number in range(8):
            sampling = SamplingParams(max_tokens=2)
            request = GenerationRequest(id=f"r{number}", prompt_ids=(number,), sampling=sampling)
            asked.append(asyncio.create_task(engine.generate(request)))
        await wait_until(lambda: len(versions) == 4)
        assert versions == [2] * 4
    assert [saved.version for saved in b.updates] == [1, 2]


@in_event_loop
async def test_servers_that_joined_a_broadcast_are_told_only_which_weights_to_take(tmp_path: Path) -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    async with engine_over(a, b, weight_dirs=[tmp_path]) as engine:
        await engine.join_broadcast("10.0.0.5", 7, "secret")
        assert [server.joined.index for server in (a, b) if server.joined] == [0, 1]
        assert a.joined == ProcessGroupRequest(
            host="10.0.0.5", port=7, key="secret", index=0, timeout_s=FAST.join_s, name="http://a"
        )
        receipt = await engine.update_weights(WeightUpdate(1, "c0ffee", {}))
        assert (receipt.error, receipt.version, receipt.checksum) == (None, 1, "c0ffee")
        assert a.updates == b.updates == [WeightUpdateRequest(version=1, checksum="c0ffee")]
        assert engine.progress().pauses_s == (1.0,)
    assert list(tmp_path.iterdir()) == []


@in_event_loop
async def test_the_loss_of_a_server_that_receives_a_broadcast_ends_the_engine(tmp_path: Path) -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    async with engine_over(a, b, weight_dirs=[tmp_path]) as engine:
        await engine.join_broadcast("10.0.0.5", 7, "secret")
        b.refuse()
        await wait_until(lambda: engine._error is not None)
        with pytest.raises(BroadcastEndedError, match="engine server http://b is gone, and all receive weights"):
            await engine.advance()


@in_event_loop
async def test_a_server_that_does_not_join_is_named(tmp_path: Path) -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    b.join_problem = WeightUpdateError("engine server http://b refused: no group was formed")
    async with engine_over(a, b, weight_dirs=[tmp_path]) as engine:
        with pytest.raises(WeightUpdateError, match="http://b refused"):
            await engine.join_broadcast("10.0.0.5", 7, "secret")


@in_event_loop
async def test_without_any_server_an_update_fails(tmp_path: Path) -> None:
    server = FakeServer("http://a")
    async with engine_over(server, weight_dirs=[tmp_path]) as engine:
        server.refuse()
        with pytest.raises(EngineUnavailableError, match="http://a"):
            await engine.update_weights(update(1))


def test_the_first_directory_with_room_is_taken_and_the_error_names_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    locked = tmp_path / "locked"  # in a file system that can only be read; root may write to a folder of any mode
    locked.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
    weights = WeightFiles(tmp_path / "missing", locked, there)
    saved = weights.write(update(1))
    assert Path(saved.path).is_relative_to(there)
    weights.close()
    with pytest.raises(WeightUpdateError, match=str(tmp_path / "missing")):
        WeightFiles(tmp_path / "missing").write(update(1))


def test_what_a_dead_process_left_is_removed_but_not_what_a_living_one_uses(tmp_path: Path) -> None:
    dead, living = tmp_path / "pipelinerl-weights-1-dead", WeightFiles(tmp_path)
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "v1.safetensors").touch()
    kept = living.write(update(1))
    assert not dead.exists()
    another = WeightFiles(tmp_path)
    another.write(update(2))
    assert Path(kept.path).is_file()
    another.close()
    living.close()
    assert list(tmp_path.iterdir()) == []

"""Weight files: what is read is what was sent, fits the engine, and comes from where it may come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx2
import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipelinerl.channel import listen
from pipelinerl.errors import PipelineRLError, StaleEpochError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, first_names, named_weights
from pipelinerl.serving.incoming import IncomingWeights
from pipelinerl.serving.server.http import RefusedError, error_body
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import GenerationRequest, SamplingParams, UpdateReceipt
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from pipelinerl.weights.receiving import Receiver
from tests.unit.fake_engine_servers import in_event_loop, wait_until
from tests.unit.server_parts import byte_model, client_of, running
from tests.unit.weights.relay import Relay

TIED = "lm_head.weight"


def weights_of(seed: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(byte_model(seed)).items()}


def saved(path: Path, tensors: dict[str, Tensor], said: str | None = None, version: int = 1) -> WeightUpdateRequest:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return WeightUpdateRequest(version=version, checksum=said or checksum(tensors), path=str(path))


def fetched(request: WeightUpdateRequest, *directories: Path) -> WeightUpdate:
    firsts = first_names(named_weights(byte_model()))
    return IncomingWeights(torch.device("cpu"), directories).fetch(request, firsts)


def test_what_is_read_is_what_was_sent_and_tied_names_may_be_left_out(tmp_path: Path) -> None:
    tensors = weights_of(1)
    for written in (tensors, {name: tensor for name, tensor in tensors.items() if name != TIED}):
        update = fetched(saved(tmp_path / f"{len(written)}", written, checksum(tensors)), tmp_path)
        assert (update.version, update.checksum) == (1, checksum(tensors))
        assert update.tensors.keys() == tensors.keys()
        assert all(torch.equal(update.tensors[name], tensors[name]) for name in tensors)


@in_event_loop
async def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    norm = "model.norm.weight"
    cases: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
        ("tied in the model but not equal", lambda w: w | {TIED: w[TIED] + 1}),
        ("2 missing", lambda w: {n: t for n, t in w.items() if "q_proj" not in n}),
        (r"1 unknown \(extra\)", lambda w: w | {"extra": torch.zeros(1)}),
        (rf"{norm} \(49,\), the model has \(48,\)", lambda w: w | {norm: torch.zeros(49)}),
        (f"{norm} is torch.bfloat16, in the engine it is torch.float32", lambda w: w | {norm: w[norm].bfloat16()}),
        (f"not finite \\({norm}", lambda w: w | {norm: w[norm] / 0}),
    ]
    async with running(tmp_path) as (service, _):
        before = service.engine.holding
        for number, (message, change) in enumerate(cases):
            with pytest.raises(WeightUpdateError, match=message):
                await service.updates.take(saved(tmp_path / f"{number}", change(weights_of(1))))
        with pytest.raises(WeightUpdateError, match="arrived damaged"):
            await service.updates.take(saved(tmp_path / "w", weights_of(1), "0" * 32))
        assert service.engine.holding == before
        assert checksum(service.loaded.weights) == before.checksum


# ---------------------------------------------------------------------------------------------- updates of a service


@in_event_loop
async def test_versions_rise_and_an_answer_that_was_lost_can_be_asked_for(tmp_path: Path) -> None:
    weights = [weights_of(seed) for seed in range(3)]
    first, second, again = (
        saved(tmp_path / f"{number}", tensors, version=version)
        for number, (tensors, version) in enumerate([(weights[1], 3), (weights[2], 5), (weights[1], 5)])
    )
    async with running(tmp_path) as (service, _):

        async def refused(request: WeightUpdateRequest) -> PipelineRLError:
            before = service.engine.holding
            with pytest.raises(PipelineRLError) as caught:
                await service.updates.take(request)
            assert service.engine.holding == before
            return caught.value

        async def take(request: WeightUpdateRequest) -> UpdateReceipt:
            return await service.updates.take(request)

        loaded = WeightUpdateRequest(version=0, checksum=checksum(weights[0]), path="nowhere")
        assert (await take(loaded)).checksum == checksum(weights[0])  # it holds these already
        other = saved(tmp_path / "other", weights[2], version=0)
        assert (await take(other)).checksum == other.checksum  # only the first may have the version of the loaded model
        receipt = await take(first)
        assert (receipt.version, receipt.checksum) == (3, first.checksum) == service.engine.holding
        Path(first.path).unlink()
        assert await take(first) == receipt
        receipts = await asyncio.gather(take(second), take(second))
        assert receipts[0] == receipts[1]
        for request in (again, first, loaded):
            error = await refused(request)
            assert isinstance(error, RefusedError)
            assert error.code == "stale_version"
        assert isinstance(await refused(WeightUpdateRequest(version=6, checksum="", path=second.path)), WeightUpdateError)
        assert checksum(service.loaded.weights) == second.checksum
        assert service.engine.progress.weight_updates == 3


@in_event_loop
async def test_another_session_begins_at_any_version_and_ends_what_came_before(tmp_path: Path) -> None:
    weights = [weights_of(seed) for seed in range(3)]
    async with running(tmp_path) as (service, _):

        async def take(version: int, epoch: int, seed: int) -> UpdateReceipt:
            request = saved(tmp_path / f"{version}-{epoch}", weights[seed], version=version)
            return await service.updates.take(msgspec.structs.replace(request, run="a", epoch=epoch))

        def asked(name: str, tokens: int) -> GenerationRequest:
            return GenerationRequest(id=name, prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=tokens, seed=1))

        await take(7, 1, 1)
        going = service.engine.submit(asked("going", 80))
        with pytest.raises(RefusedError, match="not newer than version 7"):
            await take(3, 1, 2)
        receipt = await take(3, 2, 2)
        assert (receipt.version, receipt.sequences_in_flight) == (3, 0)
        assert service.engine.holding == (3, checksum(weights[2]))
        ended = await going.completion()
        assert ended.finish_reason == "cancelled"
        assert {span.version for span in ended.weight_versions} <= {7}
        again = await service.engine.submit(asked("going", 80)).completion()
        assert [span.version for span in again.weight_versions] == [3], "an answer of the session before"
        with pytest.raises(RefusedError, match="not newer than version 3"):
            await take(2, 2, 1)


@in_event_loop
async def test_weights_that_another_session_begins_with_in_vain_leave_the_old_ones(tmp_path: Path) -> None:
    good, broken = (weights_of(seed) for seed in (1, 2))
    broken["model.norm.weight"][0] = float("nan")
    async with running(tmp_path) as (service, _):
        first = saved(tmp_path / "good", good, version=7)
        await service.updates.take(msgspec.structs.replace(first, run="a", epoch=1))
        second = msgspec.structs.replace(saved(tmp_path / "broken", broken, version=3), run="a", epoch=2)
        with pytest.raises(WeightUpdateError, match="finite"):
            await service.updates.take(second)
        assert service.engine.holding == (7, first.checksum)
        request = GenerationRequest(id="a", prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4, seed=1))
        done = await service.engine.submit(request).completion()
        assert [span.version for span in done.weight_versions] == [7]
        mended = msgspec.structs.replace(saved(tmp_path / "mended", good, version=4), run="a", epoch=2)
        assert (await service.updates.take(mended)).version == 4


@in_event_loop
async def test_a_session_that_was_replaced_updates_nothing_any_more(tmp_path: Path) -> None:
    weights = [weights_of(seed) for seed in range(4)]
    async with running(tmp_path) as (service, _):

        async def take(version: int, epoch: int, run: str = "a") -> UpdateReceipt:
            request = saved(tmp_path / f"{version}", weights[version], version=version)
            return await service.updates.take(msgspec.structs.replace(request, run=run, epoch=epoch))

        await take(1, 1)
        held = await take(1, 2)  # the same weights, as after a resume that lost no step
        group = ProcessGroupRequest(host="127.0.0.1", port=9, key="", index=0, run="a", epoch=1)
        for stale in (take(2, 1), take(1, 1), service.updates.join(group)):
            with pytest.raises(StaleEpochError, match="a later session updates the weights") as caught:
                await stale
            assert error_body(caught.value).error.code == "stale_epoch"
        assert service.engine.holding == (1, held.checksum)
        await take(2, 2)
        await take(3, 1, "another run")
        with pytest.raises(StaleEpochError, match="a later session"):
            await take(3, 2)
        assert (await take(2, 3)).version == 2, "a resume takes the server back"
        assert (await take(3, 0, "")).version == 3, "a client that is no run"


@in_event_loop
async def test_a_refused_request_of_another_session_changes_nothing(tmp_path: Path) -> None:
    """Whatever it was refused for: the session that updates the server goes on, with the group that it has formed."""
    newer = named_weights(byte_model(1))
    async with running(tmp_path) as (service, _):
        with closing(CollectiveWeightSender("127.0.0.1", "secret", 1, Relay().trainer)) as sender:
            group = ProcessGroupRequest(host=sender.host, port=sender.port, key="secret", index=0, run="a", epoch=1)
            sending = asyncio.create_task(asyncio.to_thread(sender.send, 1, newer))
            await service.updates.join(group)
            digest = await sending
            await wait_until(lambda: service.updates._incoming._group.newest() is not None)
            saved_weights = saved(tmp_path / "w", weights_of(1), version=1)
            elsewhere = msgspec.structs.replace(saved_weights, run="b", epoch=1, path=str(tmp_path.parent / "none"))
            damaged = msgspec.structs.replace(saved_weights, run="b", epoch=2, checksum="0")
            no_group = WeightUpdateRequest(version=1, checksum=digest, run="b", epoch=3)
            nobody = msgspec.structs.replace(group, port=9, run="b", epoch=4, timeout_s=0.2)
            later = msgspec.structs.replace(elsewhere, run="a", epoch=9)
            for refused in (elsewhere, damaged, no_group, later):
                with pytest.raises((RefusedError, WeightUpdateError)):
                    await service.updates.take(refused)
            with pytest.raises(WeightUpdateError):
                await service.updates.join(nobody)
            update = WeightUpdateRequest(version=1, checksum=digest, run="a", epoch=1)
            assert (await service.updates.take(update)).checksum == digest


@in_event_loop
async def test_a_client_that_leaves_while_its_group_is_formed_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The trainer may have died then: the next session's weights do not wait until the group of the last one is given up."""
    async with running(tmp_path) as (service, app), client_of(app) as client:
        with closing(listen()) as listener:  # nobody accepts
            host, port = listener.getsockname()
            group = {"host": host, "port": port, "key": "k", "index": 0, "run": "a", "epoch": 1}
            joining = asyncio.create_task(client.post("/init_process_group", json=group))
            await wait_until(service.updates._lock.locked)
            joining.cancel()
            weights = weights_of(1)
            request = msgspec.structs.replace(saved(tmp_path / "w", weights, version=3), run="a", epoch=2)
            assert (await service.updates.take(request)).version == 3


@in_event_loop
async def test_weights_may_be_broadcast_to_a_process_group(tmp_path: Path) -> None:
    """As in the paper: the trainer and the server form a group once, and then updates come over it."""
    newer, newest = named_weights(byte_model(1)), named_weights(byte_model(2))

    async with running(tmp_path) as (service, app), client_of(app) as client:

        async def update(version: int, said: str) -> httpx2.Response:
            return await client.post("/request_weight_update", json={"version": version, "checksum": said})

        assert (await update(1, "0")).status_code == 422, "there is no group"
        relay = Relay()
        with closing(CollectiveWeightSender("127.0.0.1", "secret", 1, relay.trainer)) as sender:
            coordinator = Receiver(relay.engine())
            assert coordinator.offered() is None
            group = {"host": sender.host, "port": sender.port, "key": "secret", "index": 0}
            sending = asyncio.create_task(asyncio.to_thread(sender.send, 1, newer))
            assert (await client.post("/init_process_group", json=group)).json() == {}
            assert await sending == checksum(newer)
            await wait_until(lambda: coordinator.offered() is not None)
            response = await update(1, checksum(newer))
            assert response.json()["checksum"] == checksum(newer)
            assert service.engine.holding == (1, checksum(newer))
            assert sender.unanswered()
            assert coordinator.poll() is not None
            coordinator.acknowledge(msgspec.json.decode(response.content, type=UpdateReceipt))
            assert not sender.unanswered()

            await asyncio.to_thread(sender.send, 2, newest)
            await wait_until(lambda: coordinator.offered() is not None)
            assert (await update(2, "0" * 32)).status_code == 422, "not what was broadcast"
            assert service.engine.holding == (1, checksum(newer))
            assert (await update(2, checksum(newest))).status_code == 200
        await service.updates.close()

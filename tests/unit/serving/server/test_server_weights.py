"""Weight files: what is read is what was sent, fits the engine, and comes from where it may come from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipelinerl.channel import listen
from pipelinerl.errors import StaleEpochError, WeightUpdateError
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.http import RefusedError, error_body
from pipelinerl.serving.server.served import ServedRequest
from pipelinerl.serving.server.service import Service
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from tests.unit.fake_engine_servers import request, wait_until
from tests.unit.server_parts import byte_model, running
from tests.unit.serving.server.test_server_app import PLAIN
from tests.unit.weights.relay import Relay

TIED = "lm_head.weight"


def weights_of(seed: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(byte_model(seed)).items()}


def saved(path: Path, tensors: dict[str, Tensor], announced: str | None = None, version: int = 1) -> WeightUpdateRequest:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return WeightUpdateRequest(version=version, checksum=announced or checksum(tensors), path=str(path))


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
        tensors = weights_of(1)
        less = {name: tensor for name, tensor in tensors.items() if name != TIED}  # a tied name may be left out
        await service.updates.take(saved(tmp_path / "less", less, checksum(tensors)))
        assert checksum(service.loaded.weights) == checksum(tensors)


# ---------------------------------------------------------------------------------------------- updates of a service


class Updates:
    """A service, and a trainer's files for it."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.folder = service, folder
        self.weights = [weights_of(seed) for seed in range(3)]

    def request(self, version: int, seed: int, run: str = "a", epoch: int = 0) -> WeightUpdateRequest:
        wanted = saved(self.folder / f"{version}-{seed}", self.weights[seed], version=version)
        return msgspec.structs.replace(wanted, run=run if epoch else "", epoch=epoch)

    async def take(self, version: int, seed: int, run: str = "a", epoch: int = 0) -> UpdateReceipt:
        receipt = await self.service.updates.take(self.request(version, seed, run, epoch))
        assert (receipt.version, receipt.checksum) == (version, checksum(self.weights[seed])) == self.service.engine.holding
        return receipt

    async def refused(self, work: Awaitable[object], kind: type[Exception], words: str) -> None:
        before = self.service.engine.holding
        with pytest.raises(kind, match=words):
            await work
        assert self.service.engine.holding == before

    def asked(self, name: str, tokens: int) -> ServedRequest:
        return self.service.engine.submit(request(name, tokens, seed=1))


@asynccontextmanager
async def updated(folder: Path) -> AsyncIterator[Updates]:
    async with running(folder) as (service, _):
        yield Updates(service, folder)


async def test_an_answer_has_the_versions_of_its_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as (service, client):
        engine: Any = service.engine._engine
        step = engine.step

        def slow() -> Any:
            time.sleep(0.005)
            return step()

        engine.step = slow
        wants = PLAIN | {"max_tokens": 90, "ignore_eos": True, "return_weight_versions": True, "stop": "never there"}
        asking = asyncio.create_task(client.json("/v1/completions", wants))
        await wait_until(lambda: service.engine.progress.tokens_generated >= 3)
        await Updates(service, tmp_path).take(1, 1)
        (choice,) = (await asking)["choices"]
    old, new = choice["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == (0, 0, 1, 90)
    assert old["end"] == new["start"] >= 3


async def test_versions_rise_and_an_answer_that_was_lost_can_be_asked_for(tmp_path: Path) -> None:
    async with updated(tmp_path) as updates:
        await updates.take(0, 0)  # it holds these already
        await updates.take(0, 2)  # only the first may have the version of the loaded model
        receipt = await updates.take(3, 1)
        first = updates.request(3, 1)
        Path(first.path or "").unlink()
        assert await updates.service.updates.take(first) == receipt
        receipts = await asyncio.gather(updates.take(5, 2), updates.take(5, 2))
        assert receipts[0] == receipts[1]
        for stale in ((5, 1), (3, 1), (0, 0)):
            await updates.refused(updates.take(*stale), RefusedError, "is not newer than version 5")
        unknown = WeightUpdateRequest(version=6, checksum="", path=str(tmp_path / "5-2"))
        await updates.refused(updates.service.updates.take(unknown), WeightUpdateError, "damaged")
        assert checksum(updates.service.loaded.weights) == checksum(updates.weights[2])
        assert updates.service.engine.progress.weight_updates == 3


async def test_another_session_begins_at_any_version_and_ends_what_came_before(tmp_path: Path) -> None:
    async with updated(tmp_path) as updates:
        await updates.take(7, 1, epoch=1)
        going = updates.asked("going", 80)
        await updates.refused(updates.take(3, 2, epoch=1), RefusedError, "not newer than version 7")
        assert (await updates.take(3, 2, epoch=2)).sequences_in_flight == 0
        ended = await going.completion()
        assert ended.finish_reason == "cancelled"
        assert {span.version for span in ended.weight_versions} <= {7}
        again = await updates.asked("going", 80).completion()
        assert [span.version for span in again.weight_versions] == [3], "an answer of the session before"
        await updates.refused(updates.take(2, 1, epoch=2), RefusedError, "not newer than version 3")


async def test_weights_that_another_session_begins_with_in_vain_leave_the_old_ones(tmp_path: Path) -> None:
    async with updated(tmp_path) as updates:
        await updates.take(7, 1, epoch=1)
        updates.weights[2]["model.norm.weight"][0] = float("nan")
        await updates.refused(updates.take(3, 2, epoch=2), WeightUpdateError, "finite")
        done = await updates.asked("a", 4).completion()
        assert [span.version for span in done.weight_versions] == [7]
        await updates.take(4, 1, epoch=2)


async def test_a_session_that_was_replaced_updates_nothing_any_more(tmp_path: Path) -> None:
    async with updated(tmp_path) as updates:
        await updates.take(1, 1, epoch=1)
        await updates.take(1, 1, epoch=2)  # the same weights, as after a resume that lost no step
        group = ProcessGroupRequest(host="127.0.0.1", port=9, key="", index=0, run="a", epoch=1)
        for stale in (updates.take(2, 2, epoch=1), updates.take(1, 1, epoch=1), updates.service.updates.join(group)):
            await updates.refused(stale, StaleEpochError, "a later session updates the weights")
        assert error_body(StaleEpochError("")).error.code == "stale_epoch"
        await updates.take(2, 2, epoch=2)
        await updates.take(3, 1, "another run", epoch=1)
        await updates.refused(updates.take(3, 1, epoch=2), StaleEpochError, "a later session")
        await updates.take(2, 2, epoch=3)  # a resume takes the server back
        await updates.take(3, 1)  # a client that is no run


async def test_a_refused_request_of_another_session_changes_nothing(tmp_path: Path) -> None:
    """Whatever it was refused for: the session that updates the server goes on, with the group that it has formed."""
    async with updated(tmp_path) as updates:
        take = updates.service.updates.take
        with closing(CollectiveWeightSender("127.0.0.1", "secret", 1, Relay().trainer)) as sender:
            group = ProcessGroupRequest(host=sender.host, port=sender.port, key="secret", index=0, run="a", epoch=1)
            sending = asyncio.create_task(asyncio.to_thread(sender.send, 1, named_weights(byte_model(1))))
            await updates.service.updates.join(group)
            right = WeightUpdateRequest(version=1, checksum=await sending, run="a", epoch=1)
            await wait_until(lambda: updates.service.updates._incoming._group.newest() is not None)
            file = updates.request(1, 1, "b", epoch=1)
            for refused in (
                msgspec.structs.replace(file, path=str(tmp_path.parent / "none")),
                msgspec.structs.replace(file, run="a", epoch=9, path=str(tmp_path.parent / "none")),
                msgspec.structs.replace(file, epoch=2, checksum="0"),
                msgspec.structs.replace(right, run="b", epoch=3),  # has no group
                msgspec.structs.replace(right, checksum="0" * 32),  # was not broadcast
            ):
                await updates.refused(take(refused), WeightUpdateError, ".")
            nobody = msgspec.structs.replace(group, port=9, run="b", epoch=4, timeout_s=0.2)
            await updates.refused(updates.service.updates.join(nobody), WeightUpdateError, ".")
            assert (await take(right)).checksum == right.checksum
        await updates.service.updates.close()


async def test_a_client_that_leaves_while_its_group_is_formed_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may have died then: the next session's weights do not wait until the group of the last one is given up."""
    monkeypatch.setattr("pipelinerl.weights.broadcast.receiver._ENDING_S", 0.2)
    async with running(tmp_path) as (service, client):
        with closing(listen()) as listener:  # nobody accepts
            host, port = listener.getsockname()
            group = {"host": host, "port": port, "key": "k", "index": 0, "run": "a", "epoch": 1}
            joining = asyncio.create_task(client.post("/init_process_group", json=group))
            await wait_until(service.updates._lock.locked)
            joining.cancel()
            await Updates(service, tmp_path).take(3, 1, epoch=2)

"""Weights for several servers: all at once, one receipt; servers that come back are brought up to date first."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipelinerl.errors import BroadcastEndedError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.serving.client.adapter import ServerUnreachableError
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt
from tests.unit.fake_engine_servers import FAST, FakeServer, engine_over, wait_until


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, f"sum of {version}", {}, path=f"/weights/{version}")


async def test_all_servers_take_an_update_and_the_receipt_is_for_all() -> None:
    servers = [FakeServer("a", slots=2), FakeServer("b", slots=4)]
    async with engine_over(*servers) as engine:
        assert engine.version == 0
        for version in (1, 2):
            sent = update(version)
            receipt = await engine.update_weights(sent)
            assert receipt == UpdateReceipt(
                engine="engine", version=version, checksum=sent.checksum, pause_s=1.0, sequences_in_flight=0
            )
            assert engine.version == version
        sent_to = [WeightUpdateRequest(version=v, checksum=f"sum of {v}", path=f"/weights/{v}") for v in (1, 2)]
        assert [server.updates for server in servers] == [sent_to] * 2
        assert engine.progress().weight_updates == 2
        assert engine.progress().pauses_s == (1.0, 1.0)


class Refusing(FakeServer):
    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        raise WeightUpdateError("the weights do not fit")


class Liar(FakeServer):
    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        return UpdateReceipt(engine="", version=update.version, checksum="0" * 32, pause_s=0.0, sequences_in_flight=0)


class Stuck(FakeServer):
    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        await asyncio.sleep(60)
        raise AssertionError


@pytest.mark.parametrize(("kind", "why"), [(Refusing, "do not fit"), (Liar, "0" * 32), (Stuck, "did not answer")])
async def test_a_server_that_does_not_apply_an_update_is_named_in_the_receipt(kind: type[FakeServer], why: str) -> None:
    async with engine_over(FakeServer("http://a"), kind("http://b")) as engine:
        receipt = await engine.update_weights(update(1))
        assert "http://b" in str(receipt.error)
        assert why in str(receipt.error)
        assert "http://a" not in str(receipt.error)
        assert (receipt.checksum, engine.version) == ("", 0)


async def test_an_answer_that_came_while_the_event_loop_was_blocked_is_in_time() -> None:
    class Blocked(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            receipt = await super().update_weights(update)
            time.sleep(2 * FAST.update_s)
            await asyncio.sleep(0)  # the answer is there, and takes some passes to read
            await asyncio.sleep(0)
            return receipt

    async with engine_over(Blocked("a")) as engine:
        assert (await engine.update_weights(update(1))).error is None


async def test_an_update_whose_answer_was_lost_is_sent_again() -> None:
    class Breaking(FakeServer):
        async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
            receipt = await super().update_weights(update)
            if len(self.updates) < 3:
                raise ServerUnreachableError(self.url, "broke off")
            return receipt

    server = Breaking("a")
    async with engine_over(server) as engine:
        assert (await engine.update_weights(update(1))).error is None
        assert engine.slots == server.slots
    assert len(server.updates) == 3


async def test_versions_do_not_go_back() -> None:
    async with engine_over(FakeServer("a")) as engine:
        await engine.update_weights(update(2))
        with pytest.raises(WeightUpdateError, match="older"):
            await engine.update_weights(update(1))


async def test_servers_that_joined_a_broadcast_are_told_only_which_weights_to_take() -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    async with engine_over(a, b) as engine:
        await engine.join_broadcast("10.0.0.5", 7, "secret")
        assert [server.joined.index for server in (a, b) if server.joined] == [0, 1]
        assert a.joined == ProcessGroupRequest(
            host="10.0.0.5", port=7, key="secret", index=0, timeout_s=FAST.join_s, name="http://a"
        )
        receipt = await engine.update_weights(WeightUpdate(1, "c0ffee", {}))
        assert (receipt.error, receipt.version, receipt.checksum) == (None, 1, "c0ffee")
        assert a.updates == b.updates == [WeightUpdateRequest(version=1, checksum="c0ffee")]
        assert engine.progress().pauses_s == (1.0,)


async def test_the_loss_of_a_server_that_receives_a_broadcast_ends_the_engine() -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    async with engine_over(a, b) as engine:
        await engine.join_broadcast("10.0.0.5", 7, "secret")
        b.refuse()
        await wait_until(lambda: engine._error is not None)
        with pytest.raises(BroadcastEndedError, match="engine server http://b is gone, and all receive weights"):
            await engine.advance()

"""Several servers as one engine: every request is answered exactly once, whatever happens to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import BroadcastEndedError, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.serving.client.adapter import (
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    find_fault,
)
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, TokenEvent, UpdateReceipt, VersionSpan
from tests.unit.fake_engine_servers import FAST, FakeServer, completion_of, engine_over, wait_until
from tests.unit.group_parts import completion

Asked = dict[str, asyncio.Task[Completion]]


def requests(count: int, *, max_tokens: int = 3) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"g{i}", prompt_ids=(i % 40, 1), sampling=SamplingParams(max_tokens=max_tokens, seed=i))
        for i in range(count)
    ]


def ask(engine: RemoteEngine, wanted: Sequence[GenerationRequest]) -> Asked:
    return {request.id: asyncio.create_task(engine.generate(request)) for request in wanted}


async def collect(engine: RemoteEngine, asked: Asked, between: Callable[[], None] = lambda: None) -> dict[str, Completion]:
    """The answers, while the engine is advanced as the actor does."""
    while not all(task.done() for task in asked.values()):
        await asyncio.sleep(0)
        await engine.advance()
        between()
    assert engine.in_progress == engine.queued == 0
    return {request_id: task.result() for request_id, task in asked.items()}


async def serve(
    engine: RemoteEngine, wanted: Sequence[GenerationRequest], between: Callable[[], None] = lambda: None
) -> dict[str, Completion]:
    return await collect(engine, ask(engine, wanted), between)


async def serve_until_error(engine: RemoteEngine) -> None:
    while True:
        await asyncio.sleep(0)
        await engine.advance()


def assert_as_asked(done: dict[str, Completion], wanted: Sequence[GenerationRequest]) -> None:
    assert done == {request.id: completion_of(request) for request in wanted}


async def test_every_request_is_answered_once_and_no_server_gets_more_than_its_slots() -> None:
    servers = [FakeServer("a", slots=3), FakeServer("b", slots=5)]
    wanted = requests(60)

    def release_when_full() -> None:
        if servers[0].running == 3 and servers[1].running == 5:
            servers[0].held = servers[1].held = False

    async with engine_over(*servers) as engine:
        assert engine.slots == 8
        servers[0].held = servers[1].held = True
        done = await serve(engine, wanted, release_when_full)
        assert engine.progress().tokens_generated == 180
    assert_as_asked(done, wanted)
    assert [server.most_running for server in servers] == [3, 5]
    assert len({request.id for server in servers for request in server.calls}) == 60
    assert all(server.closed for server in servers)


async def test_an_answer_ends_the_wait_and_who_waited_for_it_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.serving.client.engine.STEP_S", 60.0)
    async with engine_over(FakeServer("a")) as engine:
        await serve(engine, requests(1))
        assert not await engine.advance()


async def test_after_a_restart_a_request_begins_anew_under_another_id() -> None:
    server = FakeServer("a")
    server.held = True
    wanted = requests(3)
    async with engine_over(server) as engine:
        asked = ask(engine, wanted)
        await wait_until(lambda: server.running == 3)
        server.restart()
        await wait_until(lambda: len(server.calls) == 6)
        server.held = False
        done = await collect(engine, asked)
    assert_as_asked(done, wanted)
    assert len({request.id for request in server.calls}) == 6


async def test_without_any_server_the_engine_fails_and_says_why() -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    async with engine_over(a, b) as engine:
        a.refuse()
        b.problem = ServerBusyError("http://b", "answered 503: the engine failed")
        asked = ask(engine, requests(3))
        with pytest.raises(EngineUnavailableError, match=r"http://a.*refuses.*http://b.*the engine failed"):
            await serve_until_error(engine)
        assert not any(task.done() for task in asked.values()), "the error is not that of a rollout"
        with pytest.raises(EngineUnavailableError):
            await engine.generate(requests(9)[8])


def busy(request: GenerationRequest) -> Completion:
    raise ServerBusyError("http://a", "answered 429")


def breaking(request: GenerationRequest) -> Completion:
    raise ServerUnreachableError("http://a", "broke off")


def incomplete(request: GenerationRequest) -> Completion:
    return msgspec.structs.replace(completion_of(request), logprobs=(-1.0,))


def differing(request: GenerationRequest) -> Completion:
    return msgspec.structs.replace(completion_of(request, offset=1), logprobs=completion_of(request).logprobs)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (busy, "failed 3 times; the last time: .*answered 429"),
        (breaking, "failed 3 times; the last time: .*broke off"),
        (incomplete, "http://a.*3 tokens and 1 log-prob"),
        (differing, "its tokens differ from those streamed before"),
    ],
)
async def test_a_server_that_is_well_but_never_serves_ends_the_engine(answer: Any, words: str) -> None:
    class Server(FakeServer):
        async def generate(self, request: GenerationRequest, on_token: Any = None) -> Completion:
            if answer is differing:
                on_token(TokenEvent(request.id, 0, sum(request.prompt_ids), -1 / 8, 0))
            return answer(request)  # type: ignore[no-any-return]

    async with engine_over(Server("http://a"), bounds=FAST._replace(tries=3)) as engine:
        asked = asyncio.ensure_future(streamed(engine, requests(1)[0]))
        with pytest.raises((EngineUnavailableError, ServerError), match=words):
            await serve_until_error(engine)
        asked.cancel()


async def test_servers_that_can_not_be_one_engine_are_refused() -> None:
    servers = [FakeServer("a"), FakeServer("b", vocabulary=7)]
    with pytest.raises(UserError, match="different models"):
        async with engine_over(*servers):
            pass
    assert all(server.closed for server in servers)
    with pytest.raises(UserError, match="once"):
        async with engine_over(FakeServer("a"), FakeServer("a")):
            pass
    servers[1].refuse()
    with pytest.raises(EngineUnavailableError, match="b refuses"):
        async with engine_over(*servers):
            pass


async def test_a_request_that_its_server_refuses_fails_alone() -> None:
    def refuse(request: GenerationRequest) -> Completion:
        raise RequestError(f"request {request.id} is wrong")

    server = FakeServer("a")
    server.answer = refuse
    async with engine_over(server) as engine:
        plain, streamed = requests(2)
        asked = [asyncio.ensure_future(engine.generate(plain)), asyncio.ensure_future(anext(engine.stream(streamed)))]
        await asyncio.wait(asked)
        assert engine.in_progress == engine.queued == 0
    for task in asked:
        with pytest.raises(RequestError, match="is wrong"):
            task.result()


async def test_a_completion_that_the_server_cancelled_by_itself_is_asked_for_again() -> None:
    server = FakeServer("a")
    empty = {"token_ids": (), "logprobs": (), "weight_versions": (), "finish_reason": "cancelled"}
    server.answer = lambda request: (
        msgspec.structs.replace(completion_of(request), **empty) if len(server.calls) < 3 else completion_of(request)
    )
    wanted = requests(2)
    async with engine_over(server) as engine:
        done = await serve(engine, wanted)
    assert_as_asked(done, wanted)


async def test_a_cancelled_request_ends_at_once_also_at_its_server_or_before_it_reaches_one() -> None:
    server = FakeServer("a", slots=2)
    server.held = True
    wanted = requests(3)
    async with engine_over(server) as engine:
        asked = ask(engine, wanted)
        await wait_until(lambda: server.running == 2)
        for name in ("g0", "g2"):
            asked.pop(name).cancel()
        await asyncio.sleep(0)
        assert engine.in_progress == 1
        await wait_until(lambda: server.running == 1)
        server.held = False
        asked |= ask(engine, wanted[:1])  # the id is free again
        done = await collect(engine, asked)
    assert_as_asked(done, wanted[:2])
    assert [request.prompt_ids[0] for request in server.calls] == [0, 1, 0]


async def streamed(engine: RemoteEngine, request: GenerationRequest) -> tuple[list[TokenEvent], Completion]:
    *tokens, completion = [event async for event in engine.stream(request)]
    assert isinstance(completion, Completion)
    assert all(isinstance(event, TokenEvent) and event.request_id == request.id for event in tokens)
    return tokens, completion


async def test_streamed_tokens_come_once_and_in_order() -> None:
    """Also if a stream broke before its first token, or its server streams none."""

    class Silent(FakeServer):
        async def generate(self, request: GenerationRequest, on_token: Any = None) -> Completion:
            completion = await super().generate(request)
            if len(self.calls) == 1:
                raise ServerUnreachableError(self.url, "broke off")
            return completion

    async with engine_over(FakeServer("a"), Silent("b")) as engine:
        results = await asyncio.gather(*(streamed(engine, request) for request in requests(5, max_tokens=6)))
    for tokens, whole in results:
        assert [event.index for event in tokens] == list(range(6))
        assert tuple(event.token_id for event in tokens) == whole.token_ids
        assert tuple(event.logprob for event in tokens) == whole.logprobs


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_stream_that_breaks_ends_with_what_was_seen(restarts: bool) -> None:
    """Another attempt might give other tokens than those that were handed out."""

    class Stopping(FakeServer):
        async def generate(self, request: GenerationRequest, on_token: Any = None) -> Completion:
            self.calls.append(request)
            for index in range(2):
                on_token(TokenEvent(request.id, index, 7, -0.5, 0))
            if restarts:
                self.restart()
            raise ServerUnreachableError(self.url, "broke off")

    async with engine_over(Stopping("a")) as engine:
        tokens, completion = await streamed(engine, requests(1, max_tokens=6)[0])
    assert (len(tokens), completion.token_ids, completion.finish_reason) == (2, (7, 7), "cancelled")


async def test_what_can_never_be_served_is_refused_at_once() -> None:
    servers = [FakeServer("a", max_length=20), FakeServer("b", max_length=30)]
    async with engine_over(*servers) as engine:

        async def submit(prompt: tuple[int, ...]) -> Completion:
            return await engine.generate(GenerationRequest(id="x", prompt_ids=prompt, sampling=SamplingParams(max_tokens=4)))

        with pytest.raises(PromptTooLongError, match=r"17 prompt tokens \+ 4 new tokens > 20"):
            await submit((1,) * 17)
        first = asyncio.create_task(submit((1,)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="already in the engine"):
            await submit((1,))
        assert engine.in_progress == 1
        await first
    assert sum(len(server.calls) for server in servers) == 1


async def test_a_request_for_one_copy_is_answered_by_it_however_full_it_is() -> None:
    a, b = FakeServer("a", slots=2), FakeServer("b", slots=2)
    a.held = b.held = True
    async with engine_over(a, b) as engine:
        assert engine.copies == 2
        asked = ask(engine, requests(8))
        await wait_until(lambda: a.running == b.running == 2)
        first = requests(1)[0]
        copies = [msgspec.structs.replace(first, id=f"copy{copy}", prompt_ids=(45 + copy,), copy=copy) for copy in (0, 1, 2)]
        asked |= ask(engine, copies[:2])
        with pytest.raises(RequestError, match="2 servers"):
            await engine.generate(copies[2])
        await asyncio.sleep(0)
        a.held = False
        await wait_until(lambda: len(a.calls) >= 7)
        assert a.calls[2].prompt_ids == (45,)  # before the others, which any server can answer
        b.held = False
        await collect(engine, asked)
    assert [call.prompt_ids for call in b.calls if call.prompt_ids[0] >= 45] == [(46,)]
    assert all(call.copy is None for call in (*a.calls, *b.calls))


# ---- what can be the answer


REQUEST = GenerationRequest(id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=4, stop_token_ids=(9,)))
FULL = completion((3, 4, 5, 6), (-0.5, -1.0, 0.0, -2.0), (2, 2, 2, 4), reason="length")
EMPTY: dict[str, object] = {"token_ids": (), "logprobs": (), "weight_versions": ()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"token_ids": (3, 4, 5, 9), "finish_reason": "stop"}, None),
        ({"finish_reason": "cancelled"}, None),
        ({**EMPTY, "finish_reason": "cancelled"}, None),
        ({"request_id": "other"}, "request 'other'"),
        ({"logprobs": (-0.5, -1.0, 0.0)}, "4 tokens and 3"),
        ({"logprobs": (-0.5, -1.0, 0.0, float("nan"))}, "log-prob"),
        ({"logprobs": (-0.5, -1.0, 0.0, 0.1)}, "log-prob"),
        ({"token_ids": (3, 4, 5, 10)}, "vocabulary of 10"),
        ({"token_ids": (3, 4, 5, 6, 7)}, "5 tokens, more than the limit of 4"),
        ({"weight_versions": (VersionSpan(2, 0, 3),)}, "cover"),
        ({"token_ids": (3, 9, 5, 6)}, "after a stop token"),
        ({"token_ids": (3, 4, 5, 9)}, "length"),
        ({"finish_reason": "stop"}, "not a stop token"),
        ({**EMPTY, "finish_reason": "stop"}, "not a stop token"),
        ({"token_ids": (3,), "logprobs": (-1.0,), "weight_versions": (VersionSpan(0, 0, 1),)}, "after 1 of 4"),
    ],
)
def test_what_can_be_the_answer_and_what_can_not(changes: dict[str, object], words: str | None) -> None:
    fault = find_fault(msgspec.structs.replace(FULL, **changes), REQUEST, 10)
    assert fault is None if words is None else words in str(fault)


# ---- weights


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, f"sum of {version}", {}, path=f"/weights/{version}")


async def test_all_servers_take_an_update_and_the_receipt_is_for_all() -> None:
    servers = [FakeServer("a", slots=2), FakeServer("b", slots=4)]
    async with engine_over(*servers) as engine:
        assert engine.version == 0
        for version in (1, 2):
            sent = update(version)
            receipt = await engine.update_weights(sent)
            assert (receipt.error, receipt.version, receipt.checksum) == (None, version, sent.checksum)
            assert engine.version == version
        sent_to = [WeightUpdateRequest(version=v, checksum=f"sum of {v}", path=f"/weights/{v}") for v in (1, 2)]
        assert [server.updates for server in servers] == [sent_to] * 2
        assert engine.progress().weight_updates == 2
        assert engine.progress().pauses_s == (1.0, 1.0)


async def refusing(receipt: UpdateReceipt) -> UpdateReceipt:
    raise WeightUpdateError("the weights do not fit")


async def lying(receipt: UpdateReceipt) -> UpdateReceipt:
    return msgspec.structs.replace(receipt, checksum="0" * 32)


async def stuck(receipt: UpdateReceipt) -> UpdateReceipt:
    await asyncio.sleep(60)
    return receipt


@pytest.mark.parametrize(("applied", "why"), [(refusing, "do not fit"), (lying, "0" * 32), (stuck, "did not answer")])
async def test_a_server_that_does_not_apply_an_update_is_named_in_the_receipt(applied: Any, why: str) -> None:
    servers = FakeServer("http://a"), FakeServer("http://b")
    servers[1].applied = applied
    async with engine_over(*servers) as engine:
        receipt = await engine.update_weights(update(1))
        assert "http://b" in str(receipt.error)
        assert why in str(receipt.error)
        assert "http://a" not in str(receipt.error)
        assert (receipt.checksum, engine.version) == ("", 0)


async def test_an_answer_that_was_lost_is_asked_for_again_and_one_that_the_event_loop_delayed_is_in_time() -> None:
    server = FakeServer("a")

    async def applied(receipt: UpdateReceipt) -> UpdateReceipt:
        if len(server.updates) < 3:
            raise ServerUnreachableError(server.url, "broke off")
        time.sleep(2 * FAST.update_s)
        await asyncio.sleep(0)  # the answer is there, and takes some passes to read
        await asyncio.sleep(0)
        return receipt

    server.applied = applied
    async with engine_over(server) as engine:
        assert (await engine.update_weights(update(1))).error is None
        assert engine.slots == server.slots
        assert len(server.updates) == 3
        server.applied = None
        with pytest.raises(WeightUpdateError, match="older"):
            await engine.update_weights(update(0))


async def test_servers_that_joined_a_broadcast_are_told_which_weights_to_take_and_none_may_be_lost() -> None:
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
        b.refuse()
        await wait_until(lambda: engine._error is not None)
        with pytest.raises(BroadcastEndedError, match="engine server http://b is gone, and all receive weights"):
            await engine.advance()

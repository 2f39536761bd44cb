"""The engine's thread and what lies between it and coroutines, without HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import PipelineRLError, PromptTooLongError, RequestError, WeightUpdateError
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.engine_thread import Delivery, EngineThread
from pipelinerl.serving.server.exchange import Exchange
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, UpdateReceipt, versions_from_spans
from tests.parity.models import make_model
from tests.unit.fake_engine_servers import in_event_loop, wait_until
from tests.unit.scripted_engine import ScriptedEngine

ENDLESS = 10**8
TOO_LONG = 2 * ENDLESS


def request(name: str, tokens: int = 5, *, stream: bool = False, prompt: tuple[int, ...] = (3, 4, 5)) -> GenerationRequest:
    return GenerationRequest(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=tokens), stream=stream)


def scripted(slots: int = 4) -> ScriptedEngine:
    return ScriptedEngine(lambda wanted: range(1, wanted.sampling.max_tokens + 1), slots=slots, max_length=ENDLESS + 100)


class Inbox:
    """Collects deliveries; waits for what is in them."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._came = threading.Condition()

    def __call__(self, delivery: Delivery) -> None:
        with self._came:
            self.deliveries.append(delivery)
            self._came.notify_all()

    @property
    def finished(self) -> dict[str, Completion]:
        return {completion.request_id: completion for item in self.deliveries for completion in item.finished}

    @property
    def failed(self) -> dict[str, PipelineRLError]:
        return {request_id: error for item in self.deliveries for request_id, error in item.failed}

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._came:
            assert self._came.wait_for(condition, 10), self.deliveries


class Running:
    """An engine's thread with an inbox, closed at the end."""

    def __init__(self, engine: ScriptedEngine | LocalEngine, *, max_queue: int = 100, held: Callable[[], str] = str) -> None:
        self.inbox = Inbox()
        slots = engine.slots if isinstance(engine, LocalEngine) else 4
        self.thread = EngineThread(engine, name="e", slots=slots, max_queue=max_queue, held=held)
        self.thread.start(self.inbox)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.thread.close()


def test_requests_of_many_threads_are_all_answered_once() -> None:
    with Running(scripted()) as running:
        threads = [
            threading.Thread(target=lambda i=i: [running.thread.submit(request(f"{i}-{j}", 1 + j)) for j in range(10)])
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        running.inbox.wait(lambda: len(running.inbox.finished) == 80)
    assert all(len(done.token_ids) == 1 + int(name.partition("-")[2]) for name, done in running.inbox.finished.items())
    assert sum(len(item.finished) for item in running.inbox.deliveries) == 80
    assert running.thread.open_requests == 0


def test_it_sleeps_while_there_is_nothing_to_do() -> None:
    engine = scripted()
    with Running(engine) as running:
        running.thread.submit(request("a"))
        running.inbox.wait(lambda: "a" in running.inbox.finished)
        steps = engine.steps
        time.sleep(0.05)
        assert engine.steps == steps


def test_a_step_makes_at_most_one_delivery_and_none_without_news() -> None:
    engine = scripted()
    with Running(engine) as running:
        for name in ("a", "b", "c"):
            running.thread.submit(request(name, 20, stream=name != "c"))
        running.inbox.wait(lambda: len(running.inbox.finished) == 3)
        quiet = engine.steps, len(running.inbox.deliveries)
        running.thread.submit(request("d", 50))
        running.inbox.wait(lambda: "d" in running.inbox.finished)
    assert quiet[1] <= quiet[0]
    assert len(running.inbox.deliveries) == quiet[1] + 1
    assert [event.token_id for item in running.inbox.deliveries for event in item.tokens if event.request_id == "a"] == [
        *range(1, 21)
    ]


def test_what_the_engine_refuses_fails_alone() -> None:
    with Running(scripted()) as running:
        running.thread.submit(request("good"))
        running.thread.submit(request("long", TOO_LONG))
        running.inbox.wait(lambda: len(running.inbox.finished) + len(running.inbox.failed) == 2)
        assert isinstance(running.inbox.failed["long"], PromptTooLongError)
        running.thread.submit(request("long"))  # the id is free again
        running.thread.submit(request("twice", ENDLESS))
        with pytest.raises(RequestError, match="already in the engine"):
            running.thread.submit(request("twice", ENDLESS))


def test_a_failed_engine_tells_everyone_and_takes_nothing_more() -> None:
    class Failing(ScriptedEngine):
        def step(self) -> StepOutput:
            if self.steps == 3:
                raise RuntimeError("out of memory")
            return super().step()

    with Running(Failing(lambda _: range(1000), max_length=TOO_LONG)) as running:
        for name in ("a", "b"):
            running.thread.submit(request(name, ENDLESS))
        running.inbox.wait(lambda: len(running.inbox.failed) == 2)
        for error in running.inbox.failed.values():
            assert isinstance(error, RefusedError)
            assert error.code == "unavailable"
            assert "RuntimeError: out of memory" in str(error)
        with pytest.raises(RefusedError, match="out of memory"):
            running.thread.submit(request("c"))
        with pytest.raises(RefusedError, match="out of memory"):
            running.thread.update(WeightUpdate(1, "", {})).result(10)
        assert "out of memory" in (running.thread.refusing or "")


def test_closing_answers_what_is_open() -> None:
    running = Running(scripted())
    running.thread.submit(request("a", ENDLESS))
    assert running.thread.close()
    running.inbox.wait(lambda: "a" in running.inbox.failed or "a" in running.inbox.finished)
    with pytest.raises(RefusedError, match="has stopped"):
        running.thread.submit(request("b"))


# ---------------------------------------------------------------------------------------------- weights


def local() -> tuple[LocalEngine, Callable[[], str]]:
    model = make_model("llama")
    engine = LocalEngine(model, slots=4, max_length=96, flatten=False)
    return engine, lambda: checksum(named_weights(model))


def update_of(seed: int, version: int) -> WeightUpdate:
    tensors = named_weights(make_model("llama", seed))
    return WeightUpdate(version, checksum(tensors), tensors)


def test_an_update_comes_between_two_tokens_of_everything_in_progress() -> None:
    engine, held = local()
    with Running(engine, held=held) as running:
        assert running.thread.holding == (0, update_of(0, 0).checksum)
        for i in range(4):
            running.thread.submit(request(f"r{i}", 80, stream=True))
        running.inbox.wait(lambda: len(running.inbox.deliveries) > 5)
        receipt = running.thread.update(update_of(1, 1)).result(10)
        assert (receipt.version, receipt.checksum) == running.thread.holding == (1, update_of(1, 1).checksum)
        assert receipt.sequences_in_flight == 4
        running.inbox.wait(lambda: len(running.inbox.finished) == 4)
    streamed = [event for item in running.inbox.deliveries for event in item.tokens]
    for name, done in running.inbox.finished.items():
        versions = versions_from_spans(done.weight_versions, 80)
        assert set(versions) == {0, 1}
        assert versions == sorted(versions)
        assert [event for event in streamed if event.request_id == name] == token_events(done)


def test_an_update_that_does_not_fit_is_refused_and_the_old_weights_stay() -> None:
    engine, held = local()
    before = held()
    with Running(engine, held=held) as running:
        good = update_of(1, 1)
        future = running.thread.update(WeightUpdate(1, good.checksum, dict(list(good.tensors.items())[1:])))
        with pytest.raises(WeightUpdateError, match="missing"):
            future.result(10)
        assert held() == before
        running.thread.submit(request("a"))
        running.inbox.wait(lambda: "a" in running.inbox.finished)
        assert running.thread.update(good).result(10).version == 1


def test_an_engine_left_with_other_weights_than_it_was_sent_has_failed() -> None:
    engine, held = local()
    good = update_of(1, 1)
    with Running(engine, held=held) as running:
        running.thread.submit(request("a", 90))
        with pytest.raises(RefusedError, match="the engine failed"):
            running.thread.update(WeightUpdate(1, "0" * 32, good.tensors)).result(10)
        running.inbox.wait(lambda: "a" in running.inbox.failed)


def test_whoever_gave_up_waiting_for_an_update_does_not_harm_the_engine() -> None:
    blocked = threading.Event()

    class Slow(ScriptedEngine):
        def step(self) -> StepOutput:
            blocked.wait(10)
            return super().step()

    with Running(Slow(lambda wanted: range(wanted.sampling.max_tokens))) as running:
        running.thread.submit(request("a"))
        future: Future[UpdateReceipt] = running.thread.update(WeightUpdate(1, "x", {"w": torch.zeros(1)}))
        assert future.cancel()
        blocked.set()
        running.inbox.wait(lambda: "a" in running.inbox.finished)
        assert running.thread.holding == (1, "x")


# ---------------------------------------------------------------------------------------------- the exchange


@asynccontextmanager
async def crossing(**options: Any) -> AsyncIterator[tuple[Exchange, ScriptedEngine]]:
    """An exchange over a scripted engine, in the running event loop."""
    engine = scripted()
    thread = EngineThread(engine, name="e", slots=4, max_queue=100, held=str)
    yield Exchange(thread, **options), engine
    assert thread.close()


@pytest.mark.parametrize("stream", [True, False])
@in_event_loop
async def test_whoever_follows_sees_every_token_once(stream: bool) -> None:
    async with crossing() as (exchange, _):
        generation = exchange.submit(request("a", 300, stream=stream))

        async def follow() -> list[int]:
            return [event.index async for batch in generation.batches() for event in batch]

        early = asyncio.create_task(follow())
        await generation.begun()
        late = asyncio.create_task(follow())
        done = await generation.completion()
        assert await early == await late == await follow() == [*range(300)]
        assert done.token_ids == tuple(range(1, 301))


@in_event_loop
async def test_what_nobody_follows_any_more_is_cancelled() -> None:
    async with crossing() as (exchange, engine):
        generation = exchange.submit(request("a", ENDLESS))
        with exchange.following(generation):
            with exchange.following(generation):
                pass
            assert not generation.abandoned
        assert (await generation.completion()).finish_reason == "cancelled"
        ended = exchange.submit(request("b"))
        with exchange.following(ended):
            await ended.completion()
        assert engine.cancelled == ["a"]


@in_event_loop
async def test_within_the_grace_somebody_else_may_take_over() -> None:
    async with crossing() as (exchange, _):
        generation = exchange.submit(request("a", ENDLESS))
        with exchange.following(generation, grace_s=0.02):
            pass
        with exchange.following(generation, grace_s=0.02):
            await asyncio.sleep(0.04)
            assert not generation.abandoned
        await wait_until(lambda: generation.abandoned)
        assert (await generation.completion()).finish_reason == "cancelled"


# ---------------------------------------------------------------------------------------------- once per id


@in_event_loop
async def test_the_same_id_gets_the_same_completion_while_it_runs_and_afterwards() -> None:
    async with crossing() as (exchange, engine):
        first = await exchange.submit_once(request("a", 100))
        assert await exchange.submit_once(request("a", 100, stream=True)) is first
        await first.completion()
        assert await exchange.submit_once(request("a", 100)) is first
        assert len(engine.requests) == 1
        with pytest.raises(RequestError, match="used for another request"):
            await exchange.submit_once(request("a", 101))


@in_event_loop
async def test_what_was_given_up_or_failed_is_not_remembered() -> None:
    async with crossing() as (exchange, _):
        first = await exchange.submit_once(request("a", ENDLESS))
        with exchange.following(first):
            pass
        second = await exchange.submit_once(request("a", ENDLESS))  # at once: before the first has ended
        assert second is not first
        assert not second.abandoned
        exchange.cancel("a")  # asked for, so it is what a retry gets
        assert (await second.completion()).finish_reason == "cancelled"
        assert await exchange.submit_once(request("a", ENDLESS)) is second
        for _ in range(2):
            failed = await exchange.submit_once(request("long", TOO_LONG))
            with pytest.raises(PromptTooLongError):
                await failed.completion()


@in_event_loop
async def test_memory_of_what_ended_is_bounded_by_tokens_and_by_time() -> None:
    now_s = 0.0
    async with crossing(keep_s=10, keep_tokens=40, clock=lambda: now_s) as (exchange, engine):

        async def known(name: str) -> bool:
            before = len(engine.requests)
            await (await exchange.submit_once(request(name, 10))).completion()
            return len(engine.requests) == before

        assert [await known(name) for name in ("a", "b", "c", "a")] == [False, False, False, True]  # 13 tokens each
        assert [await known(name) for name in ("d", "b", "a")] == [False, True, False]
        now_s = 11.0
        assert [await known(name) for name in ("e", "d")] == [False, False]
        await exchange.submit(request("plain")).completion()
        assert "plain" not in exchange._known

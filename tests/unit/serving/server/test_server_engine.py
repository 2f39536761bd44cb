"""The engine in its thread, and the coroutines that follow its requests, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.server.served import ServedEngine
from tests.parity.models import make_model
from tests.unit.fake_engine_servers import request, wait_until
from tests.unit.scripted_engine import ScriptedEngine

ENDLESS = 10**8
TOO_LONG = 2 * ENDLESS


def scripted(slots: int = 4) -> ScriptedEngine:
    return ScriptedEngine(lambda wanted: range(1, wanted.sampling.max_tokens + 1), slots=slots, max_length=ENDLESS + 100)


@asynccontextmanager
async def served(engine: Any, held: Callable[[], str] = str) -> AsyncIterator[ServedEngine]:
    """The engine in its thread, closed at the end."""
    running = ServedEngine(engine, 100, held)
    yield running
    assert running.close()


async def test_what_the_engine_refuses_fails_alone() -> None:
    engine = scripted()
    async with served(engine) as running:
        good, long = running.submit(request("good")), running.submit(request("long", TOO_LONG))
        with pytest.raises(PromptTooLongError):
            await long.completion()
        assert (await good.completion()).request_id == "good"
        steps = engine.steps
        await asyncio.sleep(0.05)
        assert engine.steps == steps, "it sleeps without work"
        running.submit(request("long"))  # the id is free again
        running.submit(request("twice", ENDLESS))
        with pytest.raises(RequestError, match="already in the engine"):
            running.submit(request("twice", ENDLESS))


async def test_a_failed_engine_tells_everyone_and_takes_nothing_more() -> None:
    class Failing(ScriptedEngine):
        def step(self) -> StepOutput:
            if self.steps == 3:
                raise RuntimeError("out of memory")
            return super().step()

    async with served(Failing(lambda _: range(1000), max_length=TOO_LONG)) as running:
        for generation in [running.submit(request(name, ENDLESS)) for name in ("a", "b")]:
            with pytest.raises(RefusedError, match="RuntimeError: out of memory") as caught:
                await generation.completion()
            assert caught.value.code == "unavailable"
        with pytest.raises(RefusedError, match="out of memory"):
            running.submit(request("c"))
        with pytest.raises(RefusedError, match="out of memory"):
            await running.update(WeightUpdate(1, "", {}))


async def test_closing_answers_what_is_open() -> None:
    async with served(scripted()) as running:
        generation = running.submit(request("a", ENDLESS))
        assert running.close()
        with pytest.raises(RefusedError, match="has stopped"):
            await generation.completion()
        with pytest.raises(RefusedError, match="has stopped"):
            running.submit(request("b"))


# ---------------------------------------------------------------------------------------------- weights


async def test_an_update_that_may_have_changed_the_weights_though_it_was_refused_is_a_failure() -> None:
    model = make_model("llama")
    engine = LocalEngine(model, slots=4, max_length=96, flatten=False)
    async with served(engine, lambda: checksum(named_weights(model))) as running:
        going = running.submit(request("b", 90))
        with pytest.raises(RefusedError, match="the engine failed"):
            await running.update(WeightUpdate(2, "0" * 32, named_weights(make_model("llama", 2))))
        with pytest.raises(RefusedError, match="the engine failed"):
            await going.completion()


async def test_a_caller_that_gave_up_waiting_for_an_update_does_not_harm_the_engine() -> None:
    blocked = threading.Event()

    class Slow(ScriptedEngine):
        def step(self) -> StepOutput:
            blocked.wait(10)
            return super().step()

    async with served(Slow(lambda wanted: range(wanted.sampling.max_tokens))) as running:
        generation = running.submit(request("a"))
        updating = asyncio.create_task(running.update(WeightUpdate(1, "x", {"w": torch.zeros(1)})))
        await asyncio.sleep(0)
        updating.cancel()
        blocked.set()
        await generation.completion()
        await wait_until(lambda: running.holding == (1, "x"))

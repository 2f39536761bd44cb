"""Several servers as one engine: every request is answered exactly once, whatever happens to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from pipelinerl.actor.client import EngineClient
from pipelinerl.errors import PipelineRLError, PromptTooLongError, RequestError, UserError
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.errors import (
    Bounds,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
)
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, TokenEvent
from tests.unit.fake_engine_servers import FakeServer, RefusingServer, completion_of

FAST = Bounds(
    startup_s=0.2, health_every_s=0.01, refused_s=0.05, silent_s=0.2, update_s=0.3, overload_s=0.3, cancel_s=0.1, tries=8
)
PATIENCE_S = 5.0


@contextmanager
def engine_over(*servers: FakeServer, **options: Any) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(servers, **{"bounds": FAST} | options)
    try:
        yield engine
    finally:
        engine.close()


def requests(count: int, *, max_tokens: int = 3, stream: bool = False) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"g{i}", prompt_ids=(i % 40, 1), sampling=SamplingParams(max_tokens=max_tokens, seed=i), stream=stream
        )
        for i in range(count)
    ]


def serve(
    engine: RemoteEngine, wanted: Sequence[GenerationRequest], between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Completion], list[TokenEvent]]:
    """Submit, and step until all are answered."""
    for request in wanted:
        engine.submit(request)
    answered = collect(engine, len(wanted), between)
    assert engine.in_progress == engine.queued == 0
    return answered


def collect(
    engine: RemoteEngine, count: int, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Completion], list[TokenEvent]]:
    """Step until `count` requests are answered. Fails for one that is answered twice, or after a bound."""
    done: dict[str, Completion] = {}
    tokens: list[TokenEvent] = []
    until_s = time.monotonic() + PATIENCE_S
    while len(done) < count:
        assert time.monotonic() < until_s, f"only {sorted(done)} were answered"
        output = engine.step()
        tokens += output.tokens
        for completion in output.finished:
            assert completion.request_id not in done
            done[completion.request_id] = completion
        between()
    return done, tokens


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def assert_as_asked(done: dict[str, Completion], wanted: Sequence[GenerationRequest]) -> None:
    assert done == {request.id: completion_of(request) for request in wanted}


def test_every_request_is_answered_once_and_no_server_gets_more_than_its_slots() -> None:
    servers = [FakeServer("a", slots=3), FakeServer("b", slots=5)]
    wanted = requests(60)

    def release_when_full() -> None:
        if servers[0].running == 3 and servers[1].running == 5:
            servers[0].held = servers[1].held = False

    with engine_over(*servers) as engine:
        assert engine.slots == 8
        servers[0].held = servers[1].held = True
        done, tokens = serve(engine, wanted, release_when_full)
        assert engine.progress().tokens_generated == 180
    assert_as_asked(done, wanted)
    assert not tokens
    assert [server.most_running for server in servers] == [3, 5]
    assert len({request.id for server in servers for request in server.calls}) == 60
    assert all(server.closed for server in servers)


def test_what_exceeds_the_slots_is_queued() -> None:
    server = FakeServer("a", slots=4)
    server.held = True
    with engine_over(server) as engine:
        for request in requests(6):
            engine.submit(request)
        assert (engine.in_progress, engine.queued) == (4, 2)
        assert engine.step() == ([], [], [])
        progress = engine.progress()
        assert (progress.in_progress, progress.queued, progress.slots) == (4, 2, 4)
        assert progress.busy_s > 0


def test_an_idle_engine_steps_at_once_and_does_nothing() -> None:
    with engine_over(FakeServer("a"), step_s=60.0) as engine:
        assert engine.step() == ((), [], ())
        assert engine.progress().busy_s == 0


def test_a_broken_connection_is_tried_again_under_the_same_id_at_the_same_server() -> None:
    a, b = FakeServer("a", slots=1), FakeServer("b", slots=1)

    async def break_twice(request: GenerationRequest, call: int) -> None:
        if call in (1, 2):
            a.made[request.id] = completion_of(request)  # it was made, but the answer never came
            raise ServerUnreachableError("a", "broke off")

    a.before_answer = break_twice
    wanted = requests(1)
    with engine_over(a, b) as engine:
        done, _ = serve(engine, wanted)
    assert_as_asked(done, wanted)
    assert len({request.id for request in a.calls}) == 1
    assert len(a.calls) == 3
    assert not b.calls


def test_ids_differ_between_clients_of_one_server() -> None:
    server = FakeServer("a")
    wanted = requests(2)
    for _ in range(2):
        with engine_over(server) as engine:
            serve(engine, wanted)
    assert len({request.id for request in server.calls}) == 4


def test_requests_of_a_server_that_is_gone_are_answered_by_the_other() -> None:
    a, b = FakeServer("a", slots=8), FakeServer("b", slots=8)
    a.held = b.held = True
    wanted = requests(16)
    with engine_over(a, b) as engine:
        for request in wanted:
            engine.submit(request)
        wait_until(lambda: a.running == 8 and b.running == 8)
        a.answer = lambda request: completion_of(request, offset=25)  # must never be seen
        a.refuse()
        a.held = b.held = False
        done, _ = collect(engine, 16)
        assert engine.slots == 8
    assert_as_asked(done, wanted)
    assert len(b.calls) == 16


def test_after_a_restart_a_request_begins_anew_under_another_id() -> None:
    server = FakeServer("a")
    server.held = True
    wanted = requests(3)
    with engine_over(server) as engine:
        for request in wanted:
            engine.submit(request)
        wait_until(lambda: server.running == 3)
        server.restart()
        wait_until(lambda: len(server.calls) == 6)
        server.held = False
        done, _ = collect(engine, 3)
    assert_as_asked(done, wanted)
    assert len({request.id for request in server.calls}) == 6


def test_without_any_server_the_engine_fails_and_says_why() -> None:
    a, b = FakeServer("http://a"), FakeServer("http://b")
    with engine_over(a, b) as engine:
        a.refuse()
        b.problem = ServerBusyError("http://b", "answered 503: the engine failed")
        for request in requests(3):
            engine.submit(request)
        with pytest.raises(EngineUnavailableError, match=r"http://a.*refuses.*http://b.*the engine failed"):
            serve_until_error(engine)
        with pytest.raises(EngineUnavailableError):
            engine.submit(requests(9)[8])


def serve_until_error(engine: RemoteEngine) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        engine.step()


def test_a_server_that_never_answers_is_named_at_the_start() -> None:
    b = FakeServer("http://b")
    b.refuse()
    with pytest.raises(EngineUnavailableError, match="http://b"):
        RemoteEngine([FakeServer("http://a"), b], bounds=FAST)


def test_servers_of_different_models_are_refused() -> None:
    class Other(FakeServer):
        async def info(self) -> Any:
            return msgspec.structs.replace(await super().info(), vocabulary=7)

    with pytest.raises(UserError, match="different models"):
        RemoteEngine([FakeServer("a"), Other("b")], bounds=FAST)
    with pytest.raises(UserError, match="once"):
        RemoteEngine([FakeServer("a"), FakeServer("a")], bounds=FAST)


def test_a_server_that_is_full_is_asked_again_when_it_says() -> None:
    server = FakeServer("a")

    async def full(request: GenerationRequest, call: int) -> None:
        if call <= 5:
            raise ServerBusyError("a", "answered 429", retry_after_s=0.001)

    server.before_answer = full
    wanted = requests(4)
    with engine_over(server) as engine:
        done, _ = serve(engine, wanted)
    assert_as_asked(done, wanted)


@pytest.mark.parametrize("problem", [ServerBusyError("a", "answered 429"), ServerUnreachableError("a", "broke off")])
def test_a_server_that_is_well_but_never_serves_is_not_waited_for_for_ever(problem: Exception) -> None:
    server = FakeServer("a")

    async def fail(request: GenerationRequest, call: int) -> None:
        raise problem

    server.before_answer = fail
    with engine_over(server, bounds=FAST._replace(tries=3)) as engine, pytest.raises(EngineUnavailableError):
        serve(engine, requests(1))


def test_an_answer_that_can_not_be_the_completion_ends_the_engine() -> None:
    server = FakeServer("http://a")
    server.answer = lambda request: msgspec.structs.replace(completion_of(request), logprobs=(-1.0,))
    with engine_over(server) as engine, pytest.raises(ServerError, match=r"http://a.*3 tokens and 1 log-prob"):
        serve(engine, requests(1))


def test_a_request_that_every_server_refuses_fails_alone() -> None:
    servers = [RefusingServer("a"), RefusingServer("b")]
    with engine_over(*servers) as engine:
        for request in requests(2):
            engine.submit(request)
        failed: dict[str, PipelineRLError] = {}
        wait_until(lambda: len(failed.update(engine.step().failed) or failed) == 2)
        assert engine.in_progress == engine.queued == 0
    assert failed.keys() == {"g0", "g1"}
    assert all(isinstance(error, RequestError) and "is wrong" in str(error) for error in failed.values())
    assert [len(server.calls) for server in servers] == [2, 2]


def test_who_awaits_a_request_that_fails_gets_the_reason() -> None:
    async def ask(engine: RemoteEngine) -> list[BaseException]:
        client = EngineClient(engine)
        plain, streamed = requests(2)
        waiting = [
            asyncio.ensure_future(client.generate(plain)),
            asyncio.ensure_future(anext(client.stream(streamed))),
        ]
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            await client.step()
        return [error for task in waiting if (error := task.exception()) is not None]

    with engine_over(RefusingServer("a")) as engine:
        errors = asyncio.run(asyncio.wait_for(ask(engine), PATIENCE_S))
    assert [type(error) for error in errors] == [RequestError, RequestError]


def test_a_request_that_one_server_refuses_is_answered_by_another() -> None:
    unfit, fit = RefusingServer("a"), FakeServer("b", slots=1)
    wanted = requests(6)
    with engine_over(unfit, fit) as engine:
        done, _ = serve(engine, wanted)
    assert_as_asked(done, wanted)
    assert len(fit.calls) == 6


def test_a_completion_that_the_server_cancelled_by_itself_is_asked_for_again() -> None:
    server = FakeServer("a")
    empty = {"token_ids": (), "logprobs": (), "weight_versions": (), "finish_reason": "cancelled"}
    server.answer = lambda request: (
        msgspec.structs.replace(completion_of(request), **empty) if len(server.made) < 2 else completion_of(request)
    )
    wanted = requests(2)
    with engine_over(server) as engine:
        done, _ = serve(engine, wanted)
    assert_as_asked(done, wanted)


def test_a_cancelled_request_ends_at_once_and_what_comes_later_is_dropped() -> None:
    server = FakeServer("a")
    server.held = True
    wanted = requests(2)
    with engine_over(server) as engine:
        for request in wanted:
            engine.submit(request)
        wait_until(lambda: server.running == 2)
        engine.cancel("g0")
        engine.cancel("unknown")
        assert engine.in_progress == 2
        output = engine.step()
        assert [(c.request_id, c.finish_reason) for c in output.finished] == [("g0", "cancelled")]
        assert engine.in_progress == 1
        wait_until(lambda: len(server.cancelled) == 1)
        assert server.cancelled == [call.id for call in server.calls if call.prompt_ids == (0, 1)]
        server.held = False
        engine.submit(wanted[0])  # the id is free again
        done, _ = collect(engine, 2)
    assert_as_asked(done, wanted)


def test_a_request_cancelled_before_it_has_a_slot_never_reaches_a_server() -> None:
    server = FakeServer("a", slots=1)
    server.held = True
    with engine_over(server) as engine:
        for request in requests(2):
            engine.submit(request)
        wait_until(lambda: server.running == 1)
        engine.cancel("g1")
        engine.step()
        server.held = False
        collect(engine, 1)
    assert [request.prompt_ids for request in server.calls] == [(0, 1)]


def test_streamed_tokens_come_once_and_in_order_although_the_stream_broke() -> None:
    server = FakeServer("a")
    broken: set[str] = set()

    class Breaking(FakeServer):
        async def generate(self, request: GenerationRequest, on_token: Any = None) -> Completion:
            def some(event: TokenEvent) -> None:
                if event.index < 2 or request.id in broken:
                    on_token(event)

            completion = await super().generate(request, some)
            if request.id not in broken:
                broken.add(request.id)
                raise ServerUnreachableError(self.url, "broke off")
            return completion

    server = Breaking("a")
    wanted = requests(5, max_tokens=6, stream=True)
    with engine_over(server) as engine:
        done, tokens = serve(engine, wanted)
    assert len(server.calls) == 10
    for request in wanted:
        mine = [event for event in tokens if event.request_id == request.id]
        assert [event.index for event in mine] == list(range(6))
        assert tuple(event.token_id for event in mine) == done[request.id].token_ids
        assert tuple(event.logprob for event in mine) == done[request.id].logprobs


def test_a_stream_whose_server_is_lost_ends_with_what_was_seen() -> None:
    """Another server might give other tokens than those that were handed out."""
    server = FakeServer("a")

    class Stopping(FakeServer):
        async def generate(self, request: GenerationRequest, on_token: Any = None) -> Completion:
            if not request.stream:
                return await super().generate(request)
            self.calls.append(request)
            for index in range(2):
                on_token(TokenEvent(request.id, index, 7, -0.5, 0))
            self.restart()
            raise ServerUnreachableError(self.url, "broke off")

    server = Stopping("a")
    with engine_over(server) as engine:
        done, tokens = serve(engine, requests(1, max_tokens=6, stream=True))
    assert done["g0"].finish_reason == "cancelled"
    assert done["g0"].token_ids == (7, 7)
    assert len(tokens) == 2


def test_what_can_never_be_served_is_refused_at_once() -> None:
    servers = [FakeServer("a", max_length=20), FakeServer("b", max_length=30)]
    with engine_over(*servers) as engine:

        def submit(prompt: tuple[int, ...], **sampling: Any) -> None:
            params = SamplingParams(**{"max_tokens": 4} | sampling)
            engine.submit(GenerationRequest(id="x", prompt_ids=prompt, sampling=params))

        with pytest.raises(PromptTooLongError, match=r"17 prompt tokens \+ 4 new tokens > 20"):
            submit((1,) * 17)
        with pytest.raises(RequestError, match="empty prompt"):
            submit(())
        with pytest.raises(RequestError, match="vocabulary of 50"):
            submit((50,))
        with pytest.raises(RequestError, match="at least 1"):
            submit((1,), max_tokens=0)
        with pytest.raises(RequestError, match="out of range"):
            submit((1,), top_p=0.0)
        submit((1,))
        with pytest.raises(RequestError, match="already in the engine"):
            submit((1,))
        assert engine.in_progress == 1
    assert sum(len(server.calls) for server in servers) <= 1


def test_a_request_for_one_copy_is_answered_by_it_however_full_it_is() -> None:
    a, b = FakeServer("a", slots=2), FakeServer("b", slots=2)
    a.held = b.held = True
    with engine_over(a, b) as engine:
        assert engine.copies == 2
        for request in requests(8):
            engine.submit(request)
        wait_until(lambda: a.running == b.running == 2)
        for copy in (0, 1):
            engine.submit(msgspec.structs.replace(requests(1)[0], id=f"copy{copy}", prompt_ids=(45 + copy,), copy=copy))
        with pytest.raises(RequestError, match="2 servers"):
            engine.submit(msgspec.structs.replace(requests(1)[0], id="copy2", copy=2))
        a.held = False
        wait_until(lambda: len(a.calls) >= 7)
        assert a.calls[2].prompt_ids == (45,)  # before the others, which any server can answer
        b.held = False
        collect(engine, 10)
    assert [call.prompt_ids for call in b.calls if call.prompt_ids[0] >= 45] == [(46,)]
    assert all(call.copy is None for call in (*a.calls, *b.calls))


def test_decode_steps_are_those_since_the_engine_was_made() -> None:
    class Counting(FakeServer):
        steps = 1000

        async def info(self) -> Any:
            return msgspec.structs.replace(await super().info(), decode_steps=self.steps)

    server = Counting("a")
    with engine_over(server) as engine:
        assert engine.progress().decode_steps == 0
        server.steps = 1007
        wait_until(lambda: engine.progress().decode_steps == 7)
        server.restart()
        server.steps = 5
        wait_until(lambda: engine.progress().decode_steps == 12)


def test_closing_twice_is_fine_and_gives_up_what_is_in_progress() -> None:
    server = FakeServer("a")
    server.held = True
    with engine_over(server) as engine:
        engine.submit(requests(1)[0])
        wait_until(lambda: server.running == 1)
        engine.close()
        assert server.running == 0

"""The actor: tokens to rollouts, rollouts to groups, failures counted, admission, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
from collections import deque
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.actor import rollouts
from pipelinerl.actor.actor import Actor
from pipelinerl.actor.client import MOST_PASSES, Awake, EngineClient, RolloutClient, derive_seed
from pipelinerl.actor.evaluation import Evaluations
from pipelinerl.actor.failures import Failure, FailureLog
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import RolloutContext, attempt, check_rollout
from pipelinerl.config.schema import ActorConfig, EvaluationConfig
from pipelinerl.errors import PromptTooLongError, RequestError, RolloutError, TooManyFailuresError
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.hub import ROLLOUTS_FILE, Direct, DirectReader, Hub
from pipelinerl.hub.stream import FileStream
from pipelinerl.interfaces import Verdict, WeightUpdate
from pipelinerl.schedule import ConventionalSchedule, PipelineSchedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.status.watchdog import find_cycle
from pipelinerl.types import (
    GenerationRequest,
    Group,
    Problem,
    Rollout,
    SamplingParams,
    TrainerProgress,
    Turn,
    VersionSpan,
)
from tests.unit.record_parts import status
from tests.unit.scripted_engine import STOP, CharTokenizer, ScriptedEngine

TOKENIZER = CharTokenizer()
TIMEOUT_S = 5.0
SAMPLING = SamplingParams(max_tokens=20, stop_token_ids=(STOP,))


def say(text):
    return [*TOKENIZER.encode(text), STOP]


def request(name="r", prompt="p"):
    return GenerationRequest(id=name, prompt_ids=tuple(TOKENIZER.encode(prompt)), sampling=SAMPLING)


def rollout_client(engine_client, name="g0.a0", seed=1):
    return RolloutClient(engine_client, TOKENIZER, SAMPLING, name=name, seed=seed)


async def drive(client, *coroutines):
    """Await coroutines while somebody steps the engine."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if not await client.advance():
            await asyncio.sleep(0.001)
    return await asyncio.gather(*tasks, return_exceptions=True)


class Task:
    """An environment made of functions; `play` is the rollout. By default: one turn, reward 1."""

    def __init__(self, play=None, problem=None):
        self._play = play or single_turn
        self._problem = problem or (lambda index: Problem(id=f"p{index}", payload={"n": index}))

    def problem(self, index):
        return self._problem(index)

    def held_out(self, count):
        return [Problem(id=f"h{n}", payload={"n": n}) for n in range(min(count, 6))]

    async def rollout(self, problem, client):
        return await self._play(problem, client)


async def single_turn(problem, client):
    prompt = tuple(TOKENIZER.encode(problem.id))
    completion = await client.generate(prompt)
    return Rollout(turns=(Turn(prompt_ids=prompt, completion=completion, text="t"),), reward=1)


# ------------------------------------------------------------------------------------------------- the client


async def test_completions_go_to_those_who_asked_and_a_request_that_can_not_be_served_fails_alone():
    engine = ScriptedEngine(lambda r: say("to " + chr(r.prompt_ids[0])), slots=2, max_length=25)
    client = EngineClient(engine)
    asked = [*(client.generate(request(name, name)) for name in "abcd"), client.generate(request("e", "p" * 10))]
    *results, too_long, twice = await drive(client, *asked, client.generate(request("a")))
    assert [TOKENIZER.decode(c.token_ids) for c in results] == [f"to {name}\0" for name in "abcd"]
    assert [c.request_id for c in results] == list("abcd")
    assert max(engine.batch_sizes) == 2
    assert not client._open
    assert isinstance(too_long, PromptTooLongError)
    assert isinstance(twice, RequestError)


@pytest.mark.parametrize(("leave_at", "text", "reason"), [(None, "a long answer\0", "stop"), (2, "a l", "cancelled")])
async def test_a_stream_is_recorded_as_far_as_it_was_read(leave_at, text, reason):
    engine = ScriptedEngine(lambda r: say("a long answer"))
    client = EngineClient(engine)
    view, events = rollout_client(client), []

    async def consume():
        async for event in view.stream([5]):
            events.append(event)
            if event.index == leave_at:
                break

    await drive(client, consume())
    await asyncio.sleep(0.01)
    await client.advance()
    assert engine.cancelled == ["g0.a0.t0"] * (reason == "cancelled")
    (completion,) = view.completions
    assert tuple(event.token_id for event in events) == completion.token_ids == tuple(TOKENIZER.encode(text))
    assert [event.index for event in events] == list(range(len(text)))
    assert completion.finish_reason == reason
    assert completion.weight_versions == (VersionSpan(0, 0, len(text)),)
    turn = Turn(prompt_ids=(5,), completion=completion)
    assert check_rollout(Rollout(turns=(turn,), reward=0), view.produced()).turns == (turn,)


async def test_request_ids_seeds_and_limits():
    engine = ScriptedEngine(lambda r: say("x"))
    client = EngineClient(engine)
    first, second = rollout_client(client, "g1.a0", seed=derive_seed(7, 1, 0)), rollout_client(client, "g1.a1", seed=3)
    await drive(client, first.generate([1]), first.generate([1], max_tokens=5), second.generate([1], max_tokens=50))
    assert [r.id for r in engine.requests] == ["g1.a0.t0", "g1.a0.t1", "g1.a1.t0"]
    assert [r.sampling.max_tokens for r in engine.requests] == [20, 5, 20]
    seeds = [r.sampling.seed for r in engine.requests]
    assert seeds[:2] == [derive_seed(derive_seed(7, 1, 0), 0), derive_seed(derive_seed(7, 1, 0), 1)]
    assert len(set(seeds)) == 3
    assert derive_seed(0, 1, 2) == 603432347784401458, "on every machine"
    first.close()
    with pytest.raises(RolloutError, match=r"g1\.a0 is over"):
        await first.generate([1])


async def test_rollouts_that_got_tokens_run_until_they_ask_for_more_or_end():
    awake, engine = Awake(), EngineClient(ScriptedEngine(lambda r: say("")))

    async def code(client, passes):
        for _ in range(2):
            await client.generate([1])
            for _ in range(passes):
                await asyncio.sleep(0)
        client.close()

    def start(passes):
        client = RolloutClient(engine, TOKENIZER, SAMPLING, name=f"r{passes}", seed=1, awake=awake)
        return asyncio.create_task(code(client, passes))

    async def advance():
        await awake.settle()
        in_progress = len(engine._open)
        await engine.advance()
        await awake.settle()
        return in_progress

    fast = [start(0), start(MOST_PASSES - 2)]
    assert [await advance(), await advance()] == [2, 2], "each asks again before the next step"
    assert all(task.done() for task in fast)
    slow = start(3 * MOST_PASSES)
    assert [await advance(), await advance()] == [1, 0], "the engine does not wait for it"
    while not slow.done():
        await awake.settle()
        await engine.advance()
        await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------- one attempt


def play(play_function, *, timeout_s=TIMEOUT_S):
    """The outcome of one attempt at a problem."""

    async def main():
        client = EngineClient(ScriptedEngine(lambda r: say("hello"), max_length=60))
        problem = Problem(id="p", payload={})
        (outcome,) = await drive(client, attempt(Task(play_function), problem, rollout_client(client), timeout_s))
        for _ in range(4):
            await asyncio.sleep(0)
        assert not client._open
        return outcome

    return asyncio.run(main())


async def hang_and_refuse_to_be_cancelled(problem, client):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


async def hang_in_a_request(problem, client):
    await asyncio.gather(client.generate([1]), asyncio.sleep(60))


def test_code_that_refuses_to_be_cancelled_does_not_keep_a_loop_from_its_end():
    """The end of the loop cancels what waits for the code a second time."""

    async def main():
        playing = asyncio.create_task(rollouts.guarded(lambda: hang_and_refuse_to_be_cancelled(None, None), 60.0, "it"))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 5.0))


@pytest.mark.parametrize("code", [hang_and_refuse_to_be_cancelled, hang_in_a_request])
def test_a_rollout_that_hangs_times_out(code, monkeypatch):
    monkeypatch.setattr(rollouts, "GRACE_S", 0.02)
    outcome = play(code, timeout_s=0.05)
    assert outcome.reason == "timeout"
    assert "0.05 s" in outcome.message
    assert ("test_actor.py" in outcome.traceback) == (code is not hang_and_refuse_to_be_cancelled)


def test_what_code_raises_is_reported_with_its_traceback():
    async def code(problem, client):
        await client.generate([1])
        return {}["reward"]

    outcome = play(code)
    assert (outcome.reason, outcome.message) == ("raised", "KeyError: 'reward'")
    lines = outcome.traceback.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "KeyError: 'reward'"
    log = FailureLog(0.5, 1)
    log.failure(outcome, "g0.a0")
    with pytest.raises(TooManyFailuresError) as caught:
        log.check()
    message, *shown = str(caught.value).splitlines()
    assert message.endswith("KeyError: 'reward'")
    assert 'return {}["reward"]' in str(caught.value)
    frames = [line for line in shown if line.startswith("  File")]
    assert ["test_actor.py" in frame for frame in frames] == [True, True], "none of this package"


async def exits(problem, client):
    raise SystemExit(1)


async def awaits_something_cancelled(problem, client):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def prompts_too_long(problem, client):
    await client.generate([1] * 100)


async def returns_none(problem, client):
    return None


def changed(*, turn=None, completion=None, **rollout):
    """A rollout with other values of these fields, of its turn's and of its completion's."""

    async def code(problem, client):
        made = await single_turn(problem, client)
        done = msgspec.structs.replace(made.turns[0].completion, **(completion or {}))
        one = msgspec.structs.replace(made.turns[0], **{"completion": done, **(turn or {})})
        return msgspec.structs.replace(made, **{"turns": (one,), **rollout})

    return code


async def repeats_a_turn(problem, client):
    rollout = await single_turn(problem, client)
    return Rollout(turns=rollout.turns * 2, reward=1)


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (exits, "raised", "SystemExit: 1"),
        (lambda problem, client: exits, "raised", "TypeError"),
        (awaits_something_cancelled, "raised", "awaited something that was cancelled"),
        (prompts_too_long, "prompt_too_long", "100"),
        (returns_none, "bad_rollout", "returned None, not a Rollout"),
        (changed(turns=()), "bad_rollout", "no turns"),
        (changed(turns=("x",)), "bad_rollout", "not a Turn"),
        (changed(reward=math.nan), "bad_rollout", "the reward is nan"),
        (changed(reward=None), "bad_rollout", "the reward is None"),
        (changed(metrics={"m": math.nan}), "bad_rollout", "metric 'm' is nan"),
        (changed(completion={"token_ids": (1, 2)}), "bad_rollout", "`token_ids` of g0.a0.t0"),
        (changed(completion={"weight_versions": ()}), "bad_rollout", "`weight_versions` of g0.a0.t0"),
        (changed(completion={"request_id": "g0.a1.t0"}), "bad_rollout", "no completion 'g0.a1.t0'"),
        (changed(turn={"prompt_ids": (1, 2, 3)}), "bad_rollout", "`prompt_ids` are not the ids"),
        (changed(turn={"text": None}), "bad_rollout", "`text` is None"),
        (repeats_a_turn, "bad_rollout", "repeats request g0.a0.t0"),
    ],
)
def test_other_ways_to_fail(code, reason, message):
    outcome = play(code)
    assert outcome.reason == reason
    assert message in outcome.message


def test_a_good_rollout_has_floats_and_text_that_json_can_hold():
    outcome = play(changed(reward=True, metrics={"m": 2}, turn={"text": "a\udc80b"}))
    assert (outcome.reward, outcome.metrics) == (1.0, {"m": 2.0})
    assert type(outcome.reward) is float
    assert outcome.turns[0].completion.token_ids == tuple(say("hello"))
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Rollout).turns[0].text == "a?b"


# -------------------------------------------------------------------------------------------------- failures


def test_too_many_failures_of_a_full_window_or_of_the_first_attempts_end_the_run():
    log, early, patient = FailureLog(0.5, 4), FailureLog(0.9, 1000), FailureLog(1.0, 1000)
    broken = Failure("raised", "ValueError: x", "Traceback")
    log.success()
    for _ in range(2):
        log.failure(broken, "g0.a0")
        log.check()  # the window isn't full, then two of four failed
    log.success()
    log.check()
    log.failure(broken, "g0.a1")
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 4 .* 3 of them by `raised`: ValueError: x$"):
        log.check()
    assert log.counts == {"raised": 3}
    for number in range(16):
        early.check()
        early.failure(Failure("timeout", "slow"), f"g0.a{number}")
        patient.failure(Failure("timeout", "slow"), f"g0.a{number}")
    with pytest.raises(TooManyFailuresError, match="timeout"):
        early.check()
    patient.check()


@pytest.mark.parametrize("shown", [3, 0])
def test_only_the_first_failures_of_a_kind_are_shown(caplog, shown):
    log = FailureLog(1.0, 100, shown=shown)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            log.failure(Failure("raised", "ValueError: x", "TRACE"), f"g{number}.a0")
    assert (caplog.text.count("TRACE"), log.counts) == (shown, {"raised": 10})


# ------------------------------------------------------------------------------------------------- the actor


class Receiver:
    """`updates` are on offer; `receipts` those that were acknowledged."""

    def __init__(self):
        self.updates, self.receipts = deque(), []

    def offered(self):
        return self.updates[0].version if self.updates else None

    def poll(self):
        return self.updates.popleft() if self.updates else None

    def acknowledge(self, receipt):
        self.receipts.append(receipt)


class Limited:
    """A schedule under which only so many groups are ever started."""

    def __init__(self, schedule, groups, size):
        self.schedule, self.left, self.size = schedule, groups, size
        self.may_take_weights = schedule.may_take_weights
        self.in_rounds = schedule.in_rounds

    def may_start(self, state, rollouts):
        verdict = self.schedule.may_start(state, rollouts)
        if self.left is None or not verdict.allowed:
            return verdict
        self.left -= 1
        return Verdict(self.left >= 0, "nothing any more: all groups have been started")


class Harness:
    """An actor with everything around it in memory; the tests play the trainer."""

    def __init__(
        self,
        environment=None,
        *,
        script=lambda r: say("hello"),
        slots=4,
        k=2,
        schedule=None,
        capacity=100,
        groups=None,
        version=0,
        evaluation=None,
        until=100,
        reached=0,
        **config,
    ):
        """`groups`: how many there are; after these, admission says no. `until`, `reached`: of `Evaluations`."""
        self.engine = ScriptedEngine(script, slots=slots, version=version)
        self.receiver = Receiver()
        self.stream = FileStream()
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        self.recorded = root / ROLLOUTS_FILE
        self.recorded.parent.mkdir()
        self.state = AdmissionState(Limited(schedule or PipelineSchedule(batch_size=4), groups, k))
        self.hub = Hub(self.state, self.stream, root, MemoryBoard(), capacity=capacity, drops=False)
        self.reader = DirectReader(self.hub, lambda group: group)
        self.board, admission = self.hub.board, Direct(self.hub)
        admission.open()
        config = ActorConfig(**{"group_size": k, "max_tokens": 20, **config})
        context = RolloutContext(
            config, environment or Task(), EngineClient(self.engine), TOKENIZER, seed=5, slots=slots, stop_token_ids=[STOP]
        )
        self.groups = GroupRunner(context, config)
        self.evaluated = []
        self.evaluations = Evaluations(
            context,
            evaluation or EvaluationConfig(),
            on_done=lambda *ended: self.evaluated.append(ended),
            until=until,
            reached=reached,
        )
        self.actor = Actor(
            groups=self.groups,
            evaluations=self.evaluations,
            board=self.board,
            admission=admission,
            receiver=self.receiver,
            clock=partial(next, count(0, 0.001)),
        )
        self.actor.idle_s = 0.0

    def progress(self, stage="actor"):
        return self.board.read(stage).progress

    def train(self, **counts):
        self.board.publish(status("trainer", progress=TrainerProgress(**counts)))

    async def iterate(self, times):
        for _ in range(times):
            await self.actor.iterate()
            progress = self.groups.progress()
            dropped = sum(progress.rollouts_dropped.values())
            assert progress.rollouts_started == progress.rollouts_handed_over + dropped + progress.rollouts_in_progress

    def read(self):
        return [group for _, group in self.reader.read(1000)]


def run(harness, times):
    asyncio.run(harness.iterate(times))
    return harness


def test_groups_of_k_attempts_come_out_whole_and_are_recorded_before_they_are_in_the_stream():
    """A launcher that is killed leaves no group in the stream without a record."""
    harness = Harness(k=3, groups=3)
    append, recorded_first = harness.stream.append, []

    def watched(item, *arguments):
        recorded_first.append(harness.recorded.read_bytes().endswith(item + b"\n"))
        return append(item, *arguments)

    harness.stream.append = watched
    run(harness, 40)
    groups = harness.read()
    assert recorded_first == [True] * 3
    assert [msgspec.json.decode(line, type=Group) for line in harness.recorded.read_bytes().splitlines()] == groups
    assert [group.problem for group in groups] == [Problem(id=f"p{n}", payload={"n": n}) for n in range(3)]
    assert [(group.index, group.started, group.dropped) for group in groups] == [(n, 3, {}) for n in range(3)]
    for group in groups:
        named = [(rollout.id, rollout.attempt) for rollout in group.rollouts]
        assert named == [(f"g{group.index}.a{n}", n) for n in range(3)]
    assert [r.id for r in harness.engine.requests[:3]] == ["g0.a0.t0", "g0.a1.t0", "g0.a2.t0"]
    assert len({r.sampling.seed for r in harness.engine.requests}) == 9
    assert all(r.sampling.stop_token_ids == (STOP,) for r in harness.engine.requests)
    assert "all groups have been started" in harness.board.read("actor").detail


def test_the_engine_is_kept_full():
    """The slot of a sequence that ended is taken in the very next step, whatever the lengths."""
    harness = Harness(slots=4, k=2, script=lambda r: say("x" * (r.sampling.seed % 11)))
    run(harness, 60)
    assert harness.engine.batch_sizes == [4] * 60
    assert harness.engine.queued < 2


async def test_weights_arrive_in_flight_and_every_token_knows_its_version():
    harness = Harness(k=1, slots=1, groups=2, script=lambda r: say("abcdef"))
    await harness.iterate(3)
    harness.receiver.updates.append(WeightUpdate(4, "sum", {}))
    await harness.iterate(12)
    first, second = harness.read()
    assert first.rollouts[0].turns[0].completion.weight_versions == (VersionSpan(0, 0, 3), VersionSpan(4, 3, 7))
    assert (first.started_version, second.started_version) == (0, 4)
    (receipt,) = harness.receiver.receipts
    assert (receipt.version, receipt.checksum, receipt.sequences_in_flight) == (4, "sum", 1)


def test_a_full_stream_starts_no_more_and_takes_what_is_finished():
    harness = run(Harness(k=1, slots=2, capacity=3), 60)
    started = harness.progress().groups_started
    assert 3 <= started <= 3 + 2
    assert harness.stream.waiting == started, "what was in progress is handed over"
    assert f"the stream is full ({started} groups)" in harness.board.read("actor").detail
    assert harness.board.read("actor").waits_for == ("trainer",)
    run(harness, 20)
    assert harness.progress().groups_started == started
    first = harness.read()
    run(harness, 60)
    indices = [group.index for group in first + harness.read()]
    assert indices == list(range(len(indices))), "nothing lost, nothing twice"
    assert len(indices) > started


def some_fail(which):
    async def code(problem, client):
        rollout = await single_turn(problem, client)
        if which(client.name):
            raise ValueError("unlucky")
        return rollout

    return Task(code)


def bad_problem(index):
    if index == 1:
        raise LookupError("no such problem")
    return {2: "a string", 3: Problem(id="p3", payload={"not": object()})}.get(index, Problem(id=f"p{index}", payload={}))


def test_failed_attempts_cost_themselves_alone_and_problems_that_can_not_be_made_their_groups():
    harness = run(Harness(some_fail(lambda name: name.endswith("a1")), k=3, groups=4), 60)
    groups = harness.read()
    assert [[rollout.attempt for rollout in group.rollouts] for group in groups] == [[0, 2]] * 4
    assert [(group.dropped, group.started) for group in groups] == [({"raised": 1}, 3)] * 4
    assert harness.progress().rollouts_dropped == {"raised": 4}
    assert harness.progress().rollouts_handed_over == 8
    harness = run(Harness(Task(problem=bad_problem), groups=5), 40)
    by_index = {group.index: group.dropped for group in harness.read()}
    assert by_index == {0: {}, 1: {"raised": 2}, 2: {"raised": 2}, 3: {"raised": 2}, 4: {}}


async def test_what_was_sampled_for_a_dropped_rollout_is_counted_with_the_reason():
    """Completions that had ended, and the one that the deadline interrupts."""

    async def play(problem, client):
        first = await client.generate([1])
        if client.name.endswith("a1"):
            raise ValueError("unlucky")
        return Rollout(turns=(Turn(prompt_ids=(1,), completion=first),), reward=1)

    harness = Harness(Task(play), script=lambda r: say("four"), groups=3)
    await harness.iterate(40)
    assert harness.groups.progress().dropped_tokens == {"raised": 3 * 5}

    harness = Harness(script=lambda r: say("x" * 900), groups=1, max_tokens=900, rollout_timeout_s=0.1)
    while sum(harness.groups.progress().rollouts_dropped.values()) < 2:
        await harness.iterate(1)  # a token each
        await asyncio.sleep(0.001)
    await harness.iterate(3)  # what was sampled comes when the engine has cancelled it
    assert harness.groups.progress().rollouts_dropped == {"timeout": 2}
    sampled = harness.groups.progress().dropped_tokens["timeout"]
    assert 0 < sampled <= sum(harness.engine.batch_sizes)


async def test_lengths_by_order_of_start_wait_for_the_oldest_group():
    """In order of completion the short groups come first; here they count once no older group is open."""
    lengths = {0: 15, 1: 3, 2: 4, 3: 5}

    async def play(problem, client):
        completion = await client.generate([problem.payload["n"]])
        return Rollout(turns=(Turn(prompt_ids=(problem.payload["n"],), completion=completion),), reward=1)

    harness = Harness(Task(play), script=lambda r: say("x" * (lengths[r.prompt_ids[0]] - 1)), slots=8, groups=4)

    await harness.iterate(8)
    assert {group.index for group in harness.read()} == {1, 2, 3}
    assert harness.groups.progress().started_length_mean is None
    await harness.iterate(20)
    progress = harness.groups.progress()
    assert (progress.started_length_mean, progress.started_lengths) == ((15 + 3 + 4 + 5) / 4, 8)


class Ranked(Task):
    """The rollouts of a group get their rank as a reward. Groups 1 and 2 can't be scored, and group 3 takes its time."""

    def __init__(self):
        super().__init__(some_fail(lambda name: name == "g0.a1").rollout)
        self.free = asyncio.Event()

    async def score_group(self, problem, rollouts):
        if problem.id == "p1":
            raise ValueError("no verdict")
        if problem.id == "p2":
            return rollouts[:1]
        if problem.id == "p3":
            await self.free.wait()
        return [
            msgspec.structs.replace(rollout, reward=float(rank), metrics={"rank": float(rank)}, id="x")
            for rank, rollout in enumerate(rollouts)
        ]


async def test_an_environment_may_score_the_rollouts_of_a_group_together():
    environment = Ranked()
    harness = Harness(environment, k=3, slots=16, groups=5, max_failure_fraction=1.0)
    await harness.iterate(40)
    by_index = {group.index: group for group in harness.read()}
    assert sorted(by_index) == [0, 1, 2, 4]  # only the group that waits for its verdict is held up
    assert [(rollout.id, rollout.reward, rollout.metrics) for rollout in by_index[0].rollouts] == [
        ("g0.a0", 0.0, {"rank": 0.0}),
        ("g0.a2", 1.0, {"rank": 1.0}),
    ]
    assert [by_index[index].dropped for index in (0, 1, 2)] == [{"raised": 1}, {"raised": 3}, {"bad_rollout": 3}]
    assert harness.groups.progress().rollouts_in_progress == 3
    environment.free.set()
    await harness.iterate(10)
    assert [(group.index, len(group.rollouts)) for group in harness.read()][-1] == (3, 3)
    assert harness.groups.progress().rollouts_dropped == {"raised": 4, "bad_rollout": 3}
    assert harness.groups.progress().dropped_tokens == {"raised": 4 * 6, "bad_rollout": 3 * 6}


@pytest.mark.parametrize(
    ("schedule", "limit", "most"),
    [(PipelineSchedule(8), None, 12), (PipelineSchedule(8), 30, 30), (ConventionalSchedule(16, 1), 5, 16)],
    ids=["four a slot", "as many as set", "a round"],
)
def test_an_environment_that_waits_for_something_else_leaves_its_slot_to_others(schedule, limit, most):
    async def slow(problem, client):
        rollout = await single_turn(problem, client)
        await asyncio.get_running_loop().create_future()
        return rollout

    harness = run(Harness(Task(slow), slots=3, k=1, schedule=schedule, max_open_rollouts=limit), 80)
    assert harness.progress().groups_started == most
    status = harness.board.read("actor")
    assert status.state == "waiting"
    assert f"{most} rollouts run environment code" in status.detail


def test_a_round_without_a_trainer_is_a_chain_of_waits():
    """The watchdog's graph, from the statuses of the real actor and engine."""
    harness = run(Harness(slots=4, k=2, schedule=ConventionalSchedule(4, 1)), 40)
    engine, actor = harness.board.read("engine"), harness.board.read("actor")
    assert (engine.state, engine.waits_for) == ("waiting", ("actor",))
    assert (actor.state, actor.waits_for) == ("waiting", ("trainer",))
    trainer = status("trainer", "waiting", waits_for=("actor",))
    assert sorted(find_cycle({"engine": engine, "actor": actor, "trainer": trainer})) == ["actor", "trainer"]


async def test_finish_cancels_and_keeps_the_count():
    harness = Harness(script=lambda r: say("x" * 19))
    await harness.iterate(5)
    await harness.actor.stop()
    progress = harness.progress()
    assert progress.rollouts_in_progress == progress.rollouts_started == 4
    assert progress.rollouts_dropped == {}
    assert harness.engine.in_progress == harness.engine.queued == 0
    assert harness.board.read("actor").state == harness.board.read("engine").state == "done"


def test_errors_of_our_own_are_not_blamed_on_the_environment(monkeypatch):
    def broken(*arguments):
        raise AssertionError("a bug")

    monkeypatch.setattr("pipelinerl.actor.groups.attempt", broken)
    with pytest.raises(AssertionError, match="a bug"):
        run(Harness(), 5)


# ---------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("second_prompt", "completion"),
    [("h0hello\0tool: 7;", "hello\0tool: 7;hello\0"), ("shortened;", "hello\0\nhello\0"), ("h0", "hello\0\nhello\0")],
)
def test_the_answer_to_a_held_out_problem_has_what_the_environment_added(second_prompt, completion):
    async def two_turns(problem, client):
        turns = [
            Turn(prompt_ids=prompt_ids, completion=await client.generate(prompt_ids))
            for prompt_ids in (tuple(b"h0"), tuple(second_prompt.encode()))
        ]
        return Rollout(turns=tuple(turns), reward=1)

    harness = Harness(Task(two_turns), evaluation=EvaluationConfig(problems=1, temperature=0.0))
    asyncio.run(harness.actor.evaluate("before"))
    ((_, (record,)),) = harness.evaluated
    assert (record.prompt, record.completion, record.length) == ("h0", completion, 12)


def test_evaluation_answers_every_held_out_problem_once():
    async def code(problem, client):
        rollout = await single_turn(problem, client)
        if problem.payload["n"] == 4:
            raise ValueError("unlucky")
        return msgspec.structs.replace(rollout, reward=problem.payload["n"] % 2)

    def evaluated(version):
        config = EvaluationConfig(problems=10, temperature=0.0)
        harness = Harness(Task(code), version=version, evaluation=config)
        asyncio.run(harness.actor.evaluate("before"))
        ((result, answers),) = harness.evaluated
        assert (result.name, result.when, result.version) == ("before", "before", version)
        return harness, result, answers

    harness, result, answers = evaluated(version=3)
    assert [record.problem_id for record in answers] == [f"h{n}" for n in range(6)]
    assert [record.reward for record in answers] == [0, 1, 0, 1, 0, 1]
    assert (result.reward_mean, result.failed) == (0.5, {"raised": 1})
    first, failed = answers[0], answers[4]
    assert (first.prompt, first.completion, first.length) == ("h0", "hello\0", 6)
    assert first.weight_versions == (VersionSpan(3, 0, 6),)
    assert first.finish_reason == "stop"
    assert failed.failure == "raised: ValueError: unlucky"
    assert {r.sampling.temperature for r in harness.engine.requests} == {0.0}
    assert max(harness.engine.batch_sizes) == 4
    assert harness.progress().evaluations == {"before": 0.5}
    assert harness.progress().rollouts_started == 0
    other, *_ = evaluated(version=8)
    assert [r.sampling.seed for r in other.engine.requests] == [r.sampling.seed for r in harness.engine.requests]


@settings(max_examples=25)
@given(max_lag=st.integers(0, 3), batch_size=st.integers(1, 6), slots=st.integers(1, 8), salt=st.integers(0, 1000))
def test_the_lag_bound_holds_without_dropping_anything(max_lag, batch_size, slots, salt):
    """A trainer that trains as soon as it can, weights that arrive at once, very uneven lengths (groups of one)."""

    def length(request):
        draw = derive_seed(salt, request.sampling.seed)
        return draw % 19 if draw % 5 == 0 else draw % 3

    harness = Harness(
        k=1,
        slots=slots,
        schedule=PipelineSchedule(batch_size, max_lag),
        script=lambda r: say("x" * length(r)),
        capacity=1000,
    )
    lags, waiting, version = [], [], 0

    async def main():
        nonlocal version
        for _ in range(150):
            await harness.iterate(1)
            waiting.extend(harness.read())
            while len(waiting) >= batch_size:
                batch, waiting[:] = waiting[:batch_size], waiting[batch_size:]
                spans = [span for group in batch for span in group.rollouts[0].turns[0].completion.weight_versions]
                lags.extend(version - span.version for span in spans)
                version += 1
                harness.train(version=version, trained=version * batch_size)
                harness.receiver.updates.append(WeightUpdate(version, "", {}))

    asyncio.run(main())
    assert version > 3
    assert 0 <= min(lags) <= max(lags) <= max_lag

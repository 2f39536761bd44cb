"""Admission over several generation processes: exact counts, one decision at a time, whoever asks."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl import database
from pipelinerl.actor.admission import Admission, LocalAdmission
from pipelinerl.actor.outstanding import SCHEMA, Outstanding
from pipelinerl.config.load import load_config
from pipelinerl.database import Database
from pipelinerl.errors import RunDirectoryError, StalledError, StreamError
from pipelinerl.interfaces import Board, PipelineState, Schedule, Verdict
from pipelinerl.launch.run import make_record
from pipelinerl.ledger import GroupLedger
from pipelinerl.rounds import AsyncSchedule, ConventionalSchedule
from pipelinerl.schedule import PipelineSchedule, make_schedule
from pipelinerl.types import StageStatus, TrainerProgress
from tests.limits import small_files
from tests.unit.actor.admission_places import LocalPlace, Place, RedisPlace
from tests.unit.stream.streams import redis_for_tests

ROOT = Path(__file__).parents[3]
K = 4

# ---------------------------------------------------------------------------------------------- the record


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from(["start", "end", "settle"])), max_size=40))
def test_number_and_oldest_version_are_those_of_a_list(history: list[tuple[int, int, str]]) -> None:
    state = Outstanding()
    in_progress: list[int] = []
    handed_over = settled = 0
    for number, (version, count, what) in enumerate(history):
        if what == "start":
            state.start(number, version, K)
            in_progress.append(version)
        elif what == "end" and in_progress:
            started = in_progress.pop(count % len(in_progress))
            state.hand_over(started, started=K, rollouts=count)
            handed_over += count
        elif what == "settle":
            settled = min(settled + version, handed_over)
            state.settle(settled)
        assert state.handed_over == handed_over - settled
        assert state.rollouts == K * len(in_progress) + handed_over - settled
        assert state.oldest_in_progress == min(in_progress, default=None)
        assert state.in_progress_before(3) == K * sum(started < 3 for started in in_progress)


def test_what_the_stream_dropped_or_the_trainer_settled_is_not_waited_for() -> None:
    state = Outstanding(handed_over=12, settled=100)
    state.drop(6)
    assert state.rollouts == 6
    state.settle(104)
    assert state.rollouts == 2
    state.settle(100)
    assert state.rollouts == 2
    state.settle(200)
    assert state.rollouts == 0


# ------------------------------------------------------------------------------------------------ one process


def trainer(board: Board, version: int = 0, trained: int = 0, **counts: object) -> None:
    progress = msgspec.convert({"type": "trainer", "version": version, "trained": trained, **counts}, TrainerProgress)
    board.publish(StageStatus(stage="trainer", pid=1, state="working", detail="", since_s=0, written_s=0, progress=progress))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_for_tests(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


NAMES = itertools.count()


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where the record, the stream and the trainer's status are."""
    place: Place = LocalPlace(str(tmp_path))
    if request.param == "redis":
        place = RedisPlace(request.getfixturevalue("redis_url"), f"run-{next(NAMES)}-")
    place.make_record()
    with closing(place):
        yield place


def several(place: Place, schedule: Schedule, count: int, taken: GroupLedger | None = None) -> tuple[Board, list[Admission]]:
    workers = [place.admission(schedule, taken=taken, processes=count) for _ in range(count)]
    workers[0].open()
    return place.board, workers


def hand_over(place: Place, worker: Admission, version: int, rollouts: int = K) -> None:
    assert worker.hand_over(0, version, started=K, rollouts=rollouts, write=lambda: place.write(worker, version))


def test_indices_are_used_once_and_those_that_are_taken_never(place: Place) -> None:
    _, workers = several(place, PipelineSchedule(8), 2, GroupLedger([0, 1, 3]))
    assert [workers[turn % 2].claim(0, 0, K).group for turn in range(5)] == [2, 4, 5, 6, 7]


def test_nobody_starts_before_the_first_evaluation_is_over(place: Place) -> None:
    one, other = (place.admission(PipelineSchedule(8), processes=2) for _ in range(2))
    assert not other.opened
    assert other.claim(0, 0, K) == (None, Verdict(False, "the evaluation before training", ("actor",)))
    one.open()
    assert other.opened
    assert other.claim(0, 0, K).group == 0


def test_a_group_that_could_not_be_written_is_still_in_progress(place: Place) -> None:
    _, (worker,) = several(place, PipelineSchedule(8), 1)
    worker.claim(3, 0, K)
    place.fill()
    assert not worker.hand_over(0, 3, started=K, rollouts=K, write=lambda: place.write(worker, 3))
    place.empty()
    assert worker.read().in_progress == {3: K}
    hand_over(place, worker, 3, rollouts=2)
    assert (worker.read().in_progress, worker.read().handed_over) == ({}, 2)


def test_a_denial_is_asked_for_again_only_when_something_has_changed(place: Place) -> None:
    asked: list[PipelineState] = []

    class Counting(ConventionalSchedule):
        def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
            asked.append(state)
            return super().may_start(state, rollouts)

    board, (one, other) = several(place, Counting(2 * K, 1), 2)
    trainer(board)
    assert [one.claim(0, 0, K).group, other.claim(0, 0, K).group] == [0, 1]
    assert [one.claim(0, K, K).group for _ in range(5)] == [None] * 5
    assert len(asked) == 3
    hand_over(place, other, 0)  # another process changed the record
    assert one.claim(0, K, K).group is None
    trainer(board, 0, 0, micro_batches=1)  # the trainer published
    assert one.claim(0, K, K).group is None
    assert len(asked) == 5
    assert asked[-1].own == K
    assert asked[-1].processes == 2
    trainer(board, version=1, trained=2 * K)
    assert one.claim(1, K - 1, K).group == 2


def test_the_trainers_counts_never_go_back(place: Place) -> None:
    """A process that read the trainer's status long ago decides by the one of now, as whoever claimed before it."""
    board, (one, other) = several(place, ConventionalSchedule(K, 1), 2)
    trainer(board, version=0)
    assert one.claim(0, 0, K).group == 0
    assert other.claim(0, 0, K).group is None
    hand_over(place, one, 0)
    trainer(board, version=1, trained=K)
    assert other.claim(0, 0, K).group is None, "it has the weights of the round before"
    assert one.claim(1, 0, K).group == 1
    assert other.claim(1, 0, K).group is None


def test_the_end_of_the_run_is_the_end_of_admission(place: Place) -> None:
    board, (worker,) = several(place, PipelineSchedule(8), 1)
    trainer(board, goal_reached=True)
    assert "reached its goal" in worker.claim(0, 0, K).verdict.waiting_for


# -------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("schedule", [ConventionalSchedule(4 * K, 2), AsyncSchedule(4 * K, 1)], ids=lambda s: s.name)
def test_of_a_round_each_engine_gets_its_share(schedule: Schedule, place: Place) -> None:
    """Who is first does not take it all, but takes over from others as its own groups end."""
    _, (one, other) = several(place, schedule, 2)
    own = 0
    while one.claim(0, own, K).group is not None:
        own += K
    share = 4 * K if schedule.name == "conventional" else 2 * K
    assert own == share
    assert "the other engines" in one.claim(0, own, K).verdict.waiting_for
    hand_over(place, one, 0)
    assert one.claim(0, own - K, K).group is not None
    assert other.claim(0, 0, K).group is not None


@pytest.mark.parametrize("schedule", [ConventionalSchedule(2 * K, 1), AsyncSchedule(2 * K, 1)], ids=lambda s: s.name)
def test_weights_change_when_nothing_of_the_round_is_in_progress_anywhere(schedule: Schedule, place: Place) -> None:
    board, (one, other) = several(place, schedule, 2)
    trainer(board)
    one.claim(0, 0, K)
    other.claim(0, 0, K)
    hand_over(place, one, 0)
    assert one.may_take(1) == Verdict(False, f"the round's last {K} rollouts to finish")
    hand_over(place, other, 0)
    trainer(board, version=1, trained=2 * K)
    assert one.may_take(1).allowed
    assert one.claim(1, 0, K).group is not None
    assert other.claim(0, 0, K).group is None, "the round of its weights is closed"
    assert other.may_take(1).allowed, "what has begun with the new weights does not hold it back"


def test_the_lag_bound_counts_the_work_of_all(place: Place) -> None:
    """One engine has groups of version 0 open; the other would let them fall behind."""
    schedule = PipelineSchedule(batch_size=K, max_lag=1)
    board, (one, other) = several(place, schedule, 2)
    trainer(board)
    assert one.claim(0, 0, K).group == 0
    assert other.claim(0, 0, K).group == 1
    hand_over(place, other, 0)
    trainer(board, version=1, trained=K)
    assert other.may_take(1).allowed
    verdict = other.claim(1, 0, K).verdict
    assert not verdict.allowed
    assert "lag 2 > max_lag 1" in verdict.waiting_for
    hand_over(place, one, 0)
    assert other.claim(1, 0, K).group == 2, "what is in the stream can't be overtaken"


def test_a_session_begins_a_round_in_the_middle() -> None:
    """A run that is resumed under another schedule, G or B does not wait for weights that nobody will send."""
    resumed = PipelineState(
        engine_version=7, trainer_version=7, oldest_in_progress=7, outstanding=8, handed_over=8, newest_version=7
    )
    for schedule in (ConventionalSchedule(64, 4), AsyncSchedule(64, 4)):
        assert schedule.may_start(resumed, 8).allowed
        assert schedule.publishes(8)
        assert not schedule.may_train(7, 63).allowed
        assert schedule.may_train(7, 64).allowed


def test_the_stock_is_limited_unless_the_run_file_limits_the_stream() -> None:
    def limit(*flags: str) -> int | None:
        schedule = make_schedule(load_config(None, ["--trainer.batch_size", "64", "--actor.group_size", "8", *flags]))
        assert isinstance(schedule, PipelineSchedule)
        return schedule.stock

    assert limit() == 128
    assert limit("--stream.capacity", "50") is None
    assert limit("--stream.when_full", "drop_oldest") is None


def test_no_more_is_outstanding_than_the_trainer_can_use_by_the_time_a_group_is_done() -> None:
    schedule = PipelineSchedule(64, stock=128)
    state = PipelineState(engine_version=3, trainer_version=3, oldest_in_progress=3, outstanding=128, handed_over=64)
    early = state._replace(most_in_progress=64)
    assert schedule.may_start(early._replace(outstanding=128 + 95), 8).allowed, "no latency is known yet"
    assert not schedule.may_start(early._replace(outstanding=128 + 96), 8).allowed
    denied = schedule.may_start(state._replace(latency=0.0), 8)
    assert "128 rollouts are outstanding, and the limit is 128" in denied.waiting_for
    assert schedule.may_start(state._replace(outstanding=127, latency=0.0), 8).allowed
    assert schedule.may_start(state._replace(outstanding=128 + 191, latency=2.0), 8).allowed
    assert not schedule.may_start(state._replace(outstanding=128 + 192, latency=2.0), 8).allowed
    assert schedule.may_start(state._replace(outstanding=63, latency=0.0), 8).allowed


@given(
    batch_size=st.integers(1, 64),
    handed_over=st.integers(0, 200),
    in_progress=st.integers(0, 5000),
    latency=st.none() | st.floats(0, 20),
    most_in_progress=st.integers(0, 5000),
)
def test_the_stock_never_denies_while_less_than_a_batch_is_handed_over(
    batch_size: int, handed_over: int, in_progress: int, latency: float | None, most_in_progress: int
) -> None:
    """What is in progress for long would otherwise fill the limit alone, and the trainer would wait for it."""
    state = PipelineState(
        engine_version=3,
        trainer_version=5,
        oldest_in_progress=0,
        outstanding=handed_over + in_progress,
        handed_over=handed_over,
        latency=latency,
        most_in_progress=most_in_progress,
    )
    verdict = PipelineSchedule(batch_size, stock=2 * batch_size).may_start(state, 1)
    needed = most_in_progress if latency is None else batch_size * latency
    assert verdict.allowed == (handed_over < batch_size or state.outstanding < 2 * batch_size + 1.5 * needed)


def test_latency_is_a_running_mean_over_groups_that_were_started_after_the_first_update() -> None:
    state = Outstanding()
    for version, newest, expected in ((7, 9, None), (7, 9, None), (8, 10, 2.0), (10, 10, 1.8), (9, 11, 1.82), (7, 11, 1.82)):
        state.start(version, version, K)
        state.newest_version = newest
        state.hand_over(version, started=K, rollouts=K)
        assert state.latency == (expected and pytest.approx(expected))


# ---------------------------------------------------------------------------------------------- the lag bound


class RandomPipeline:
    """Engines start groups, end them (mostly the newest first) and take weights at random moments. The trainer takes B
    rollouts in stream order at random moments, and admission sees its counts late."""

    def __init__(self, schedule: PipelineSchedule, random: Random, *, engines: int, group_size: int) -> None:
        self.schedule, self.random, self.group_size = schedule, random, group_size
        self.state = Outstanding(opened=True)
        self.engines = [0] * engines
        self.in_progress: list[int] = []  # the version that each group was started with
        self.stream: list[int] = []  # the same of each rollout
        self.version = self.trained = 0
        self.seen = (0, 0)  # version and rollouts trained, as admission knows them
        self.lags: list[int] = []
        self.refused = 0

    def move(self) -> None:
        match self.random.choice(("start", "start", "end", "end", "weights", "step", "look")):
            case "start":
                self.start(self.random.randrange(len(self.engines)))
            case "end" if self.in_progress:
                newest = self.random.random() < 0.7
                at = len(self.in_progress) - 1 if newest else self.random.randrange(len(self.in_progress))
                started = self.in_progress.pop(at)
                self.state.hand_over(started, started=self.group_size, rollouts=self.group_size)
                self.stream += [started] * self.group_size
            case "weights":
                self.engines[self.random.randrange(len(self.engines))] = self.version
                self.state.newest_version = self.version
            case "step" if len(self.stream) >= self.schedule.batch_size:
                self.step()
            case "look":
                self.look()

    def start(self, engine: int) -> None:
        self.state.settle(self.seen[1])
        held, oldest = self.engines[engine], self.state.oldest_in_progress
        seen = PipelineState(
            engine_version=held,
            trainer_version=self.seen[0],
            oldest_in_progress=held if oldest is None else oldest,
            outstanding=self.state.rollouts,
            handed_over=self.state.handed_over,
            latency=self.state.latency,
            most_in_progress=self.state.most_in_progress,
        )
        if self.schedule.may_start(seen, self.group_size).allowed:
            self.state.start(self.state.next_index, held, self.group_size)
            self.in_progress.append(held)
        else:
            self.refused += 1

    def step(self) -> None:
        batch, self.stream = self.stream[: self.schedule.batch_size], self.stream[self.schedule.batch_size :]
        self.lags.append(self.version - min(batch))
        # The sender waits until all engines have taken the weights before.
        self.engines = [max(held, self.version) for held in self.engines]
        self.version += 1
        self.trained += self.schedule.batch_size

    def look(self) -> None:
        self.seen = (self.version, self.trained)


@pytest.mark.parametrize("max_lag", [1, 2, 3, 4, 5])
def test_no_batch_is_ever_beyond_the_bound(max_lag: int) -> None:
    """1000 random histories over all bounds; the trainer drops nothing here, so admission alone keeps the bound."""
    reached, refused = 0, 0
    for seed in range(200):
        random = Random(f"{max_lag}/{seed}")
        batch_size, group_size = random.choice([(4, 1), (4, 2), (4, 4), (8, 4), (6, 3)])
        stock = random.choice([None, 2 * batch_size])
        schedule = PipelineSchedule(batch_size, max_lag, stock=stock)
        pipeline = RandomPipeline(schedule, random, engines=random.randint(1, 3), group_size=group_size)
        for _ in range(600):
            pipeline.move()
        assert max(pipeline.lags, default=0) <= max_lag, f"seed {seed}: {pipeline.lags}"
        assert pipeline.version > 0
        reached += pipeline.lags.count(max_lag)
        refused += pipeline.refused
    assert reached > 100, "the bound is used to the full"
    assert refused > 1000


# ------------------------------------------------------------------------------------------ several processes

CLAIM = """
import sys, time
from pathlib import Path
from pipelinerl.rounds import AsyncSchedule, ConventionalSchedule
from pipelinerl.schedule import PipelineSchedule
from tests.unit.actor.admission_places import place_of
folder, schedule, me, address = Path(sys.argv[1]), eval(sys.argv[2]), sys.argv[3], sys.argv[4:]
place = place_of(*address)
admission = place.admission(schedule, processes=3)
version, group, answer = 0, None, folder / f"answer-{me}"
print("ready", flush=True)
while not (folder / "end").exists():
    offered = int((folder / "weights").read_text())
    if offered > version and admission.may_take(offered).allowed:
        version = offered
        answer.write_text(str(version))
    if group is not None:
        assert admission.hand_over(group, started, started=4, rollouts=4, write=lambda: place.write(admission, started))
        group = None
    else:
        group, _ = admission.claim(version, 0, 4)
        started = version
        if group is not None:
            print(group, version, flush=True)
        else:
            time.sleep(0.001)
"""


def read_number(path: Path) -> int:
    return int(path.read_text() or -1) if path.exists() else 0


def contend(
    place: Place, folder: Path, schedule: str, publishes: Callable[[int], bool], *, steps: int, batch: int
) -> tuple[Counter[int], list[int]]:
    """Three processes that claim and hand over as fast as they can, and a trainer that takes `batch` rollouts a step.

    Before it offers weights, all have answered for those before. Returns how many groups were started with each version,
    and the lag of each rollout trained on.
    """
    (folder / "weights").write_text("0")
    trainer(place.board)
    arguments = [sys.executable, "-c", CLAIM, str(folder), schedule]
    workers = [
        subprocess.Popen([*arguments, name, *place.address], stdout=subprocess.PIPE, text=True, cwd=ROOT) for name in "abc"
    ]
    lags: list[int] = []
    offered = 0
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        place.admission(PipelineSchedule(1)).open()
        for version in range(steps):
            while len(found := [started for started in place.written() for _ in range(K)]) < (version + 1) * batch:
                assert not any(worker.poll() for worker in workers)
            lags += [version - started for started in found[version * batch : (version + 1) * batch]]
            if publishes(version + 1):
                while any(read_number(folder / f"answer-{name}") < offered for name in "abc"):
                    assert not any(worker.poll() for worker in workers)
                offered = version + 1
                (folder / "new").write_text(str(offered))
                (folder / "new").rename(folder / "weights")
            trainer(place.board, version=version + 1, trained=(version + 1) * batch)
        trainer(place.board, version=steps, trained=steps * batch, goal_reached=True)
    finally:
        (folder / "end").touch()
        claims = [worker.communicate(timeout=60)[0].split() for worker in workers]
    indices = [int(word) for said in claims for word in said[::2]]
    assert sorted(indices) == list(range(len(indices))), "each index once, without gaps"
    assert sum(len(said) > 0 for said in claims) >= 2, "not everything came from one process"
    return Counter(int(word) for said in claims for word in said[1::2]), lags


def test_contention_conventional_starts_exactly_a_round(place: Place, tmp_path: Path) -> None:
    batch, rounds = 2 * K, lambda version: version % 3 == 0
    started, lags = contend(place, tmp_path, f"ConventionalSchedule({batch}, 3)", rounds, steps=30, batch=batch)
    assert [started[version] for version in range(0, 30, 3)] == [6] * 10
    assert lags == [version % 3 for version in range(30) for _ in range(batch)]


def test_contention_async_never_mixes_rounds(place: Place, tmp_path: Path) -> None:
    batch, rounds = 2 * K, lambda version: version % 3 == 0
    started, lags = contend(place, tmp_path, f"AsyncSchedule({batch}, 3)", rounds, steps=30, batch=batch)
    assert set(started) <= set(range(0, 31, 3))
    assert max(lags) <= 2 * 3 - 1


def test_contention_pipeline_keeps_the_lag_bound(place: Place, tmp_path: Path) -> None:
    started, lags = contend(place, tmp_path, f"PipelineSchedule({K}, 1)", lambda version: True, steps=60, batch=K)
    assert max(lags) <= 1
    assert len(started) > 20


# ------------------------------------------------------------------------------------------------- the lock


def test_a_lock_that_stays_held_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.02)
    make_record(tmp_path / "admission")
    worker = LocalAdmission(tmp_path / "admission", PipelineSchedule(8), LocalPlace(str(tmp_path)).board)
    worker.open()
    stopped = Database(tmp_path / "admission", SCHEMA)
    with stopped.transaction(), pytest.raises(StalledError, match="admission has been locked for"):
        worker.claim(0, 0, K)
    assert worker.claim(0, 0, K).group == 0


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    make_record(tmp_path / "admission")
    worker = LocalAdmission(tmp_path / "admission", PipelineSchedule(8), LocalPlace(str(tmp_path)).board)
    worker.open()
    with small_files(0), pytest.raises(RunDirectoryError, match=r"can't write .*admission: .*; make room .* and resume"):
        worker.claim(0, 0, K)
    assert worker.claim(0, 0, K).group == 0


# -------------------------------------------------------------------------------------------------------- Redis


@pytest.fixture
def in_redis(redis_url: str) -> Iterator[RedisPlace]:
    place = RedisPlace(redis_url, f"run-{next(NAMES)}-")
    place.make_record()
    with closing(place):
        yield place


def test_a_commit_whose_answer_was_lost_is_not_executed_twice(in_redis: RedisPlace) -> None:
    _, (one, other) = several(in_redis, PipelineSchedule(8), 2)
    execute = redis.Redis.evalsha
    lost: list[object] = []

    def lose_the_first(client: object, *arguments: object) -> object:
        answer = execute(client, *arguments)  # type: ignore[arg-type]
        if answer == 1 and not lost:
            lost.append(answer)
            raise redis.ConnectionError("the answer was lost")
        return answer

    with mock.patch("redis.Redis.evalsha", lose_the_first):
        assert one.claim(0, 0, K).group == 0
    assert lost
    assert other.claim(0, 0, K).group == 1
    assert one.read().in_progress == {0: 2 * K}


def test_a_hand_over_whose_answer_was_lost_is_not_executed_twice(in_redis: RedisPlace) -> None:
    _, (one, other) = several(in_redis, PipelineSchedule(8), 2)
    for worker in (one, other):
        worker.claim(0, 0, K)
    execute, moments = redis.client.Pipeline.execute, itertools.count()

    def lose_the_first_and_be_overtaken_in_the_second(pipe: Any, *arguments: Any) -> Any:
        moment = next(moments)
        if moment == 1:  # the first is the look at the stream
            other.open()  # writes the record between the look and the transaction
        answer = execute(pipe, *arguments)
        if moment == 3:
            raise redis.ConnectionError("the answer was lost")
        return answer

    with mock.patch("redis.client.Pipeline.execute", lose_the_first_and_be_overtaken_in_the_second):
        hand_over(in_redis, one, 0)
    assert next(moments) > 4, "refused, lost, and looked at again"
    assert one.read().in_progress == {0: K}
    assert one.read().handed_over == K
    assert in_redis.written() == [0]


def test_a_redis_without_its_data_is_noticed(in_redis: RedisPlace) -> None:
    _, (worker,) = several(in_redis, PipelineSchedule(8), 1)
    assert worker.claim(0, 0, K).group == 0
    in_redis.make_record()  # as after a restart with older data
    with pytest.raises(StreamError, match="not in Redis as this process left it"):
        worker.claim(0, 0, K)
    in_redis.forget()
    with pytest.raises(StreamError, match="not in Redis as this process left it"):
        in_redis.admission(PipelineSchedule(8))


def test_a_denial_is_repeated_for_a_moment_without_looking(in_redis: RedisPlace) -> None:
    worker = in_redis.admission(PipelineSchedule(8), repeat_s=3600)
    verdict = worker.claim(0, 0, K).verdict
    assert "evaluation" in verdict.waiting_for
    in_redis.admission(PipelineSchedule(8)).open()
    assert worker.claim(0, 0, K).verdict is verdict
    assert worker.claim(0, 1, K).group == 0, "it asks something else"

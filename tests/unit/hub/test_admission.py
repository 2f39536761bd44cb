"""Admission over several generation processes: exact counts, one decision at a time, for any process."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.load import load_config
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.interfaces import PipelineState, Verdict
from pipelinerl.schedule import AsyncSchedule, ConventionalSchedule, PipelineSchedule, Schedule, make_schedule
from pipelinerl.types import GroupLedger, TrainerProgress
from tests.unit.hub.hub_parts import K, make_state

# ---------------------------------------------------------------------------------------------- the counts


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from(["start", "end", "settle", "replace"])), max_size=40
    )
)
def test_number_and_oldest_version_are_those_of_a_list(history: list[tuple[int, int, str]]) -> None:
    state = make_state(PipelineSchedule(1_000_000))
    in_progress: list[tuple[int, int]] = []
    handed_over = settled = 0
    for version, count, what in history:
        if what == "start":
            index = claim(state, 0, version)
            assert index is not None
            in_progress.append((version, index))
        elif what == "end" and in_progress:
            state.hand_over(in_progress.pop(count % len(in_progress))[1], rollouts=count)
            handed_over += count
        elif what == "settle":
            settled = min(settled + version, handed_over)
            state.settle(settled)
            state.settle(0)  # an old count
        elif what == "replace" and handed_over > settled:
            handed_over -= 1
            state.replace(0, 1)
        assert state.handed_over == handed_over - settled
        assert state.outstanding == K * len(in_progress) + handed_over - settled
        assert min(state.in_progress, default=None) == min((started for started, _ in in_progress), default=None)
        assert state.in_progress_before(3) == K * sum(started < 3 for started, _ in in_progress)


# --------------------------------------------------------------------------------------------------- claims


def claim(state: AdmissionState, process: int = 0, version: int = 0) -> int | None:
    return state.claim(process, version, K).group


def test_indices_are_used_once_and_those_that_are_taken_never_until_the_trainer_has_reached_its_goal() -> None:
    state = make_state(processes=2, taken=GroupLedger(2, {3}))
    assert [claim(state, turn % 2) for turn in range(5)] == [2, 4, 5, 6, 7]
    state.trainer = TrainerProgress(goal_reached=True)
    assert "reached its goal" in state.claim(0, 0, K).verdict.waiting_for


# -------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("schedule", [ConventionalSchedule(4 * K, 2), AsyncSchedule(4 * K, 1)], ids=lambda s: s.name)
def test_of_a_round_each_engine_gets_its_share(schedule: Schedule) -> None:
    """Who is first does not take it all, but takes over from others as its own groups end."""
    state = make_state(schedule, processes=2)
    while claim(state) is not None:
        pass
    assert state.own(0) == (4 * K if schedule.name == "conventional" else 2 * K)
    assert "the other engines" in state.claim(0, 0, K).verdict.waiting_for
    state.hand_over(0, rollouts=K)
    assert claim(state, 0) is not None
    assert claim(state, 1) is not None


def test_a_round_is_replaced_as_far_as_it_was_dropped() -> None:
    state = make_state(ConventionalSchedule(2 * K, 1), processes=2)
    assert [claim(state, 0), claim(state, 1), claim(state, 0)] == [0, 1, None]
    state.hand_over(0, rollouts=K)
    state.hand_over(1, rollouts=1)
    assert [claim(state, 1), claim(state, 0)] == [2, None]
    state.lose(1)
    assert [claim(state, 1), claim(state, 0)] == [2, None], "the next process of a number begins with nothing"


@pytest.mark.parametrize("schedule", [ConventionalSchedule(2 * K, 1), AsyncSchedule(2 * K, 1)], ids=lambda s: s.name)
def test_weights_change_when_nothing_of_the_round_is_in_progress_anywhere(schedule: Schedule) -> None:
    state = make_state(schedule, processes=2)
    assert [claim(state, 0), claim(state, 1)] == [0, 1]
    state.hand_over(0, rollouts=K)
    assert state.may_take(1) == Verdict(False, f"the round's last {K} rollouts to finish")
    state.hand_over(1, rollouts=K)
    state.trainer = TrainerProgress(version=1, trained=2 * K)
    assert state.may_take(1).allowed
    assert claim(state, 0, 1) is not None
    assert claim(state, 1, 0) is None, "the round of its weights is closed"
    assert state.may_take(1).allowed, "what has begun with the new weights does not hold it back"


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


@pytest.mark.parametrize(("flag", "stock"), [("--seed=0", 128), ("--stream.capacity=50", None)])
def test_the_stock_is_limited_unless_the_run_file_limits_the_stream(flag: str, stock: int | None) -> None:
    schedule = make_schedule(load_config(None, ["--trainer.batch_size=64", "--actor.group_size=8", flag]))
    assert isinstance(schedule, PipelineSchedule)
    assert schedule.stock == stock


@pytest.mark.parametrize(
    ("handed_over", "in_progress", "latency", "allowed"),
    [(63, 5000, 1.0, True), (64, 159, 1.0, True), (64, 160, 1.0, False), (64, 213, None, True), (64, 214, None, False)],
)
def test_the_stock_never_denies_while_less_than_a_batch_is_handed_over(
    handed_over: int, in_progress: int, latency: float | None, allowed: bool
) -> None:
    """What is in progress for long would otherwise fill the limit alone, and the trainer would wait for it."""
    outstanding = in_progress + handed_over
    state = PipelineState(0, 0, 0, outstanding, handed_over, latency=latency, most_in_progress=100)
    assert PipelineSchedule(64, stock=128).may_start(state, 1).allowed == allowed


def test_latency_is_a_running_mean_over_groups_that_were_started_after_the_first_update() -> None:
    state = make_state(PipelineSchedule(1_000_000))
    for version, newest, expected in ((7, 9, None), (7, 9, None), (8, 10, 2.0), (10, 10, 1.8), (9, 11, 1.82), (7, 11, 1.82)):
        index = claim(state, 0, version)
        assert index is not None
        state.newest_version = newest
        state.hand_over(index, rollouts=K)
        assert state.latency == (expected and pytest.approx(expected))


# ---------------------------------------------------------------------------------------------- the lag bound


class RandomPipeline:
    """Engines are granted groups ahead, start them, end them (mostly the newest first) and take weights at random moments,
    and some die. The trainer takes B rollouts in stream order at random moments, and admission sees its counts late."""

    def __init__(self, schedule: PipelineSchedule, random: Random, *, engines: int, group_size: int) -> None:
        self.schedule, self.random, self.group_size = schedule, random, group_size
        self.state = make_state(schedule, engines)
        self.engines = [0] * engines
        self.granted: list[tuple[int, int]] = []  # engine and index of groups that have not begun
        self.in_progress: list[tuple[int, int, int]] = []  # engine, index, and the version that it was started with
        self.stream: list[int] = []  # the same version of each rollout
        self.version = self.trained = 0
        self.lags: list[int] = []
        self.refused = 0
        self.state.trainer = TrainerProgress()

    def move(self) -> None:
        engine = self.random.randrange(len(self.engines))
        match self.random.choice(("claim", "claim", "begin", "begin", "end", "end", "weights", "step", "look")):
            case "claim":
                index = self.state.claim(engine, self.engines[engine], self.group_size).group
                if index is None:
                    self.refused += 1
                else:
                    self.granted.append((engine, index))
            case "begin" if self.granted:
                engine, index = self.granted.pop(0)
                self.in_progress.append((engine, index, self.engines[engine]))
            case "end" if self.in_progress:
                newest = self.random.random() < 0.7
                at = len(self.in_progress) - 1 if newest else self.random.randrange(len(self.in_progress))
                _, index, started = self.in_progress.pop(at)
                self.state.hand_over(index, rollouts=self.group_size)
                self.stream += [started] * self.group_size
            case "weights":
                assert self.state.may_take(self.version).allowed
                self.take(engine)
                if self.random.random() < 0.03:
                    self.die(engine)
            case "step" if len(self.stream) >= self.schedule.batch_size:
                self.step()
            case "look":
                self.state.trainer = TrainerProgress(version=self.version, trained=self.trained)

    def take(self, engine: int) -> None:
        self.engines[engine] = self.version
        holding = [index for holder, index in self.granted if holder == engine]
        self.state.holds(engine, holding, self.version)

    def die(self, engine: int) -> None:
        self.state.lose(engine)
        self.granted = [one for one in self.granted if one[0] != engine]
        self.in_progress = [one for one in self.in_progress if one[0] != engine]

    def step(self) -> None:
        batch, self.stream = self.stream[: self.schedule.batch_size], self.stream[self.schedule.batch_size :]
        self.lags.append(self.version - min(batch))
        for engine in range(len(self.engines)):  # the sender waits until all engines have taken the weights before
            self.take(engine)
        self.version += 1
        self.trained += self.schedule.batch_size


@pytest.mark.parametrize("max_lag", [1, 5, *(pytest.param(lag, marks=pytest.mark.slow) for lag in (2, 3, 4))])
def test_no_batch_is_ever_beyond_the_bound(max_lag: int) -> None:
    """1000 random histories over all bounds; the trainer drops nothing here, so admission alone keeps the bound."""
    reached, refused = 0, 0
    for seed in range(200):
        random = Random(f"{max_lag}/{seed}")
        batch_size, group_size = random.choice([(4, 1), (4, 2), (4, 4), (8, 4), (6, 3)])
        stock = random.choice([None, 2 * batch_size])
        schedule = PipelineSchedule(batch_size, max_lag, stock=stock)
        pipeline = RandomPipeline(schedule, random, engines=random.randint(1, 3), group_size=group_size)
        for _ in range(700):
            pipeline.move()
        assert max(pipeline.lags, default=0) <= max_lag, f"seed {seed}: {pipeline.lags}"
        assert pipeline.version > 0
        reached += pipeline.lags.count(max_lag)
        refused += pipeline.refused
    assert reached > 100, "the bound is used to the full"
    assert refused > 1000

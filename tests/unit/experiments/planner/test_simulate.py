"""The discrete-event simulation: against one that goes token by token, against formulas, and against itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.experiments.planner import paper
from pipelinerl.experiments.planner.calibration import LengthDistribution, Utilisation
from pipelinerl.experiments.planner.scenario import Costs, DrawnWorkload, Scenario, first_fifth
from pipelinerl.experiments.planner.simulate import simulate
from pipelinerl.interfaces import Verdict
from pipelinerl.schedule import AsyncSchedule, ConventionalSchedule, PipelineSchedule
from tests.unit.experiments.planner.slow_simulation import SlowSimulation

TICK = 2.0**-10
"""All costs are whole multiples of this in the comparisons with the slow simulation, so that sums of times are exact and
events that coincide in the one coincide in the other."""


def ticks(**costs):
    return Costs(
        decode_step_s=tuple((7 + h) * TICK for h in range(65)), **{name: count * TICK for name, count in costs.items()}
    )


BUSY = ticks(rollout_s=2, update_pause_s=3, train_step_s=100, train_token_s=2, prepare_s=1)


def scenario(schedule, *, lengths=None, seed=0, longest=30, workload=None, **changes):
    values = {"engines": 2, "slots": 12, "group_size": 4, "batch_size": 16, "steps": 30, "costs": BUSY, "capacity": 8}
    values |= changes
    drawn = DrawnWorkload(lengths or paper.uniform(longest), values["group_size"], seed=seed, prompt_tokens=3)
    return Scenario(schedule=schedule, workload=workload or drawn, **values)


class AdmitsAll(PipelineSchedule):
    """Only dropping enforces the bound."""

    def may_start(self, state, rollouts):
        return Verdict(True)


class MixedWorkload(DrawnWorkload):
    """Every second attempt has no gradient. If `drops`, the preprocessor drops every third. Some wait for their rewards."""

    def __init__(self, lengths, group_size, *, seed, drops, most_wait):
        super().__init__(lengths, group_size, seed=seed, prompt_tokens=2.0)
        self.drops, self.most_wait = drops, most_wait

    def group(self, index):
        work = super().group(index)
        attempts = range(index, index + len(work.lengths))
        return work._replace(
            used=tuple(i % 2 == 0 for i in attempts),
            dropped=tuple(i % 3 == 0 for i in attempts) if self.drops else (),
            waits_s=tuple(67 * i % (self.most_wait + 1) * TICK for i in attempts),
        )


def assert_equal_to_the_slow_one(case):
    fast, slow = simulate(case), SlowSimulation(case).run()
    assert fast.step_end_s == slow.step_end_s
    assert fast.rollouts_dropped == slow.dropped
    assert fast.rollouts_started == slow.started
    assert dict(enumerate(fast.lag_tokens)) == {lag: slow.lags[lag] for lag in range(len(fast.lag_tokens))}
    tokens, lags = sum(slow.lags.values()), sum(lag * tokens for lag, tokens in slow.lags.items())
    assert (sum(fast.lag_tokens), (fast.lag_mean or 0.0) * tokens) == (tokens, pytest.approx(lags))
    # The slow one counts the steps that the end of the run cuts off.
    longest_s = max(case.costs.decode_step_s)
    assert fast.engine_busy_fraction * fast.engines * fast.time_s == pytest.approx(slow.busy_s, abs=case.engines * longest_s)
    dropped = sum(fast.rollouts_dropped.values())
    left = fast.rollouts_queued + fast.rollouts_in_progress
    assert fast.rollouts_started == fast.rollouts_trained + dropped + left, "every rollout is somewhere"
    assert fast.rollouts_trained == fast.steps * case.batch_size
    assert min(fast.rollouts_queued, fast.rollouts_in_progress) >= 0
    assert min(fast.engine_busy_fraction, fast.slots_used, fast.trainer_busy_fraction) > 0
    assert max(fast.engine_busy_fraction, fast.slots_used, fast.trainer_busy_fraction) <= 1
    return fast


def test_long_pauses_and_a_limit_of_the_stock():
    costs = ticks(rollout_s=1, update_pause_s=400, train_step_s=100, train_token_s=1)
    changes = {"engines": 5, "slots": 16, "batch_size": 32, "steps": 25, "costs": costs, "capacity": None}
    lengths = LengthDistribution({5: 3, 40: 2, 200: 1})
    assert_equal_to_the_slow_one(scenario(PipelineSchedule(32, stock=64), lengths=lengths, **changes))


@pytest.mark.slow
@settings(max_examples=100, derandomize=True)
@given(
    kind=st.sampled_from(("pipeline", "bounded", "stale", "conventional", "async")),
    K=st.sampled_from((1, 3, 4)),
    groups=st.integers(1, 4),
    G=st.integers(1, 3),
    room=st.integers(1, 3),
    seed=st.integers(0, 99),
    max_lag=st.integers(0, 3),
    engines=st.integers(1, 4),
    slots=st.sampled_from((1, 3, 8, 30)),
    longest=st.sampled_from((1, 5, 40)),
    train_step=st.sampled_from((1, 40, 700)),
    pause=st.sampled_from((0, 4)),
    when_full=st.sampled_from(("block", "drop_oldest")),
    drops=st.booleans(),
    most_wait=st.sampled_from((0, 0, 200, 8000)),
)
def test_any_scenario(
    *, kind, K, groups, G, room, seed, max_lag, engines, slots, longest, train_step, pause, when_full, drops, most_wait
):
    """Token by token, and within the schedule's bound on lag."""
    B, rounds = K * groups, kind in ("conventional", "async")
    schedules = {
        "pipeline": PipelineSchedule(B),
        "bounded": PipelineSchedule(B, max_lag, stock=2 * B if seed % 2 else None),
        "stale": AdmitsAll(B, max_lag),
        "conventional": ConventionalSchedule(B, G),
        "async": AsyncSchedule(B, G),
    }
    found = assert_equal_to_the_slow_one(
        scenario(
            schedules[kind],
            workload=MixedWorkload(paper.uniform(longest), K, seed=seed, drops=drops, most_wait=most_wait),
            engines=engines,
            slots=slots,
            group_size=K,
            batch_size=B,
            steps=8,
            capacity=room * groups * (G if rounds else 1),
            when_full="block" if rounds else when_full,
            costs=ticks(rollout_s=2, update_pause_s=pause, train_step_s=train_step, train_token_s=1),
        )
    )
    bounds = {"bounded": max_lag, "stale": max_lag, "conventional": G - 1, "async": 2 * G - 1}
    assert (found.lag_max or 0) <= bounds.get(kind, math.inf)
    assert kind != "bounded" or drops or "stale" not in found.rollouts_dropped, "the bound holds without dropping"


U = Utilisation({1: 1.0, 64: 1.5})


@pytest.mark.parametrize("tau", [0.0, 0.02])
def test_pipeline_is_as_fast_as_its_slower_side(tau):
    """Nothing but decode steps and training; `tau` is the trainer's time per sampled token."""
    lengths = paper.uniform(79)
    costs = Costs(decode_step_s=tuple(U.step_time(range(65)).tolist()), train_token_s=tau)
    changes = {"engines": 3, "slots": 64, "group_size": 1, "batch_size": 32, "steps": 200, "capacity": 1 << 20}
    workload = DrawnWorkload(lengths, 1, seed=3)
    predicted = simulate(scenario(PipelineSchedule(32), workload=workload, costs=costs, **changes))
    workload = paper.PaperWorkload(accelerators=4, batch_size=32, lengths=lengths, utilisation=U, tau=max(tau, 1e-9))
    expected = paper.pipeline(workload, slots=64, generating=3)
    assert predicted.trained_tokens_per_s_later == pytest.approx(expected.rate, rel=0.03)
    if expected.generation_rate < expected.training_rate:
        assert min(predicted.engine_busy_fraction, predicted.slots_used) > 0.999
        assert predicted.trainer_busy_fraction == pytest.approx(expected.rate * tau, rel=0.03)
        assert 0 <= predicted.lag_max - expected.max_lag <= 1, "a batch more while the last one is being made"
    else:
        assert predicted.trainer_busy_fraction > 0.97


def test_steady_rates_are_of_whole_rounds():
    assert first_fifth(100, PipelineSchedule(8)) == 20
    assert first_fifth(4, PipelineSchedule(8)) == 0
    assert first_fifth(100, ConventionalSchedule(8, 8)) == 16
    assert first_fifth(30, ConventionalSchedule(8, 8)) == 0


@pytest.mark.parametrize(("max_lag", "engines", "stock"), [(1, 3, None), (3, 1, 32), (5, 3, 32)])
def test_with_a_bound_and_instant_generation_a_slow_trainer_never_waits(max_lag, engines, stock):
    """A pipeline that ran in rounds would wait for each round."""
    instant = Costs(decode_step_s=(TICK,) * 65, train_step_s=1000 * TICK)
    schedule = PipelineSchedule(16, max_lag, stock=stock)
    predicted = simulate(scenario(schedule, longest=4, engines=engines, slots=64, costs=instant, capacity=64, steps=60))
    assert predicted.lag_max <= max_lag
    assert not predicted.rollouts_dropped
    assert not any(predicted.step_wait_s[max_lag + 1 :])


@pytest.mark.parametrize("lengths", [LengthDistribution({60: 1}), paper.uniform(119)])
def test_the_limit_of_the_stock_does_not_slow_a_pipeline_with_much_more_in_progress_than_a_batch(lengths):
    """8 batches are in progress and finish in bursts; both sides are equally fast."""
    costs = Costs(decode_step_s=tuple((64 + h) * TICK for h in range(129)), train_step_s=60 * 192 / 8 * TICK)
    settings = {"slots": 128, "engines": 1, "steps": 200, "capacity": 1000, "costs": costs}
    settings["workload"] = DrawnWorkload(lengths, 4, seed=1)
    free, limited = (simulate(scenario(PipelineSchedule(16, stock=stock), **settings)) for stock in (None, 32))
    assert limited.samples_per_s_later > 0.97 * free.samples_per_s_later
    assert limited.lag_mean < free.lag_mean


def test_long_answers_in_progress_do_not_starve_the_trainer():
    """Both sides are equally fast. The mean latency of the groups that are done is far below that of the long ones."""
    lengths = LengthDistribution({20: 0.9, 2000: 0.1})
    slots, batch, attempts, constant = 256, 64, 4, 256
    mean = lengths.mean
    costs = Costs(
        decode_step_s=tuple((constant + h) * TICK for h in range(slots + 1)),
        train_step_s=batch * mean * (constant + slots) / slots * TICK,
    )
    workload = DrawnWorkload(lengths, attempts, seed=1)
    settings = {"slots": slots, "engines": 1, "steps": 100, "costs": costs, "workload": workload, "capacity": 10_000}
    settings |= {"batch_size": batch, "group_size": attempts}
    limited = simulate(scenario(PipelineSchedule(batch, stock=2 * batch), **settings))
    assert limited.samples_per_s_later * costs.train_step_s / batch >= 0.8


def test_a_run_that_never_ends_is_an_error():
    class AllDropped(DrawnWorkload):
        def group(self, index):
            return super().group(index)._replace(dropped=(True,) * 4)

    with pytest.raises(ValueError, match=r"no optimizer step after version 0 .* dropped so far: {'preprocess'"):
        simulate(scenario(PipelineSchedule(16), workload=AllDropped(paper.uniform(3), 4, seed=1)))

    class Stubborn(ConventionalSchedule):
        def may_train(self, version, queued):
            return Verdict(False, "a better day")

    with pytest.raises(ValueError, match="deadlock at version 0"):
        simulate(scenario(Stubborn(16, 1)))


def test_drawn_work_does_not_depend_on_the_order_nor_its_lengths_on_waits():
    lengths = paper.uniform(50)
    one, two = (DrawnWorkload(lengths, 4, seed=5, used_share=0.5) for _ in range(2))
    indices = [3000, 0, 5, 1023, 1024, 5]
    assert [one.group(i) for i in indices] == [two.group(i) for i in reversed(indices)][::-1]
    assert DrawnWorkload(lengths, 4, seed=6).group(0).lengths != one.group(0).lengths
    used = [one.group(i).used for i in range(2000)]
    assert set(used) == {(True,) * 4, (False,) * 4}
    assert sum(all(group) for group in used) / 2000 == pytest.approx(0.5, abs=0.05)
    waiting = DrawnWorkload(lengths, 4, seed=5, wait_median_s=2.0, wait_most_s=10.0)
    assert [one.group(i).lengths for i in range(500)] == [waiting.group(i).lengths for i in range(500)]
    waits_s = sorted(wait_s for i in range(2000) for wait_s in waiting.group(i).waits_s)
    assert (waits_s[4000], waits_s[-1]) == (pytest.approx(2.0, rel=0.1), 10.0)

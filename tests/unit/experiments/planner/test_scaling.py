"""Costs on many accelerators against slow, literal versions, published sizes, real plans of steps, and the simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.experiments.planner.analytic import LengthDistribution
from pipelinerl.experiments.planner.hardware import (
    CLUSTERS,
    QWEN_1_5B,
    QWEN_7B,
    QWEN_32B,
    QWEN_235B,
    Link,
    ModelShape,
    broadcast_s,
    gather_s,
)
from pipelinerl.experiments.planner.scaling import (
    DEVICES,
    Question,
    Rollouts,
    Training,
    Updates,
    best_conventional,
    best_pipeline,
    bounds,
    conventional_at,
    decode_step_s,
    expected_maximum,
    improvements,
    least_ranks,
    most_slots,
    pipeline_at,
    prefill_s,
    simulated_costs,
    step_cost,
    update_cost,
)
from pipelinerl.experiments.planner.simulation.run import simulate
from pipelinerl.experiments.planner.simulation.scenario import DrawnWorkload, Scenario, Stragglers
from pipelinerl.preprocess.packing import pack
from pipelinerl.rounds import ConventionalSchedule
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.trainer.sharding.plan import plan

H100 = CLUSTERS["h100"]
LENGTHS = LengthDistribution.of_histogram({200: 3, 900: 4, 2000: 2, 4000: 1})
ROLLOUTS = Rollouts(lengths=LENGTHS, batch_size=512, prompt_tokens=100)
EVEN = Training(straggler_cv=0.0)


def question(**changes: object) -> Question:
    values: dict[str, object] = {"shape": QWEN_7B, "cluster": H100, "rollouts": ROLLOUTS, "accelerators": 64, "max_lag": 31}
    return Question(**(values | changes))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize(
    ("shape", "billions", "active"),
    [(QWEN_1_5B, 1.54, 1.54), (QWEN_7B, 7.62, 7.62), (QWEN_32B, 32.8, 32.8), (QWEN_235B, 235.1, 22.2)],
)
def test_parameters_are_the_published_ones(shape: ModelShape, billions: float, active: float) -> None:
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.003)


def test_bytes_that_a_step_reads_against_drawn_experts() -> None:
    tiny = replace(QWEN_235B, layers=3, experts=16, experts_per_token=2)
    rng = random.Random(0)
    expert = 2 * tiny.mlp_parameters
    always = 2 * (tiny.parameters - tiny.vocabulary * tiny.hidden) - tiny.layers * tiny.experts * expert
    for h in (1, 3, 40):
        drawn = [
            sum(len({e for _ in range(h) for e in rng.sample(range(16), 2)}) for _ in range(tiny.layers))
            for _ in range(2000)
        ]
        assert float(tiny.bytes_read(h)) == pytest.approx(always + expert * np.mean(drawn), rel=0.01)
    assert float(QWEN_7B.bytes_read(5)) == 2 * (QWEN_7B.parameters - QWEN_7B.vocabulary * QWEN_7B.hidden)
    assert float(QWEN_1_5B.bytes_read(5)) == QWEN_1_5B.weight_bytes  # its embedding is the head


# ------------------------------------------------------------------------------------------------ links


@pytest.mark.parametrize("ranks", [2, 8, 24, 4096])
def test_a_gather_against_the_links_of_one_ring(ranks: int) -> None:
    cluster = replace(H100, inside=Link(100.0, 2.0, 1.0), between=Link(10.0, 5.0, 3.0), link_efficiency=0.5)
    size = 1e9
    links = [cluster.between if rank % 8 == 7 else cluster.inside for rank in range(ranks)]
    if ranks <= 8:
        links = [cluster.inside] * ranks
    rings = min(ranks, 8)
    # A ring has its own network card, and a share of the links inside; it sends one of n parts over each link n - 1 times.
    busiest_s = 0.0
    for link in set(links):
        bandwidth = link.bandwidth if link is cluster.between else link.bandwidth / rings
        busiest_s = max(busiest_s, sum(size / rings / ranks for _ in range(ranks - 1)) / (bandwidth * 0.5))
    hops_s = sum(link.latency_s for link in links[:-1])
    assert gather_s(cluster, size, ranks) == pytest.approx(busiest_s + hops_s)
    # Without bytes, the protocol for small messages is used.
    assert gather_s(cluster, 0.0, ranks) == pytest.approx(sum(link.small_latency_s for link in links[:-1]))


def test_a_broadcast_is_the_weights_over_one_card_and_a_hop_for_each_receiver() -> None:
    assert broadcast_s(H100, 80e9, 3) == pytest.approx(80e9 / (50e9 * 0.8) + 3 * 14e-6)
    assert broadcast_s(H100, 80e9, 3, senders=8) == pytest.approx(80e9 / (8 * 50e9 * 0.8) + 3 * 14e-6)


# ------------------------------------------------------------------------------------------------ decode steps


def test_a_decode_step_is_the_longer_of_reading_and_computing() -> None:
    accelerator = H100.accelerator
    for h in (1, 64, 4000):
        read = float(QWEN_7B.bytes_read(h)) + h * 500 * 2 * 2 * 28 * 4 * 128
        flops = h * (2 * QWEN_7B.parameters + 500 * 28 * 28 * 128 * 4)
        both = read / (3.35e12 * H100.bandwidth_efficiency), flops / (accelerator.peak_flops * H100.compute_efficiency)
        assert float(decode_step_s(QWEN_7B, H100, 1, 500, h)) == pytest.approx(max(both))
        spread = float(decode_step_s(QWEN_7B, H100, 4, 500, h))
        reduce_s = 2 * gather_s(H100, h * 3584 * 2, 4)
        assert spread == pytest.approx(max(both) / 4 + 28 * 2 * reduce_s, rel=0.1)  # linear in h between two sizes


def test_slots_are_what_memory_leaves() -> None:
    # 7.6B: two copies of the weights, one of them for updates. 235B: the second copy is on the host.
    kv = 57_344 * 1000
    assert most_slots(QWEN_7B, H100, 1, 1000) == int((0.9 * 80e9 - 4 * QWEN_7B.parameters) / kv)
    assert most_slots(QWEN_235B, H100, 4, 1000) == 0
    assert most_slots(QWEN_235B, H100, 8, 1000) == int((0.9 * 640e9 - 2 * QWEN_235B.parameters) / (192_512 * 1000))
    assert least_ranks(QWEN_235B, H100) == math.ceil(16 * QWEN_235B.parameters / 56e9)


# ------------------------------------------------------------------------------------------------ optimizer steps


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))])
def test_expected_maxima(count: int, expected: float) -> None:
    assert expected_maximum(count) == pytest.approx(expected, abs=1e-4)


def test_the_expected_maximum_of_many_against_draws() -> None:
    drawn = np.random.default_rng(0).standard_normal((4000, 500)).max(axis=1).mean()
    assert expected_maximum(500) == pytest.approx(drawn, abs=0.02)


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_means_of_a_step_against_all_batches(histogram: dict[int, int], batch: int) -> None:
    work = Rollouts(lengths=LengthDistribution.of_histogram(histogram), batch_size=batch, prompt_tokens=3)
    draws = [length for length, count in histogram.items() for _ in range(count)]
    batches = [[length] for length in draws]
    for _ in range(batch - 1):
        batches = [[*one, length] for one in batches for length in draws]
    assert work.longest_of_a_step == pytest.approx(3 + np.mean([max(one) for one in batches]))
    attended = [position + 0.5 for length in draws for position in range(3 + length)]
    assert work.attended_tokens == pytest.approx(np.mean(attended))
    assert work.context_tokens == pytest.approx(3 + np.mean([age for length in draws for age in range(length)]))


@pytest.mark.parametrize("ranks", [3, 16, 100, 400])
def test_the_tokens_of_the_slowest_rank_against_real_plans(ranks: int) -> None:
    work = replace(ROLLOUTS, lengths=LengthDistribution.uniform(3000))
    cost = step_cost(QWEN_7B, H100, work, EVEN, ranks)
    token_s = cost.compute_s * ranks / work.step_tokens
    measured = []
    for seed in range(5):
        lengths = (work.lengths.sample(np.random.default_rng(seed), work.batch_size) + 100).tolist()
        grid = plan(lengths, lengths, ranks, EVEN.micro_batch_tokens, pack)
        measured.append(sum(max(sum(lengths[i] for i in place) for place in row) for row in grid))
        assert len(grid) in (cost.rows, cost.rows + 1)
    assert (cost.compute_s + cost.idle_s) / token_s == pytest.approx(np.mean(measured), rel=0.05)


def test_communication_is_exposed_where_it_takes_longer_than_computing() -> None:
    work, ranks = ROLLOUTS, 128
    units = 28 + 3
    unit = QWEN_7B.parameters / units
    slow = replace(H100, between=replace(H100.between, bandwidth=1e9))
    for cluster in (H100, slow):
        cost = step_cost(QWEN_7B, cluster, work, EVEN, ranks)
        gathered_s, summed_s = (gather_s(cluster, size * unit, ranks) for size in (2, 4))
        row_s = cost.compute_s + cost.idle_s  # one row
        assert cost.rows == 1
        expected_s = max(0.0, units * (2 * gathered_s + summed_s) - row_s) + gathered_s + summed_s
        assert cost.exposed_s == pytest.approx(expected_s)
    kept = step_cost(QWEN_7B, slow, work, replace(EVEN, reshard_after_forward=False), ranks)
    assert kept.exposed_s < cost.exposed_s
    assert step_cost(QWEN_7B, H100, work, EVEN, 1).exposed_s == 0.0


def test_stragglers_slow_a_step_by_the_expected_maximum() -> None:
    even = step_cost(QWEN_7B, H100, ROLLOUTS, EVEN, 64)
    uneven = step_cost(QWEN_7B, H100, ROLLOUTS, Training(straggler_cv=0.05), 64)
    assert uneven.s - even.s == pytest.approx(0.05 * expected_maximum(64) * (even.compute_s + even.idle_s))
    factors = [Stragglers(cv=0.05, ranks=64).of_step(version) for version in range(3000)]
    assert np.mean(factors) == pytest.approx(1 + 0.05 * expected_maximum(64), rel=0.002)


# ------------------------------------------------------------------------------------------------ weight updates


def test_updates() -> None:
    size = 2.0 * QWEN_7B.parameters
    full = update_cost(QWEN_7B, H100, Updates(), ranks=64, engines=32, devices=2)
    assert full.bytes == size
    assert full.gather_s == pytest.approx(2 * size / 50e9 + gather_s(H100, size, 64))
    assert full.send_s == pytest.approx(broadcast_s(H100, size, 32))
    assert full.pause_s == pytest.approx(3 * size / 2 / (3.35e12 * H100.bandwidth_efficiency))
    # Of 1% changed words each has four bytes, and each hundredth update has all.
    delta = update_cost(QWEN_7B, H100, Updates(encoding="delta", changed=0.01), ranks=64, engines=32, devices=2)
    assert delta.bytes == pytest.approx(size * (0.02 * 0.99 + 0.01))
    assert delta.send_s < full.send_s / 5
    dense = update_cost(QWEN_7B, H100, Updates(encoding="delta", changed=0.8), ranks=64, engines=32, devices=2)
    assert dense.bytes == pytest.approx(size)
    parts = update_cost(QWEN_7B, H100, Updates(sharded=True), ranks=64, engines=32, devices=2)
    assert parts.gather_s == 0.0
    assert parts.send_s == pytest.approx(broadcast_s(H100, size, 32, senders=2))


# ------------------------------------------------------------------------------------------------ both methods


def test_conventional_against_a_round_step_by_step() -> None:
    asked = question(training=EVEN)
    found = conventional_at(asked, devices=2, steps_per_round=8)
    assert found is not None
    sequences = 8 * 512
    time_s = sequences / 8 / 32 * prefill_s(QWEN_7B, H100, 2, 100)
    room = most_slots(QWEN_7B, H100, 2, ROLLOUTS.context_tokens)
    survival = [
        sum(n for length, n in ((200, 3), (900, 4), (2000, 2), (4000, 1)) if length > step) / 10 for step in range(4000)
    ]
    for step, share in enumerate(survival):
        running = sequences * share / 32
        turns = max(1.0, running / room)
        time_s += turns * float(decode_step_s(QWEN_7B, H100, 2, 100 + step, running / turns))
    assert found.generation_s == pytest.approx(time_s)
    assert found.rate == pytest.approx(sequences / (time_s + 8 * found.step.s + found.update.s))


def test_the_best_pipeline_is_the_best_of_all() -> None:
    asked = question(accelerators=12)
    every = [
        pipeline_at(asked, devices=devices, engines=engines)
        for devices in DEVICES
        for engines in range(1, 12 // devices + 1)
    ]
    rates = [found.rate for found in every if found]
    best = best_pipeline(asked)
    assert best is not None
    assert best.rate == max(rates)
    assert best.devices * best.engines + best.ranks == 12
    fewer = pipeline_at(asked, devices=best.devices, engines=best.engines, slots=best.slots - 1)
    assert fewer is not None
    assert fewer.rate < best.rate  # no slot is idle


def test_limits_of_lag_and_memory() -> None:
    free, bound = best_pipeline(question(max_lag=1000)), best_pipeline(question(max_lag=3))
    assert free is not None
    assert bound is not None
    assert bound.max_lag <= 3 < free.max_lag
    assert bound.rate < free.rate
    assert best_pipeline(question(shape=QWEN_235B, accelerators=32)) is None
    assert best_conventional(question(shape=QWEN_235B, accelerators=32)) is None


def test_what_bounds_the_rate() -> None:
    asked = question(training=Training(mfu=0.001))
    assert next(iter(bounds(asked))) == "training arithmetic"
    assert bounds(asked)["training arithmetic"] > 0.9
    slow = replace(H100, host_bandwidth=1e8)
    assert next(iter(bounds(question(cluster=slow)))) == "copies to and from hosts"
    assert bounds(question(shape=QWEN_235B, accelerators=8)) == {}
    rate = best_pipeline(question())
    assert rate is not None
    for better in improvements(question()).values():
        found = best_pipeline(better)
        assert found is not None
        assert found.rate > 0.98 * rate.rate  # the search is over a grid


@pytest.mark.parametrize("method", ["pipeline", "conventional"])
def test_the_simulation_of_the_same_costs_has_the_same_rate(method: str) -> None:
    work = Rollouts(lengths=LengthDistribution.uniform(400), batch_size=256, group_size=4, prompt_tokens=50)
    asked = question(rollouts=work, accelerators=16, max_lag=7)
    workload = DrawnWorkload(work.lengths, 4, seed=0, prompt_tokens=50)
    if method == "pipeline":
        found = best_pipeline(asked)
        assert found is not None
        schedule, slots, ranks = PipelineSchedule(256, stock=512), found.slots, found.ranks
    else:
        found = best_conventional(asked)
        assert found is not None
        schedule, slots, ranks = ConventionalSchedule(256, 8), -(-256 * 8 // found.engines), 16
    engines = found.engines
    costs, stragglers = simulated_costs(asked, devices=found.devices, engines=engines, ranks=ranks, slots=slots)
    predicted = simulate(
        Scenario(
            schedule=schedule,
            engines=engines,
            slots=slots,
            group_size=4,
            batch_size=256,
            steps=400 if method == "pipeline" else 160,  # 20 rounds
            costs=costs,
            workload=workload,
            stragglers=stragglers,
        )
    )
    assert predicted.samples_per_s_later == pytest.approx(found.rate, rel=0.08)
    assert predicted.lag_max is not None
    assert predicted.lag_max <= 8

"""Measuring: that what is measured is what it says, and that measurements become the right costs. No time is asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner import measure_generation
from pipelinerl.experiments.planner.calibrate import rollout_overhead_s
from pipelinerl.experiments.planner.calibration import DecodeCost, LengthDistribution
from pipelinerl.experiments.planner.measure_generation import (
    Generator,
    Production,
    decode_costs,
    load_generator,
    produce,
    prompt_tokens_mean,
)
from pipelinerl.experiments.planner.measure_training import Step, fit_steps, learner_of, prepare, take_steps, used_tokens

SLOTS = 6
SMALL = ["--engine.slots", str(SLOTS), "--actor.group_size", "2", "--trainer.batch_size", "8", "--actor.max_tokens", "20"]


def config(*settings: str) -> RunConfig:
    return load_config(None, [*SMALL, *settings])


@pytest.fixture(scope="module")
def generator() -> Generator:
    return load_generator(config())


@pytest.fixture(scope="module")
def production(generator: Generator, tmp_path_factory: pytest.TempPathFactory) -> tuple[Production, Path]:
    folder = tmp_path_factory.mktemp("production")
    return asyncio.run(produce(generator, folder, seconds=0, rollouts=24)), folder


def test_an_actor_at_work_loses_no_long_completions(production: tuple[Production, Path]) -> None:
    found, _ = production
    assert [group.index for group in found.first] == list(range(len(found.first)))
    assert sum(len(group.rollouts) for group in found.first) >= 24
    assert found.rollouts <= sum(len(group.rollouts) for group in found.groups)
    assert found.tokens > 0
    assert max(found.active) <= SLOTS
    assert np.mean(found.active) > SLOTS / 2
    assert prompt_tokens_mean(found.first) == 6.0


def test_decode_steps_are_those_of_all_sequences_and_nothing_else(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = generator.engine.step

    def watched() -> object:
        before = generator.engine.progress().tokens_generated
        result = step()
        steps.append(generator.engine.progress().tokens_generated - before)
        return result

    monkeypatch.setattr(generator.engine, "step", watched)
    costs = decode_costs(generator, LengthDistribution.of_histogram({4: 3, 60: 1}), 6, seconds=0.0)
    assert [cost.active for cost in costs] == [1, 2, 4, SLOTS]
    assert all(cost.step_s > 0 for cost in costs)
    timed = measure_generation.MIN_ROUNDS * (measure_generation.STEPS + 1)
    assert all(steps.count(cost.active) >= timed for cost in costs)
    assert (generator.engine.in_progress, generator.engine.queued) == (0, 0)


def test_a_slot_too_short_to_measure_in(generator: Generator) -> None:
    short = load_generator(config("--engine.max_length", "18", "--actor.max_tokens", "8"))
    with pytest.raises(UserError, match=r"engine\.max_length 18"):
        decode_costs(short, LengthDistribution.uniform(5), 6, seconds=0.0)


def test_overhead_is_what_decode_steps_leave() -> None:
    decode = [DecodeCost(active=active, step_s=step_s) for active, step_s in ((1, 0.1), (4, 0.4))]
    production = Production(groups=[], first=[], busy_s=2.0, tokens=9, rollouts=5, active=[0, 4, 4, 2, 1])
    assert rollout_overhead_s(production, decode) == pytest.approx((2.0 - (0.4 + 0.4 + 0.2 + 0.1)) / 5)
    fast = Production(groups=[], first=[], busy_s=0.5, tokens=9, rollouts=5, active=[4, 4])
    assert rollout_overhead_s(fast, decode) == 0.0


def test_steps_of_two_sizes_tell_fixed_from_token_costs() -> None:
    steps = [Step(tokens, 0.05 + 0.001 * tokens) for tokens in (100, 400, 110, 390, 105, 410)]
    assert fit_steps([*steps, Step(100, 9.0)]) == pytest.approx((0.05, 0.001), rel=0.2)  # one was disturbed
    assert fit_steps(steps) == pytest.approx((0.05, 0.001))
    assert fit_steps([Step(50, 1.0), Step(100, 3.0)]) == pytest.approx((0.0, 0.03))  # nothing fixed is below 0
    assert fit_steps([Step(50, 1.0), Step(50, 1.0)]) == pytest.approx((0.0, 0.02))
    with pytest.raises(ValueError, match="no step had tokens"):
        fit_steps([Step(0, 1.0)])


def test_training_steps_over_what_was_generated(production: tuple[Production, Path]) -> None:
    found, folder = production
    run = config()
    prepared = prepare(run, folder / "stream")
    assert len(prepared.samples) == sum(len(group.rollouts) for group in found.groups)
    used = [sample for sample in prepared.samples if sample.advantage != 0]
    assert used_tokens(run, prepared.samples) == sum(sample.length for sample in used)
    keep = load_config(None, [*SMALL, "--preprocess.zero_advantage", "keep"])
    assert used_tokens(keep, prepared.samples) == sum(sample.length for sample in prepared.samples)
    said: list[str] = []
    with learner_of(run, folder / "learner") as learner:
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        steps = take_steps(run, learner, prepared.samples, said.append, lambda: True)
    assert len(steps) == 6
    assert said == ["ready", "enough"]
    assert all(value.allclose(before[name], atol=1e-6) for name, value in learner.model.state_dict().items())


def test_too_few_rollouts_to_train_on(tmp_path: Path, generator: Generator) -> None:
    asyncio.run(produce(generator, tmp_path, seconds=0, rollouts=2))
    with pytest.raises(UserError, match="a step takes 4096"):
        prepare(config("--trainer.batch_size", "4096"), tmp_path / "stream")

"""The version in one file does what the package does: the same loss and optimizer step, and tokens with exact provenance."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.environments.tasks import gcd
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment, TrainingSample

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_rl_in_one_file.py"
VERSION = 7


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_rl_in_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_model(one_file: ModuleType) -> Any:
    return AutoModelForCausalLM.from_pretrained(one_file.BASE_MODEL).eval()


def prompt(problem: tuple[int, int], model_ids: str = "0123456789,;:>") -> list[int]:
    return [model_ids.index(character) + 2 for character in f"{problem[0]:02d},{problem[1]:02d}:"]


def generate(one_file: ModuleType, engine: Any, count: int, update_after: int | None = None) -> list[Any]:
    """`count` finished rollouts; with `update_after`, after so many decode steps the engine gets other weights."""
    rng = random.Random(0)
    pools = one_file.problem_pools(held_out=False)
    waiting = [one_file.Rollout(p, prompt(p)) for p in (one_file.draw_problem(pools, rng) for _ in range(count))]
    finished: list[Any] = []
    steps = 0
    while len(finished) < count:
        while waiting and None in engine.slots:
            engine.start(waiting.pop())
        finished += engine.step()
        steps += 1
        if steps == update_after:
            torch.manual_seed(1)
            other = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in engine.model.state_dict().items()}
            engine.update_weights(other, VERSION)
    return finished


def test_the_optimizer_step_is_that_of_the_package(one_file: ModuleType) -> None:
    engine = one_file.Engine(load_model(one_file), 16, 1, 60, seed=3)
    rollouts = generate(one_file, engine, 48, update_after=20)
    draw = random.Random(5)
    for rollout in rollouts:
        rollout.advantage = draw.uniform(-1, 1)
        # Stale enough that weights are truncated at 5.
        rollout.logprobs = [logprob - draw.choice([0.0, 0.5, 2.5]) for logprob in rollout.logprobs]

    model = load_model(one_file)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    loss, ess = one_file.train_step(model, optimizer, rollouts)

    config = TrainerConfig(steps=100, learning_rate=3e-4, warmup_steps=0, lr_schedule="constant")
    package = Learner(load_model(one_file), config, temperature=1.0)
    result = package.step([as_sample(rollout) for rollout in rollouts], VERSION)

    assert result.metrics is not None
    assert result.metrics["truncated_fraction"] > 0.1
    assert loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)  # a small sum of large terms
    assert ess == pytest.approx(result.metrics["ess"], rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in package.model.named_parameters()}
    for name, parameter in model.named_parameters():  # clipped; AdamW's first step would blow rounding up
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_an_update_reaches_sequences_in_progress_and_tokens_have_the_log_probabilities_of_their_weights(
    one_file: ModuleType,
) -> None:
    engine = one_file.Engine(load_model(one_file), 8, 1, 60, seed=3)
    assert_exact(one_file, engine, generate(one_file, engine, 40))
    engine = one_file.Engine(load_model(one_file), 8, 1, 60, seed=3)
    rollouts = generate(one_file, engine, 48, update_after=20)
    crossing = [rollout for rollout in rollouts if len(set(rollout.versions)) > 1]
    assert crossing
    assert all(
        set(rollout.versions) == {0, VERSION} and rollout.versions == sorted(rollout.versions) for rollout in crossing
    )
    after = rollouts[-8:]  # the last to finish of 48 in 8 slots: they began after the update
    assert all(set(rollout.versions) == {VERSION} for rollout in after)
    assert_exact(one_file, engine, after)


def assert_exact(one_file: ModuleType, engine: Any, rollouts: list[Any]) -> None:
    exact = one_file.token_logprobs(engine.model, rollouts)
    recorded = torch.tensor([logprob for rollout in rollouts for logprob in rollout.logprobs])
    torch.testing.assert_close(recorded, exact.detach(), rtol=0, atol=1e-4)


def test_the_task_is_the_demo_s(one_file: ModuleType) -> None:
    for held_out in (False, True):
        ours = {steps: {d: set(pairs) for d, pairs in by.items()} for steps, by in one_file.problem_pools(held_out).items()}
        pools = gcd.problem_pools(held_out)
        assert ours == {steps: {d: set(pairs) for d, pairs in by.items()} for steps, by in pools.items()}
    assert one_file.reward_of((84, 36), "48,36;12,36;12,24;12,12>12") == 1.0
    assert one_file.reward_of((84, 36), "48,36>12 ") == one_file.reward_of((84, 36), "12") == 0.0


def as_sample(rollout: Any) -> TrainingSample:
    ids = tuple(rollout.prompt + rollout.tokens)
    return TrainingSample(
        id=str(id(rollout)),
        group_index=0,
        segments=(Segment(token_ids=ids, sampled=((len(rollout.prompt), len(ids)),)),),
        behaviour_logprobs=tuple(rollout.logprobs),
        versions=tuple(rollout.versions),
        advantage=rollout.advantage,
        reward=rollout.reward,
    )

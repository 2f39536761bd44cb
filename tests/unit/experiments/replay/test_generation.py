"""Repeating completions: recorded sequences have the log-probs that were recorded, with weights that change within them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from pipelinerl.actor.client import derive_seed
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.experiments.replay.generation import repeat_groups, versions_of
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import GenerationRequest, Group, Rollout, SamplingParams, Turn
from tests.parity.models import VOCABULARY, make_model
from tests.unit.group_parts import group

TOLERANCE = 1e-4


class Versions:
    """A random model for each version."""

    def __call__(self, version: int) -> Mapping[str, Tensor]:
        return named_weights(make_model("llama", seed=version))

    def new_model(self, _version: int, _device: str) -> Any:
        return make_model("llama")


def config_for(kv: str) -> RunConfig:
    return load_config(None, {"engine.kv_on_update": kv, "engine.slots": 8, "actor.temperature": 0.7})


def sampled(kv: str, prompts: Mapping[int, tuple[int, ...]], updates: Mapping[int, int]) -> Group:
    """Completions of an engine that reads prompts in small pieces.

    `prompts`: step -> a prompt that is submitted then. `updates`: step -> version that the engine gets then.
    """
    engine = LocalEngine(make_model("llama"), slots=3, max_length=64, prefill_tokens=4, kv_on_update=kv)
    weights, done, step = Versions(), [], 0
    while len(done) < len(prompts):
        if step in updates:
            tensors = weights(updates[step])
            engine.update_weights(WeightUpdate(updates[step], checksum(tensors), tensors))
        if step in prompts:
            seed = derive_seed(derive_seed(config_for(kv).seed, 0, step), 0)
            sampling = SamplingParams(max_tokens=12 + step, temperature=0.7, seed=seed)
            engine.submit(GenerationRequest(id=str(step), prompt_ids=prompts[step], sampling=sampling))
        done += engine.step().finished
        step += 1
    turns = {completion.request_id: completion for completion in done}
    rollouts = [
        Rollout(id=f"g0.a{step}", attempt=step, reward=0.0, turns=(Turn(prompt_ids=prompt, completion=turns[str(step)]),))
        for step, prompt in prompts.items()
    ]
    return group(0, rollouts)


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i + length) % VOCABULARY for i in range(length))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_sequences_that_began_at_different_steps_see_each_update_at_their_own_token(kv: str) -> None:
    """The second one waits for a row of the engine; the last one's prompt is read by three versions."""
    prompts = {0: prompt(3), 1: prompt(2), 2: prompt(4), 3: prompt(3), 8: prompt(11)}
    group = sampled(kv, prompts, {4: 1, 9: 2, 10: 3, 15: 4, 16: 6, 24: 7})
    versions = [len(r.turns[0].completion.weight_versions) for r in group.rollouts]
    assert max(versions) >= 4
    read_by = [len(r.turns[0].completion.prompt_versions) for r in group.rollouts]
    assert (max(read_by) > 1) == (kv == "keep")
    result = repeat_groups([group], config_for(kv), Versions())  # type: ignore[arg-type]
    assert (result.completions, result.groups) == (5, 1)
    assert result.switches == sum(versions) - 5
    assert result.gaps[0][0] < TOLERANCE
    assert result.drawn == result.tokens


@pytest.mark.slow
def test_the_versions_that_a_group_needs_include_those_that_read_its_prompts() -> None:
    group = sampled("keep", {0: prompt(11)}, {1: 1, 5: 2})
    assert versions_of(group, "keep") == {0, 1, 2}
    assert versions_of(group, "recompute") == {1, 2}

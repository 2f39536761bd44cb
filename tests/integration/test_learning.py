"""Training all weights learns a toy task in a few steps, with every loss under every schedule."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from pipelinerl.config.schema import ScheduleConfig, TrainerConfig
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import named_weights
from tests.integration.runs import run, small_run, write_environment

ONES = """
isolate_reward = False

def reward(self, problem, text):
    return text.count("1") / 6
"""


def learns(tmp_path: Path, **settings: Any) -> None:
    few = {"trainer__batch_size": 32, "actor__max_tokens": 6, "evaluation__problems": 32}
    found = run(tmp_path / "r", environment__kind=write_environment(tmp_path, ONES), **few, **settings)
    assert found["eval_reward_after"] > found["eval_reward_before"] + 0.3


@pytest.mark.slow
def test_adapters_learn_it(tmp_path: Path) -> None:
    learns(tmp_path, trainer__steps=20, trainer__learning_rate=3e-3, model__lora__rank=8)


LOSSES = get_args(TrainerConfig.model_fields["loss"].annotation)
SCHEDULES = get_args(ScheduleConfig.model_fields["kind"].annotation)
USUAL = {*product(LOSSES, ["pipeline"]), *product(["reinforce"], SCHEDULES)}
"""Each loss and each schedule once; the other pairs are exhaustive."""


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.exhaustive) for pair in product(LOSSES, SCHEDULES)],
)
def test_all_weights_learn_to_answer_with_ones(loss: str, schedule: str, tmp_path: Path) -> None:
    rounds = {"schedule__kind": schedule, "schedule__steps_per_round": 1 if schedule == "pipeline" else 2}
    learns(tmp_path, trainer__loss=loss, trainer__learning_rate=5e-3, trainer__steps=12, **rounds)
    before = named_weights(load_model(small_run(tmp_path / "r").model))
    after = load_file(tmp_path / "r" / "checkpoints" / "step_00000012" / "model.safetensors")
    assert [name for name, weight in after.items() if weight.equal(before[name])] == []

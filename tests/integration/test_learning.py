"""Training learns a toy task in a few steps, with every loss under every schedule and with adapters, and to call a tool."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from pipelinerl import load_config
from pipelinerl.config.schema import ScheduleConfig, TrainerConfig
from pipelinerl.launch.run import train
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import named_weights
from pipelinerl.trainer import trainer
from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    assert_whole,
    groups,
    run,
    small_run,
    steps,
    write_environment,
)

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


LOSSES = get_args(get_args(TrainerConfig.model_fields["loss"].annotation)[0])
"""The built-in ones."""
SCHEDULES = get_args(ScheduleConfig.model_fields["kind"].annotation)
USUAL = {*product(LOSSES, ["pipeline"]), *product(["reinforce"], SCHEDULES)}
"""Each loss and each schedule once; the other pairs are exhaustive."""
MARKS = dict.fromkeys(USUAL, pytest.mark.slow) | {("reinforce", "pipeline"): ()}


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [pytest.param(*pair, marks=MARKS.get(pair, pytest.mark.exhaustive)) for pair in product(LOSSES, SCHEDULES)],
)
def test_all_weights_learn_to_answer_with_ones(loss: str, schedule: str, tmp_path: Path) -> None:
    rounds = {"schedule__kind": schedule, "schedule__steps_per_round": 1 if schedule == "pipeline" else 2}
    learns(tmp_path, trainer__loss=loss, trainer__learning_rate=5e-3, trainer__steps=12, **rounds)
    before = named_weights(load_model(small_run(tmp_path / "r").model))
    after = load_file(tmp_path / "r" / "checkpoints" / "step_00000012" / "model.safetensors")
    assert [name for name, weight in after.items() if weight.equal(before[name])] == []


@pytest.mark.slow
def test_engines_are_right_all_along_and_the_model_under_the_adapters_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe compares what both sides compute with after each update: here its bound is that of rounding alone."""
    monkeypatch.setitem(trainer.TOLERANCE, trainer.torch.float32, 1e-4)
    kl = {"trainer__kl_coefficient": 0.05, "preprocess__zero_advantage": "keep"}
    counts = run(tmp_path / "r", trainer__steps=4, model__lora__rank=8, trainer__learning_rate=3e-3, **kl)
    assert counts["status"] == "finished"
    assert counts["weight_updates"] == 5
    assert_conserved(counts)
    assert_provenance(tmp_path / "r")
    first, *_, last = steps(tmp_path / "r")
    assert first.on_policy_gap is not None
    assert first.on_policy_gap < 1e-4
    assert last.kl_behaviour_policy_k3 is not None
    checkpoint = tmp_path / "r" / "checkpoints" / "step_00000004"
    base = named_weights(load_model(small_run(tmp_path / "r").model))
    merged = load_file(checkpoint / "model.safetensors")
    changed = {name for name, weight in merged.items() if not weight.equal(base[name])}
    assert changed == {name for name in merged if "_proj" in name}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "needed"),
    [("tools", "torch"), ("tools_mcp", "mcp_types"), ("openenv", "openenv"), ("verifiers_env", "verifiers")],
)
def test_the_examples_learn_to_call_the_tool_and_to_report_its_result(
    name: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needed)
    monkeypatch.chdir(Path(__file__).parents[2])
    summary = train(load_config(f"examples/{name}.yaml", ["--run_dir", str(tmp_path), "--metrics.view", "none"]))
    assert_whole(tmp_path)
    assert summary["eval_reward_before"] < 0.4
    assert summary["eval_reward_after"] > 0.8
    last = groups(tmp_path)[-1].rollouts
    for rollout in last:
        called = "<tool_call>" in rollout.turns[0].text
        assert (len(rollout.turns) > 1) == called == (rollout.metrics.get("tool_calls", len(rollout.turns) - 1) > 0)
    assert sum(len(rollout.turns) == 2 for rollout in last) > len(last) / 2

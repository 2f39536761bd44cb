"""Each kind of credit learns a toy task in seconds, and its run is repeated to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.experiments.replay.replay import replay
from tests.integration.runs import assert_conserved, groups, run, write_environment

ONES = """
isolate_reward = False

def reward(self, problem, text):
    return text.count("1") / 6
"""
TWO_TURNS = """
isolate_reward = False

async def rollout(self, problem, client):
    turns, prompt = [], tuple(self.tokenizer.encode(self.prompt(problem)))
    for _ in range(2):
        completion = await client.generate(prompt, max_tokens=3)
        text = self.tokenizer.decode(completion.answer_ids)
        turns.append(Turn(prompt_ids=prompt, completion=completion, text=text, reward=text.count("1") / 6))
        prompt = (*prompt, *completion.token_ids, *self.tokenizer.encode(","))
    return Rollout(turns=tuple(turns), reward=sum(turn.reward for turn in turns))
"""
HINTED = (
    """
def prompt(self, problem):
    return "01" + super().prompt(problem)[2:]

def teacher_prompt(self, problem):
    return "11" + super().prompt(problem)[2:]
"""
    + ONES
)
FUNCTIONS = """
def loss(inputs):
    return -inputs.log_ratio_N.detach().exp().clamp(max=2.0) * inputs.advantages_N * inputs.logprobs_N

def later_tokens(group):
    mean = sum(one.reward for one in group.rollouts) / len(group.rollouts)
    lengths = [len(one.turns[0].completion.token_ids) for one in group.rollouts]
    return [[(one.reward - mean) * (1 + at / n) for at in range(n)] for one, n in zip(group.rollouts, lengths)]
"""
SMALL = {"trainer__batch_size": 32, "actor__max_tokens": 6, "evaluation__problems": 32, "trainer__learning_rate": 5e-3}
WITHOUT_REWARD = {"preprocess__advantage": "none", "preprocess__zero_advantage": "keep"}
K1 = {"trainer__kl_coefficient": 1.0, "trainer__kl_estimator": "k1"}


def learns(folder: Path, environment: str, **settings: Any) -> dict[str, Any]:
    counts = run(folder, environment__kind=environment, **(SMALL | settings))
    assert_conserved(counts)
    assert counts["eval_reward_after"] > counts["eval_reward_before"] + 0.3
    result = replay(folder)
    assert (result.differences, result.exact) == ([], True)
    return counts


def test_rewards_of_turns(tmp_path: Path) -> None:
    kind = write_environment(tmp_path, TWO_TURNS, ["from pipelinerl.types import Turn"])
    learns(tmp_path / "r", kind, trainer__steps=12)
    assert all(turn.reward is not None for group in groups(tmp_path / "r") for one in group.rollouts for turn in one.turns)


@pytest.mark.slow
def test_a_loss_and_an_advantage_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    own = {"trainer__loss": f"{tmp_path}/own.py:loss", "preprocess__advantage": f"{tmp_path}/own.py:later_tokens"}
    learns(tmp_path / "r", write_environment(tmp_path, ONES), trainer__steps=12, **own)
    other = replay(tmp_path / "r", ["--trainer.loss=ppo", "--preprocess.advantage=group_mean"])
    assert (other.exact, other.differences) == (False, [])
    assert {"trainer.loss", "preprocess.advantage"} == other.settings.keys()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"model__lora__rank": 8, "trainer__learning_rate": 2e-2}])
def test_a_student_learns_from_its_teacher_alone(tmp_path: Path, lora: dict[str, Any]) -> None:
    kind = write_environment(tmp_path, ONES)
    run(tmp_path / "teacher", environment__kind=kind, trainer__steps=14, **SMALL)
    teacher = str(next((tmp_path / "teacher/checkpoints").glob("step_*14")))
    learns(tmp_path / "student", kind, trainer__steps=14, trainer__teacher=teacher, **K1, **WITHOUT_REWARD, **lora)


@pytest.mark.slow
def test_a_model_learns_without_a_hint_what_it_does_with_one(tmp_path: Path) -> None:
    """Self-distillation: the initial model, which writes ones where it reads the hint `11`, is the teacher."""
    kind, kinds = write_environment(tmp_path, HINTED), (("11", "111111"), ("01", "333333"))
    rows = [{"prompt": f"{hint},{n}:", "completion": answer} for hint, answer in kinds for n in range(10, 60)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm = {"trainer__warm_start__data": tmp_path / "answers.jsonl", "trainer__warm_start__learning_rate": 5e-3}
    run(tmp_path / "initial", environment__kind=kind, trainer__steps=1, **(SMALL | warm | {"trainer__learning_rate": 1e-9}))
    initial = str(next((tmp_path / "initial/checkpoints").glob("step_*1")))
    counts = learns(tmp_path / "r", kind, trainer__steps=20, model__path=initial, **K1, **WITHOUT_REWARD)
    assert counts["eval_reward_before"] < 0.3


@pytest.mark.slow
def test_a_warm_start_is_learned_before_the_first_rollout(tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"{n:02d},36:", "completion": "111111"} for n in range(10, 60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm = {"trainer__warm_start__data": str(data), "trainer__warm_start__learning_rate": 5e-3}
    warm |= K1 | {"preprocess__zero_advantage": "keep"}  # which given tokens have no part in
    counts = run(tmp_path / "r", environment__kind=write_environment(tmp_path, ONES), trainer__steps=2, **(SMALL | warm))
    assert counts["eval_reward_before"] > 0.8
    assert replay(tmp_path / "r").differences == []


@pytest.mark.slow
def test_what_is_read_between_turns_is_learned_beside_the_reward(tmp_path: Path) -> None:
    kind = write_environment(tmp_path, TWO_TURNS, ["from pipelinerl.types import Turn"])
    counts = learns(tmp_path / "r", kind, trainer__steps=12, preprocess__observation_weight=0.01)
    assert counts["samples_trained"] == 12 * 32

"""The online difficulty filter in real runs: what is skipped, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor.difficulty import OnlineFilter
from pipelinerl.config.schema import OnlineFilterConfig
from pipelinerl.types import Group
from tests.integration.runs import assert_gone_on, assert_whole, groups, resume, run, trained, write_environment

# Of eight problems, three are always solved and three never. The reward of the other two depends on the answer.
BODY = """
isolate_reward = False

def problem(self, index):
    found = super().problem(index % 8)
    return Problem(id=f"p{index % 8}", payload=found.payload)

def reward(self, problem, text):
    number = int(problem.id[1:])
    return 1.0 if number < 3 else 0.0 if number < 6 else float(sum(map(ord, text)) % 2)
"""
FILTER = OnlineFilterConfig(keep=0.3, at_least=0.1)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    own = {f"actor__online_filter__{name}": value for name, value in FILTER.model_dump().items()}
    return {"environment__kind": write_environment(folder, BODY), "actor__max_tokens": 8, **own, **more}


def assert_filtered(run_dir: Path) -> list[Group]:
    """Every decision follows from the groups recorded before it. Returns the groups."""
    skips, found = OnlineFilter(FILTER, 0), groups(run_dir)
    assert len({group.index for group in found}) == len(found)
    for group in found:
        if group.skipped is not None:
            assert (group.started, group.rollouts) == (0, ())
            assert skips.decide(group.index, group.problem.id) == group.skipped
        skips.observe(group.index, group.problem.id, [rollout.reward for rollout in group.rollouts])
    return found


@pytest.mark.parametrize("schedule", ["conventional", "pipeline"])
def test_problems_that_teach_nothing_are_skipped_and_come_back(tmp_path: Path, schedule: str) -> None:
    counts = run(tmp_path / "r", schedule__kind=schedule, trainer__steps=12, **settings(tmp_path))
    assert_whole(tmp_path / "r")
    found = assert_filtered(tmp_path / "r")
    skipped = [group for group in found if group.skipped]
    rewards = {group.problem.id: group.skipped.reward_mean for group in skipped}
    assert [rewards[f"p{number}"] for number in range(6)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    generated = [group.problem.id for group in found if not group.skipped]
    assert sum(generated.count(f"p{number}") >= 2 for number in range(6)) >= 3, "they come back"
    assert generated.count("p6") + generated.count("p7") > len(generated) / 3, "a quarter of the problems"
    assert counts["groups_skipped"] == len(skipped)
    started = counts["rollouts_started"] / 4
    assert counts["skipped_fraction"] == pytest.approx(len(skipped) / (len(skipped) + started))
    assert counts["generated_per_trained"]["rollouts"] == 1.0


def test_a_resumed_run_skips_what_it_would_have_skipped(tmp_path: Path) -> None:
    """In rounds nothing is on its way at a checkpoint: the two halves are the whole, to the last decision."""
    common = settings(tmp_path, schedule__kind="conventional")
    run(tmp_path / "straight", trainer__steps=8, **common)
    run(tmp_path / "halves", trainer__steps=4, **common)
    resume(tmp_path / "halves", trainer__steps=8)
    assert_gone_on(tmp_path / "halves", 8)
    straight, halves = assert_filtered(tmp_path / "straight"), assert_filtered(tmp_path / "halves")
    assert any(group.skipped for group in straight)
    assert [(group.index, group.skipped) for group in straight] == [(group.index, group.skipped) for group in halves]
    assert trained(tmp_path / "straight") == trained(tmp_path / "halves")

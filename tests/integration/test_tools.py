"""The packaged model that calls a tool: what it learns, and what is recorded of its turns, through every API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl import load_config
from pipelinerl.launch.run import train
from tests.integration import runs

ROOT = Path(__file__).parents[2]
CALCULATE: dict[str, Any] = {
    "name": "calculate",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_learns_to_call_the_tool_and_to_report_its_result(tmp_path: Path) -> None:
    summary = train(load_config(ROOT / "examples/tools.yaml", ["--run_dir", str(tmp_path), "--metrics.view", "none"]))
    runs.assert_whole(tmp_path)
    assert summary["eval_reward_before"] < 0.4
    assert summary["eval_reward_after"] > 0.8
    last = runs.groups(tmp_path)[-1].rollouts
    for rollout in last:
        called = "<tool_call>" in rollout.turns[0].text
        assert (len(rollout.turns) > 1) == called == (rollout.metrics["tool_calls"] > 0)
    assert sum(len(rollout.turns) == 2 for rollout in last) > len(last) / 2

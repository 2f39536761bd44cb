"""The packaged model that calls a tool: what it learns, and what is recorded of its turns, through every API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pipelinerl import load_config
from pipelinerl.launch.run import train
from tests.chaos import invariants
from tests.integration import runs

ROOT = Path(__file__).parents[2]
OPENAI = openai.OpenAI(base_url="http://unused", api_key="unused")
ANTHROPIC = anthropic.Anthropic(base_url="http://unused", api_key="unused")
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


def by_responses(question: str, base_url: str) -> str:
    client = OPENAI.with_options(base_url=base_url)
    tools: Any = [{"type": "function", **CALCULATE}]
    items: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        answer = client.responses.create(model="policy", input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
        if not calls:
            return answer.output_text
    return ""


def by_messages(question: str, base_url: str) -> str:
    client = ANTHROPIC.with_options(base_url=base_url)
    tools: Any = [{"name": CALCULATE["name"], "input_schema": CALCULATE["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        with client.messages.stream(model="policy", messages=messages, tools=tools, max_tokens=40) as stream:
            answer = stream.get_final_message()
        if answer.stop_reason != "tool_use":
            return "".join(block.text for block in answer.content if block.type == "text")
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12"} for call in calls]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return ""


def solve(problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Half of the problems through each API. The tool always returns 12, so the reward is for reporting what it returned."""
    api = problem["value"] % 2
    answer = (by_responses, by_messages)[api](f"What is {problem['expression']}?", base_url)
    return {"reward": float(answer == "12"), "api": api}


@pytest.mark.slow
def test_a_run_trains_on_exactly_what_it_sampled_through_both_apis(tmp_path: Path) -> None:
    args = {"run": f"{__file__}:solve", "problems": {"kind": "calculator", "args": {"numbers": [2, 2]}}}
    summary = runs.run(
        tmp_path / "run",
        model__path="demo-tools",
        environment__kind="agent",
        environment__args=json.dumps(args),
        trainer__steps=2,
        actor__max_tokens=40,
        engine__max_length=160,
    )
    assert summary["status"] == "finished"
    assert invariants.check(tmp_path / "run") == []
    runs.assert_provenance(tmp_path / "run")
    gap = runs.steps(tmp_path / "run")[0].on_policy_gap
    assert gap is not None
    assert gap < 1e-3
    made = list(runs.rollouts_by_id(tmp_path / "run").values())
    called = [rollout for rollout in made if len(rollout.turns) > 1]
    assert {rollout.metrics["api"] for rollout in called} == {0.0, 1.0}
    assert all(rollout.metrics["new_segments"] == 0 for rollout in made)
    assert max(rollout.reward for rollout in called) == 1.0  # it reported the result

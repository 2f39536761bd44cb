"""Training on an environment of `verifiers`, with tools and several turns: what holds for every run holds here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.types import Rollout
from tests.integration.runs import assert_whole, rollouts_by_id, run, steps
from tests.unit.chat_parts import write_model

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

class Echo(vf.ToolEnv):
    @vf.stop
    async def no_tools_called(self, state):  # a model of random weights calls none
        return False

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"You wrote {len(messages[-1].content)} characters."}]

def load_environment(turns):
    def fourth(a: int) -> int:
        "A fourth."
        return a // 4

    def odd(completion):
        return float(sum(len(message.content) for message in completion if message.role == "assistant") % 2)

    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(12)]
    rubric = vf.Rubric(funcs=[odd])
    return Echo(dataset=Dataset.from_list(rows), tools=[fourth], max_turns=turns, rubric=rubric)
"""


def assert_continues(rollout: Rollout) -> None:
    """Each turn's prompt begins with everything before it, id by id."""
    before: tuple[int, ...] = ()
    for turn in rollout.turns:
        assert turn.prompt_ids[: len(before)] == before
        before = (*turn.prompt_ids, *turn.completion.token_ids)


@pytest.mark.slow
def test_a_run_trains_on_an_environment_of_verifiers(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    counts = run(
        tmp_path / "r",
        model__path=write_model(tmp_path / "model"),
        environment__kind="verifiers",
        environment__args__load=f"{tmp_path}/echo.py:load_environment",
        environment__args__args__turns=3,
        environment__args__held_out=0.25,
        actor__max_tokens=12,
        engine__max_length=1024,
        trainer__steps=3,
        evaluation__problems=3,
    )
    assert counts["status"] == "finished"
    assert counts["rollouts_trained"] == 3 * 16
    assert_whole(tmp_path / "r")
    rollouts = rollouts_by_id(tmp_path / "r").values()
    for rollout in rollouts:
        assert len(rollout.turns) == 3
        assert_continues(rollout)
        assert rollout.metrics["new_segments"] == 0
        assert rollout.metrics["odd"] == rollout.reward
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    assert len(steps(tmp_path / "r")) == 3

"""A trial of Harbor as an agent's attempt (`examples/harbor_agent.py`), in a folder instead of a container.

Needs the program `harbor` (Python 3.12), named by the environment variable HARBOR if it is not on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments.registry import make_environment
from tests.unit.chat_parts import SamplingClient, make_tokenizer

HARBOR = os.environ.get("HARBOR") or shutil.which("harbor")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(HARBOR is None, reason="needs the program harbor")]
EXAMPLE = Path(__file__).parents[2] / "examples/harbor_agent.py"
TOKENIZER = make_tokenizer()
FILES = {
    "instruction.md": "What is 12 + 34?\n",
    "task.toml": 'schema_version = "1.4"\n\n[metadata]\n\n[verifier]\ntimeout_sec = 60.0\n\n[agent]\ntimeout_sec = 60.0\n',
    "tests/test.sh": (
        "#!/bin/bash\ngrep -q 46 /app/answer.txt && right=1 || right=0\n"
        'echo "{\\"reward\\": $right, \\"bytes\\": $(wc -c < /app/answer.txt)}" > /logs/verifier/reward.json\n'
    ),
    "environment/Dockerfile": "FROM scratch\n",
}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in FILES.items():
        (tmp_path / "sum" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sum" / name).write_text(text)
    parts = {
        "agent": {"import_path": "harbor_parts:Asking", "model_name": "openai/policy"},
        "environment": {"import_path": "harbor_parts:FolderEnvironment"},
    }
    problems = [{"task": {"path": str(tmp_path / name)}, **parts} for name in ("sum", "none")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, problems)))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("HARBOR", str(HARBOR))
    args = {"run": f"{EXAMPLE}:solve", "data": str(tmp_path / "tasks.jsonl"), "held_out": 0.0}
    return make_environment("agent", args, TOKENIZER, 0)


def test_a_trial_has_the_models_answer_and_its_verifiers_reward(environment: Any) -> None:
    tried, missing = sorted(
        (environment.problem(index) for index in range(2)), key=lambda it: "none" in it.payload["task"]["path"]
    )
    for text, reward in (("It is 46.", 1.0), ("No.", 0.0)):
        rollout = asyncio.run(environment.rollout(tried, SamplingClient.saying(TOKENIZER, text)))
        assert (rollout.reward, rollout.metrics["bytes"]) == (reward, len(text) + 1)
        assert [turn.text for turn in rollout.turns] == [text]
    with pytest.raises(RuntimeError, match="the trial has no reward"):
        asyncio.run(environment.rollout(missing, SamplingClient.saying(TOKENIZER, "It is 46.")))

"""Tasks of Harbor as problems: an attempt is a trial, whose agent calls the model in training.

    run: examples/harbor_agent.py:solve      (environment.kind: agent, sampling: ignore)
    data: tasks.jsonl                        {"task": {"path": "tasks/hello"}, "environment": {"type": "docker"}}

Harbor needs Python 3.12. It may be in an environment of its own: `HARBOR=path/to/bin/harbor pipelinerl train ...`
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

AGENT = {"name": "terminus-2", "model_name": "openai/policy"}
"""It calls the model from Harbor's process. An agent within a container can't reach the loopback address."""


async def solve(problem: dict[str, Any], base_url: str, api_key: str) -> tuple[float, dict[str, float]]:
    """The verifier's reward, and its other numbers. A trial without a reward is an error, which costs the attempt."""
    with TemporaryDirectory(prefix="harbor-") as folder:
        trial = {"agent": AGENT, **problem, "trials_dir": folder, "trial_name": "trial"}
        config, result = Path(folder, "config.json"), Path(folder, "trial/result.json")
        config.write_text(json.dumps(trial))
        variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        command = (os.environ.get("HARBOR", "harbor"), "trial", "start", "--config", str(config))
        printed = await run(*command, env=variables)
        found = json.loads(result.read_text()) if result.exists() else {}
    rewards = (found.get("verifier_result") or {}).get("rewards")
    if not rewards:
        error = found.get("exception_info") or {}
        raise RuntimeError(f"the trial has no reward: {error.get('exception_message') or printed.strip()[-500:]}")
    first = "reward" if "reward" in rewards else next(iter(rewards))
    return rewards[first], {name: float(value) for name, value in rewards.items() if name != first}


async def run(*command: str, env: dict[str, str]) -> str:
    """What the program printed. It is killed with what it started if the attempt ends before it does."""
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    try:
        return (await process.communicate())[0].decode(errors="replace")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

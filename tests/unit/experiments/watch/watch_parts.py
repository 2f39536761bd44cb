"""Run directories to watch, without a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.load import config_to_yaml, load_config
from pipelinerl.metrics.records import StepRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Group
from tests.unit.experiments.browse_parts import group, lines, rollout, turn
from tests.unit.record_parts import evaluation, step, write_records

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">\x1b[31m\u202e"
CROSSING = rollout(1, 0, 1.0, turn("84,36:", "48,36;12", (3, 4), (4, 0)))
GROUPS = [group(0, rollout(0, 0, 0.0, turn("9,6:", "no"))), group(1, CROSSING, question=HOSTILE)]


def a_step(version: int, time_s: float, reward: float = 0.5, **changed: Any) -> StepRecord:
    values = {"tokens_trained": 80, "train_s": 0.5, "wait_s": 0.5, "lag_mean": 1.0, "lag_max": 2} | changed
    return step(version, time_s, reward_mean=reward, **values)


def load(worker: int, time_s: float, in_progress: int) -> dict[str, Any]:
    return {"worker": worker, "time_s": time_s, "in_progress": in_progress, "queued": 1, "tokens_generated": 9, "version": 0}


def append(path: Path, *records: Any) -> None:
    with path.open("ab") as file:
        file.write(lines(records))


def make_run(root: Path, steps: int = 4, *, status: str | None = "finished", groups: Sequence[Group] = GROUPS) -> Path:
    """A run of `steps` optimizer steps, one a second from time 3. `status`: its summary's; None: it has no summary."""
    run = RunDirectory(root)
    run.make_folders()
    run.config.write_text(config_to_yaml(load_config(None, {"trainer.steps": 10, "environment.kind": "gcd"})))
    run.plan.write_bytes(b"{}")
    os.utime(run.plan, (1000, 1000))
    (root / ".lock").touch()
    append(run.sessions, {"config": {"seed": 0, "trainer": {"steps": 10}}})
    write_records(root, evaluation("before", 0, 2.0, reward_mean=0.25))
    write_records(root, *(a_step(n, 3.0 + n, n / 10, crossing_fraction=n % 2 / 2) for n in range(1, steps + 1)))
    append(run.recorded, *groups)
    append(root / "timeline-0.jsonl", *(load(0, 2 + n / 4, n) for n in range(8)))
    if status is not None:
        run.summary.write_bytes(msgspec.json.encode({"status": status}))
    return root

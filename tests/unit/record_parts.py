"""Records of a run, and statuses of stages, for tests that need some of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.files import JsonLines
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import Record, StepRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Progress, StageStatus


def step(version: int, time_s: float = 1.0, **fields: Any) -> StepRecord:
    return StepRecord(version=version, time_s=time_s, **{"samples": 8, **fields})


def evaluation(when: Any, version: int, time_s: float = 1.0, **fields: Any) -> EvaluationRecord:
    return EvaluationRecord(when=when, version=version, time_s=time_s, **{"problems": 4, "reward_mean": 0.5, **fields})


def answered(reward: float, length: int = 1, **fields: Any) -> EvaluatedProblem:
    return EvaluatedProblem(**{"problem_id": "p", "reward": reward, "length": length, **fields})


def write_records(run_dir: Path, *records: Record) -> None:
    """Append them to the files of the run."""
    run = RunDirectory(run_dir)
    for record in records:
        with JsonLines(run.metrics if isinstance(record, StepRecord) else run.evaluations) as file:
            file.write(record)


def status(
    stage: str, state: Any = "working", detail: str = "", progress: Progress | None = None, **fields: Any
) -> StageStatus:
    times = {"since_s": 0.0, "written_s": 0.0}
    return StageStatus(
        **{"stage": stage, "pid": 7, "state": state, "detail": detail, "progress": progress, **times, **fields}
    )


def statuses_of(*all_of: StageStatus) -> dict[str, StageStatus]:
    return {one.stage: one for one in all_of}

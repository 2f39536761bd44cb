"""How a session of a run ended, and what is written down of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunInterruptedError
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import Board
from pipelinerl.launch.plan import StartPlan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.metrics.records import EvaluationRecord, StepRecord, read_records
from pipelinerl.metrics.summary import summarize
from pipelinerl.types import ActorProgress, StageStatus


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a run that reached its goal; `stream_rollouts` lie in the stream, not yet with the trainer."""

    statuses: Mapping[str, StageStatus]
    error: PipelineRLError | None
    wall_s: float
    stream_rollouts: int = 0
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        if self.error is None:
            return "finished"
        if isinstance(self.error, RunInterruptedError):
            return "interrupted"
        return f"failed: {self.error}"


def last_statuses(board: Board) -> dict[str, StageStatus]:
    found = {stage: board.read(stage) for stage in board.stages()}
    return {stage: status for stage, status in found.items() if status is not None}


def write_summary(config: RunConfig, run: RunDirectory, plan: StartPlan, outcome: Outcome) -> dict[str, Any]:
    """Write `summary.json` and return its contents."""
    summary = summarize(
        config,
        read_records(run.metrics, StepRecord),
        read_records(run.evaluations, EvaluationRecord),
        {stage: _with_earlier_sessions(status, plan) for stage, status in outcome.statuses.items()},
        wall_s=outcome.wall_s,
        status=outcome.status,
        stream_rollouts=outcome.stream_rollouts,
        peak_memory_bytes=outcome.peak_memory_bytes,
        resumed_from=plan.version if plan.checkpoint else None,
    )
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def _with_earlier_sessions(status: StageStatus, plan: StartPlan) -> StageStatus:
    """The trainer counts over the whole run, the actor over its session: add what came before, so that they agree."""
    if not isinstance(status.progress, ActorProgress):
        return status
    started = status.progress.rollouts_started + plan.rollouts_before
    return msgspec.structs.replace(status, progress=msgspec.structs.replace(status.progress, rollouts_started=started))

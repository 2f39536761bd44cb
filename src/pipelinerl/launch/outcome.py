"""How a session of a run ended, and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelinerl.errors import PipelineRLError, RunDirectoryError, RunInterruptedError
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import Board
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.metrics.records import EvaluationRecord, StepRecord, read_records
from pipelinerl.metrics.summary import summarize
from pipelinerl.types import ActorProgress, StageStatus, trainer_progress

FINISHED = "finished"


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a run that reached its goal. `stream_rollouts` are in a stream, not yet read by the trainer."""

    statuses: Mapping[str, StageStatus]
    error: PipelineRLError | None
    wall_s: float
    stream_rollouts: int = 0
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        if self.error is None:
            return FINISHED
        if isinstance(self.error, RunInterruptedError):
            return "interrupted"
        return f"failed: {self.error}"


def last_statuses(board: Board) -> dict[str, StageStatus]:
    found = {stage: board.read(stage) for stage in board.stages()}
    return {stage: status for stage, status in found.items() if status is not None}


def goal_reached(trainer: StageStatus | None) -> bool:
    """Whether this is the status of a trainer that has taken all its steps."""
    progress = trainer_progress(trainer)
    return progress is not None and progress.goal_reached


def interruption(session: Session) -> RunInterruptedError:
    """The error for a run that was told to stop."""
    run = session.run
    if session.config.stream.kind == "memory" or not any(run.checkpoints.glob("step_*")):
        return RunInterruptedError("stopped before its goal")
    return RunInterruptedError(f"stopped before its goal; continue with `pipelinerl train --resume {run.root}`")


def write_summary(session: Session, outcome: Outcome) -> dict[str, Any]:
    """Write `summary.json` and return its contents.

    Raises RunDirectoryError if records can't be read or the summary can't be written.
    """
    run, plan = session.run, session.plan
    summary = summarize(
        session.config,
        read_records(run.metrics, StepRecord),
        read_records(run.evaluations, EvaluationRecord),
        _with_earlier_sessions(outcome.statuses, plan),
        wall_s=outcome.wall_s,
        status=outcome.status,
        stream_rollouts=outcome.stream_rollouts,
        peak_memory_bytes=outcome.peak_memory_bytes,
        resumed_from=plan.version if plan.checkpoint else None,
    ) | {"predicted_memory_bytes": plan.predicted_memory_bytes}
    try:
        write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    except OSError as error:
        raise RunDirectoryError(f"can't write {run.summary}: {error.strerror}; make room on that disk") from error
    return summary


def _with_earlier_sessions(statuses: Mapping[str, StageStatus], plan: StartPlan) -> dict[str, StageStatus]:
    """Add the rollouts of earlier sessions to one actor's count, so that counts agree with the trainer's.

    The trainer counts over the whole run, actors count over the session.
    """
    changed = dict(statuses)
    for stage, status in statuses.items():
        if isinstance(status.progress, ActorProgress):
            started = status.progress.rollouts_started + plan.rollouts_before
            progress = msgspec.structs.replace(status.progress, rollouts_started=started)
            changed[stage] = msgspec.structs.replace(status, progress=progress)
            break
    return changed

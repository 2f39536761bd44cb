"""The end of a session: how it ended, `summary.json`, and what the terminal shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec
from rich.console import Console

from pipelinerl.checkpoint import best_version, saved_versions
from pipelinerl.errors import INVALID_DATA, PipelineRLError, RunDirectoryError, RunInterruptedError
from pipelinerl.files import remedy, write_atomically
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import summarize
from pipelinerl.process import PeakMemory
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import ActorProgress, StageStatus

FINISHED = "finished"


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a run that reached its goal. `stream_rollouts` are in a stream, not yet read by the trainer.

    `restarts`: how often each process was started again, and the `run` from its latest checkpoint. `lost`: the session ended
    because a process was lost, so that another session can go on.
    """

    statuses: Mapping[str, StageStatus]
    error: PipelineRLError | None
    wall_s: float
    stream_rollouts: int = 0
    peak_memory: Mapping[str, PeakMemory] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    lost: bool = False

    @property
    def status(self) -> str:
        if self.error is None:
            return FINISHED
        if isinstance(self.error, RunInterruptedError):
            return "interrupted"
        return f"failed: {self.error}"


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
        peak_memory_bytes={role: peak.host for role, peak in outcome.peak_memory.items()},
        peak_gpu_memory_bytes={role: peak.gpu for role, peak in outcome.peak_memory.items() if peak.gpu},
        resumed_from=plan.version if plan.checkpoint else None,
    ) | {
        "stopped_by": run.stop_request.read_text(encoding="utf-8") if run.stop_request.exists() else None,
        "best_version": best_version(run.root, saved_versions(run.root)),
        "restarts": outcome.restarts,
        "predicted_memory_bytes": plan.predicted_memory_bytes,
    }
    try:
        write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    except OSError as error:
        raise RunDirectoryError(f"can't write {run.summary}: {error.strerror}; {remedy(error)}") from error
    return summary


def _with_earlier_sessions(statuses: Mapping[str, StageStatus], plan: StartPlan) -> dict[str, StageStatus]:
    """Add the rollouts of earlier sessions to one actor's count, so that counts agree with the trainer's.

    The trainer counts over the whole run, actors count over the session. Earlier rollouts are settled, or still in a stream.
    """
    before = plan.settled + sum(kept.left for kept in plan.kept)
    for stage, status in statuses.items():
        if isinstance(status.progress, ActorProgress):
            started = status.progress.rollouts_started + before
            progress = msgspec.structs.replace(status.progress, rollouts_started=started)
            return {**statuses, stage: msgspec.structs.replace(status, progress=progress)}
    return dict(statuses)


def finished_summary(run: RunDirectory) -> dict[str, Any] | None:
    """The summary of the run's last session, if it reached its goal."""
    try:
        summary = msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    except (OSError, *INVALID_DATA):
        return None
    return summary if summary.get("status") == FINISHED else None


def show_result(session: Session, summary: dict[str, Any], stream: TextIO) -> None:
    """Draw the curves and, unless the view is `none`, print the table, a sample of two evaluations, and the results' paths.

    After a failure nothing is printed, so that the error stays visible; the results are in the run directory.
    """
    from pipelinerl.report import only_shown  # noqa: PLC0415 - as below

    run, metrics = session.run, session.config.metrics
    if metrics.plot:
        with only_shown(run.curves.name):
            from pipelinerl.report.curves import draw_curves  # noqa: PLC0415 - matplotlib takes a second

            draw_curves(run.root, run.curves)
    if metrics.view == "none" or summary["status"].startswith("failed"):
        return
    from pipelinerl.report.terminal import final_table, largest_gain, sample_before_after  # noqa: PLC0415

    console = Console(file=stream, markup=False, emoji=False)
    console.print(final_table(summary))
    with only_shown("the sample of the evaluations"):
        if (sample := largest_gain(run.root)) is not None:
            console.print(sample_before_after(*sample))
    for path in (run.curves, run.summary, run.metrics, run.rollouts, run.checkpoints):
        if path.exists():
            console.print(f"  {path.relative_to(run.root)}", style="dim", highlight=False)
    console.print(f"in {run.root}", style="dim", highlight=False, soft_wrap=True)

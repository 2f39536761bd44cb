"""The hub of a session, and the stream of groups behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelinerl.config.schema import RunConfig
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.hub import Hub
from pipelinerl.hub.stream import FileStream, GroupStream
from pipelinerl.interfaces import Board
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import stream_capacity

if TYPE_CHECKING:
    from pipelinerl.launch.session import Session


def open_stream(config: RunConfig, run: RunDirectory, run_id: str) -> GroupStream:
    """The stream of the run. Raises StreamError, and ConfigError for a wrong address of Redis."""
    if config.stream.kind == "memory":
        return FileStream()
    if config.stream.url is None:
        return FileStream(run.streams / "rollouts", run.recorded)
    from pipelinerl.hub.redis import RedisStream  # noqa: PLC0415 - needs the extra `redis`

    return RedisStream(config.stream.url, f"pipelinerl-{run_id}-rollouts")


def make_hub(session: Session, board: Board) -> Hub:
    """The hub of a session, over the run's stream. Raises StreamError."""
    config, plan = session.config, session.plan
    admission = AdmissionState(
        session.schedule,
        taken=plan.taken,
        processes=config.engine.processes,
        handed_over=sum(kept.left for kept in plan.kept),
        settled=plan.settled,
    )
    rollouts = open_stream(config, session.run, plan.run)
    rollouts.count([kept.left for kept in plan.kept])
    return Hub(
        admission,
        rollouts,
        session.run.root,
        board,
        capacity=stream_capacity(config),
        drops=config.stream.when_full == "drop_oldest",
    )

"""The hub of a session, and the streams behind it.

rollouts    groups, from the actors to the preprocessor
prepared    prepared groups, from the preprocessor to the trainer; only if the preprocessor is a separate process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelinerl.config.schema import RunConfig
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.hub import Hub
from pipelinerl.interfaces import Board
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import stream_capacity
from pipelinerl.stream import GroupStream
from pipelinerl.stream.files import FileStream

if TYPE_CHECKING:
    from pipelinerl.launch.session import Session

ROLLOUTS = "rollouts"
PREPARED = "prepared"


def open_stream(config: RunConfig, run: RunDirectory, run_id: str, name: str) -> GroupStream:
    """A stream of the run. Raises StreamError, and ConfigError for a wrong address of Redis."""
    if config.stream.kind == "memory":
        return FileStream()
    if config.stream.url is None:
        return FileStream(run.streams / name, run.recorded if name == ROLLOUTS else None)
    from pipelinerl.stream.redis import RedisStream  # noqa: PLC0415 - needs the extra `redis`

    return RedisStream(config.stream.url, f"pipelinerl-{run_id}-{name}")


def make_hub(session: Session, board: Board) -> Hub:
    """The hub of a session, over the run's streams. Raises StreamError."""
    config, plan = session.config, session.plan
    admission = AdmissionState(
        session.schedule,
        taken=plan.taken,
        processes=config.engine.processes,
        handed_over=sum(kept.left for kept in plan.kept),
        settled=plan.settled,
    )
    left, prepared = [kept.left for kept in plan.kept], None
    if config.launch.preprocessor == "process":
        prepared = open_stream(config, session.run, plan.run, PREPARED)
        prepared.count(left[: prepared.waiting])
        left = left[prepared.waiting :]
    rollouts = open_stream(config, session.run, plan.run, ROLLOUTS)
    rollouts.count(left)
    return Hub(
        admission,
        rollouts,
        session.run.root,
        board,
        prepared=prepared,
        capacity=stream_capacity(config),
        drops=config.stream.when_full == "drop_oldest",
    )

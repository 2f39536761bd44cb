"""Access to the record of admission in Redis: of a generation process, and of the launcher once that has died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipelinerl.actor.admission_redis import RedisAdmission
from pipelinerl.interfaces import StreamWriter
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.streams import redis_of
from pipelinerl.ledger import GroupLedger
from pipelinerl.stream.redis import RedisStreamWriter
from pipelinerl.types import Group


def redis_admission(session: Session, writer: StreamWriter[Group], process: int) -> RedisAdmission:
    """For generation process number `process`. What `writer` appends, and drops for it, is counted in the same transaction.

    A later writer of the same process drops what this one had taken from the stream to drop it.
    """
    url, prefix, patience_s = redis_of(session.config, session.run, session.plan.redis_url)
    admission = RedisAdmission(
        url,
        prefix,
        session.schedule,
        taken=GroupLedger.from_record(session.plan.taken),
        processes=session.config.engine.processes,
        process=process,
        patience_s=patience_s,
    )

    def join(pipe: Any, dropped: Sequence[Group]) -> Callable[[], None] | None:
        return admission.commit_with(pipe, session.plan.rollouts_left({one.index: len(one.rollouts) for one in dropped}))

    assert isinstance(writer, RedisStreamWriter)  # noqa: S101 - the configuration was checked
    writer.companion, writer.consumer = join, f"writer-{process}"
    return admission

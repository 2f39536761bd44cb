"""One session of a run: what its launcher decided, and both of its sides need to know."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.config import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import Schedule
from pipelinerl.launch.plan import StartPlan, read_plan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.streams import StreamStore, stream_store
from pipelinerl.schedule import make_schedule


@dataclass(frozen=True)
class Session:
    """Times in the records count from `records_from_s`, by `time.monotonic`: those of a resumed run go on."""

    config: RunConfig
    run: RunDirectory
    plan: StartPlan
    schedule: Schedule
    records_from_s: float

    def streams(self) -> StreamStore:
        """Where the streams between the session's processes lie."""
        return stream_store(self.config, self.run, self.plan.redis_url)


def read_session(run: RunDirectory, records_from_s: float) -> Session:
    """The session as the launcher wrote it down for its workers."""
    config = config_from_yaml(run.config.read_text())
    return Session(config, run, read_plan(run), make_schedule(config), records_from_s)

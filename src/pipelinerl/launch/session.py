"""One session of a run: what its launcher decided, and both of its sides need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pipelinerl.config import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import Schedule
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.stages.streams import StreamStore, stream_store
from pipelinerl.ledger import LedgerRecord
from pipelinerl.schedule import make_schedule

# ------------------------------------------------------------------------------------------------------------------------
# Where a session of a run starts from: nothing, or a checkpoint. Known to both sides before either starts. No torch.


class KeptGroup(msgspec.Struct, frozen=True):
    """A group that lies in a stream, with the number of its rollouts that are `left` to be trained on."""

    index: int
    left: int


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session starts. The default is a fresh run.

    `taken` are the indices of groups never to be started again: dealt with by the trainer, or waiting in a stream, those
    being `kept`, in the order in which the trainer will get them. `settled` counts the rollouts that it has trained or
    dropped. `elapsed_s` is what records' times go on from. `redis_url` is that of the session's own Redis server.
    `predicted_memory_bytes` is the most that each process is expected to take; empty where it is not known.
    """

    checkpoint: str | None = None
    version: int = 0
    taken: LedgerRecord = LedgerRecord()
    kept: tuple[KeptGroup, ...] = ()
    settled: int = 0
    elapsed_s: float = 0.0
    redis_url: str | None = None
    predicted_memory_bytes: dict[str, int] = {}

    @property
    def rollouts_before(self) -> int:
        """Rollouts of earlier sessions that this one accounts for: settled, or kept in the stream."""
        return self.settled + sum(kept.left for kept in self.kept)

    def rollouts_left(self, groups: Mapping[int, int]) -> int:
        """Rollouts still to be dealt with in these groups (index -> number of rollouts), all of which lie in streams."""
        left = {kept.index: kept.left for kept in self.kept}
        return sum(left.get(index, rollouts) for index, rollouts in groups.items())


def write_plan(run: RunDirectory, plan: StartPlan) -> None:
    write_atomically(run.plan, msgspec.json.encode(plan))


def read_plan(run: RunDirectory) -> StartPlan:
    """The plan that the launcher wrote for this session's processes."""
    return msgspec.json.decode(run.plan.read_bytes(), type=StartPlan)


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

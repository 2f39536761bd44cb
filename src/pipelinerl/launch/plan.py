"""Where a session of a run starts from: nothing, or a checkpoint. Known to both sides before either starts. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipelinerl.files import write_atomically
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.ledger import LedgerRecord
from pipelinerl.types import Group


class KeptGroup(msgspec.Struct, frozen=True):
    """A group that lies in the stream, with the number of its rollouts that are still to be trained on."""

    group: Group
    left: int


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session starts. The default is a fresh run.

    `taken` are the indices of groups never to be started again: dealt with by the trainer, or waiting in the stream.
    `settled` counts the rollouts that the trainer has trained or dropped. `elapsed_s` is what records' times go on from.
    """

    checkpoint: str | None = None
    version: int = 0
    taken: LedgerRecord = LedgerRecord()
    kept: tuple[KeptGroup, ...] = ()
    settled: int = 0
    elapsed_s: float = 0.0

    @property
    def rollouts_before(self) -> int:
        """Rollouts of earlier sessions that this one accounts for: settled, or kept in the stream."""
        return self.settled + sum(kept.left for kept in self.kept)

    def rollouts_left(self, groups: Iterable[Group]) -> int:
        """Rollouts in these groups, all of them in the stream, that are still to be dealt with."""
        left = {kept.group.index: kept.left for kept in self.kept}
        return sum(left.get(group.index, len(group.rollouts)) for group in groups)


def write_plan(run: RunDirectory, plan: StartPlan) -> None:
    write_atomically(run.plan, msgspec.json.encode(plan))


def read_plan(run: RunDirectory) -> StartPlan:
    """The plan that the launcher wrote for this session's processes."""
    return msgspec.json.decode(run.plan.read_bytes(), type=StartPlan)

"""What moves through the simulated pipeline: plain mutable records, made by the million."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelinerl.planner.simulation.scenario import GroupWork

if TYPE_CHECKING:
    from pipelinerl.planner.simulation.engine import SimulatedEngine


class SimulatedGroup:
    """K attempts that run in one engine. `open` of them are being generated, or wait for their reward."""

    __slots__ = ("index", "open", "rollouts", "started_version", "work")

    def __init__(self, index: int, work: GroupWork, started_version: int) -> None:
        self.index = index
        self.work = work
        self.started_version = started_version
        self.open = len(work.lengths)
        self.rollouts: list[SimulatedRollout] = []


class SimulatedRollout:
    """One attempt. Its tokens are made by `engine` in its decode steps `start_step` .. `start_step + length - 1`.

    The weights that made the first and the last of them are the engine's updates number `first_update`, `last_update`.
    """

    __slots__ = ("engine", "first_update", "group", "last_update", "length", "start_step", "used", "wait_s")

    def __init__(self, group: SimulatedGroup, length: int, used: bool, engine: SimulatedEngine, wait_s: float = 0.0) -> None:
        self.group = group
        self.wait_s = wait_s
        self.length = length
        self.used = used
        self.engine = engine
        self.start_step = self.first_update = self.last_update = 0

    @property
    def oldest_version(self) -> int:
        """The version of its first token."""
        return self.engine.update_versions[self.first_update]

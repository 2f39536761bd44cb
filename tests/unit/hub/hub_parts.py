"""What the tests of the hub share: groups, statuses, and a hub."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.hub import wire
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.client import HubClient
from pipelinerl.hub.hub import ROLLOUTS_FILE, Hub
from pipelinerl.hub.stream import FileStream, GroupStream
from pipelinerl.schedule import PipelineSchedule, Schedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.types import Group, GroupLedger, Rollout, StageStatus, TrainerProgress
from tests.unit.group_parts import group as make_group
from tests.unit.group_parts import turn
from tests.unit.record_parts import status

K = 4


def group(index: int, version: int = 0, rollouts: int = K, *, size: int = K, text: str = "") -> Group:
    turns = (turn((1,), (1,), 0.0, version),)
    made = [Rollout(turns=turns, reward=1.0, id=f"g{index}.a{number}", attempt=number) for number in range(rollouts)]
    dropped = {"timeout": size - rollouts} if rollouts < size else {}
    return make_group(index, made, str(index), {"text": text}, dropped=dropped, version=version)


def trainer_status(version: int = 0, trained: int = 0, **counts: object) -> StageStatus:
    progress = msgspec.convert({"type": "trainer", "version": version, "trained": trained, **counts}, TrainerProgress)
    return status("trainer", progress=progress)


def make_state(schedule: Schedule | None = None, processes: int = 1, **options: Any) -> AdmissionState:
    """After the evaluation before training."""
    state = AdmissionState(schedule or PipelineSchedule(8), processes=processes, **options)
    state.opened = True
    return state


class Place:
    """A hub as the launcher of several processes makes it, and what it has written."""

    def __init__(
        self,
        root: Path,
        schedule: Schedule | None = None,
        processes: int = 1,
        *,
        taken: GroupLedger | None = None,
        opened: bool = True,
        capacity: int | None = None,
        drops: bool = False,
        stream: GroupStream | None = None,
    ) -> None:
        (root / "rollouts").mkdir(parents=True, exist_ok=True)
        self.records, self.board, self.stream = root / ROLLOUTS_FILE, MemoryBoard(), stream or FileStream()
        self.state = make_state(schedule, processes, taken=taken)
        self.state.opened = opened
        self.hub = Hub(self.state, self.stream, root, self.board, capacity=capacity, drops=drops)

    def streamed(self) -> list[int]:
        """The groups in the stream that are not committed."""
        self.stream.return_to(0)
        return [msgspec.json.decode(json, type=Group).index for _, json in self.stream.read(1 << 30)]

    def recorded(self) -> list[int]:
        lines = self.records.read_bytes().splitlines() if self.records.exists() else []
        return [msgspec.json.decode(line, type=Group).index for line in lines]


class Worker(HubClient):
    """A worker's connection: `settled` once the hub has taken all of it, and has answered."""

    def settled(self) -> None:
        for _ in range(2):  # the hub answers the first one before it grants what came before it
            assert self.sync()

    def ask(self, total: int, version: int = 0, holding: Sequence[int] = ()) -> None:
        self.send(wire.Ask(version, K, total, tuple(holding)))

    def hand_over(self, index: int, version: int = 0, **options: Any) -> None:
        made = group(index, version, **options)
        self.send(wire.HandOver(index, len(made.rollouts), False, msgspec.json.encode(made), made.dropped))


class Asking(Worker):
    """A generation process by its messages: what it was granted and did not hand over."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.granted = list[int]()
        self.handle(wire.Grant, lambda message: self.granted.append(message.index))

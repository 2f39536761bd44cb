"""The preprocessor between stream and trainer: order, waiting, and where its groups are when it or the session has ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.checkpoint import QueueCounts, QueuePosition
from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import RolloutError
from pipelinerl.hub import server, wire
from pipelinerl.hub.client import HubReader
from pipelinerl.hub.hub import ROLLOUTS_FILE, Hub
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.hub.stream import FileStream
from pipelinerl.launch.resume import newest_version, take_back
from pipelinerl.launch.session import KeptGroup
from pipelinerl.preprocess.preprocessor import prepare, run_stage
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.types import Group, GroupLedger, Prepared
from tests.unit.hub.hub_parts import Asking, Worker, make_state
from tests.unit.trainer.test_queue import ids, make_group, pull_all

PREPARE = partial(prepare, config=PreprocessConfig())
AHEAD = 3
PREPROCESSING, TRAINING = WorkerKind(reads="unprepared"), WorkerKind(reads="prepared", follows=True)


@pytest.mark.parametrize(("reward", "state", "detail"), [(1.0, "done", ""), (math.nan, "failed", "RolloutError")])
def test_how_it_ended_is_on_the_board(reward: float, state: str, detail: str) -> None:
    board, turns = MemoryBoard(), iter([False, False, True])
    groups = mock.Mock(read=lambda _: [(0, PREPARE(make_group(0, rewards=[reward] * 3)))])
    with pytest.raises(RolloutError, match="group 0: reward nan") if detail else nullcontext():
        run_stage(groups, board, lambda: next(turns))
    status = cast(Any, board.read("preprocessor"))
    assert (status.state, status.detail) == (state, detail)


class Run:
    """All but the engine: `write` stands for an actor, `train` for the trainer. Groups have a rollout of each attempt."""

    def __init__(self, root: Path, groups: Sequence[Group]) -> None:
        (root / "rollouts").mkdir()
        self.root, self.groups, self.version = root, groups, 0
        self.trained: list[str] = []
        self.saved: tuple[QueuePosition, QueueCounts, int, list[str]] = (QueuePosition(), QueueCounts(), 0, [])
        self.kept: list[KeptGroup] = []
        self.taken = GroupLedger()

    def stream(self) -> FileStream:
        return FileStream(self.root / "stream", self.root / ROLLOUTS_FILE)

    @contextmanager
    def session(self) -> Iterator[None]:
        position, counts, self.version, trained = self.saved
        self.trained, left = list(trained), [kept.left for kept in self.kept]
        stream = self.stream()
        stream.count(left)
        state = make_state(PipelineSchedule(1_000_000), taken=self.taken)
        self.hub = Hub(state, stream, self.root, MemoryBoard())
        self.begun, self.saved_trained = sum(left), counts.trained
        with mock.patch.object(server, "PREPARED_AHEAD", AHEAD), HubServer(self.hub) as self.server:
            self.actor = Asking(self.server.connect(WorkerKind(process=0)))
            self.trainer = Worker(self.server.connect(TRAINING))
            self.queue = SampleQueue(HubReader[Prepared](self.trainer, Prepared), position=position, counts=counts)
            self.begin_preprocessor()
            with closing(self.actor), closing(self.trainer):
                yield
                self.preprocessor.close()

    def begin_preprocessor(self) -> None:
        self.preprocessor = Worker(self.server.connect(PREPROCESSING))
        self.unprepared = HubReader(self.preprocessor, Group, ahead=1, prepare=PREPARE)

    def act(self, action: str, count: int) -> None:
        match action:
            case "write":
                for _ in range(count):
                    self.write()
            case "prepare":
                for _ in range(count):
                    self.preprocessor.settled()
                    run_stage(self.unprepared, MemoryBoard(), iter([False, True]).__next__)
                assert len(self.hub.prepared) <= AHEAD
            case "train":
                self.train(count)
            case "checkpoint":
                self.checkpoint()
            case "die":  # perhaps with a group that it has prepared, and others that it has read
                self.preprocessor.close()
                self.server.wait_ended(PREPROCESSING)
                self.begin_preprocessor()

    def write(self) -> None:
        following = self.hub.admission._taken.first_missing(self.hub.admission.next_index)
        if following < len(self.groups) and self.server.failure is None:
            self.actor.ask(len(self.actor.granted) + 1)
            self.actor.settled()
            assert self.actor.granted[-1] == following
            group = self.groups[following]
            self.actor.send(wire.HandOver(following, len(group.rollouts), False, msgspec.json.encode(group)))
            self.actor.settled()
            self.begun += len(group.rollouts)

    def train(self, count: int) -> None:
        self.preprocessor.settled()
        self.trainer.settled()
        pull_all(self.queue)
        if self.queue.queued >= count:
            samples = self.queue.take(count)
            self.queue.mark_trained(samples)
            self.trained += ids(samples)
            self.version += 1

    def checkpoint(self) -> None:
        position = msgspec.json.decode(msgspec.json.encode(self.queue.position()), type=QueuePosition)
        self.saved = (position, self.queue.counts, self.version, list(self.trained))
        self.queue.commit(position)
        self.trainer.settled()

    def account(self) -> tuple[int, int]:
        """Rollouts that the session has had to train on, and those that are somewhere. All connections are closed."""
        return self.begun, self.hub.waiting + self.queue.outstanding + self.queue.trained - self.saved_trained

    def take_back(self) -> None:
        position, _, version, _ = self.saved
        self.taken = position.ledger.copy()
        with closing(self.stream()) as stream:
            self.kept = take_back(stream, position, self.taken, version)
        assert len({item.index for item in self.kept}) == len(self.kept)
        assert all(newest_version(self.groups[item.index]) <= version for item in self.kept)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["prepare", "train"]), st.integers(1, 6)),
        st.sampled_from([("prepare", 8), ("checkpoint", 0), ("die", 0)]),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(ACTIONS, min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_no_group_is_lost_or_trained_on_twice_however_the_preprocessor_or_the_session_ends(
    sessions: list[list[tuple[str, int]]], newest: list[int]
) -> None:
    groups = [make_group(index, 2, versions=(0, newest[index])) for index in range(8)]
    with TemporaryDirectory() as root:
        run = Run(Path(root), groups)
        for actions in sessions:
            with run.session():
                for action, count in actions:
                    run.act(action, count)
            begun, found = run.account()
            assert begun == found
            run.take_back()
        with run.session():
            for _ in range(20):
                for action in ("write", "prepare", "train"):
                    run.act(action, 1)
            assert sorted(run.trained) == sorted(rollout.id for group in groups for rollout in group.rollouts)
            assert run.queue.outstanding == 0
            assert run.server.failure is None

"""The preprocessor between two streams: order, waiting, and what a resume makes of a death at the worst moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.checkpoint_state import QueueCounts, QueuePosition
from pipelinerl.config.schema import LaunchConfig, PreprocessConfig, RunConfig
from pipelinerl.errors import RolloutError
from pipelinerl.launch.hosts.processes import rollouts_in_streams
from pipelinerl.launch.resume import take_back
from pipelinerl.launch.stages.streams import (
    group_reader,
    group_writer,
    prepared_reader,
    prepared_writer,
)
from pipelinerl.ledger import GroupLedger
from pipelinerl.preprocess import PreparingReader, Preprocessor, PreprocessorStage, newest_version
from pipelinerl.status.board import MemoryBoard
from pipelinerl.stream.files import FileStore
from pipelinerl.stream.memory import MemoryStream
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.types import Group, Prepared
from tests.unit.trainer.test_queue import ids, make_group, pull_all

APART = RunConfig(launch=LaunchConfig(preprocessor="process"))


def stage_over(groups: Sequence[Group], capacity: int = 2) -> tuple[PreprocessorStage, MemoryBoard, object]:
    first = MemoryStream[Group](capacity=100)
    for group in groups:
        assert first.try_write(group)
    second = MemoryStream[Prepared](capacity=capacity)
    board = MemoryBoard()
    reader = PreparingReader(first, Preprocessor(PreprocessConfig()))
    return PreprocessorStage(reader, second, board=board), board, second


def said(board: MemoryBoard) -> tuple[str, str]:
    status = board.read("preprocessor")
    assert status is not None
    return status.state, status.detail


def test_groups_pass_in_order_as_they_would_be_prepared_by_the_trainer() -> None:
    groups = [make_group(2), make_group(0), make_group(1)]
    stage, _, reader = stage_over(groups, capacity=3)
    assert [stage.pump() for _ in range(4)] == [True, True, True, False]
    preprocessor = Preprocessor(PreprocessConfig())
    assert [item for _, item in reader.read(9)] == [preprocessor.process(group) for group in groups]  # type: ignore[attr-defined]


def test_what_passes_is_the_same_after_a_trip_through_json() -> None:
    prepared = Preprocessor(PreprocessConfig(overlong="drop")).process(make_group(3, versions=(1, 2)))
    assert prepared.newest_version == 2
    assert msgspec.json.decode(msgspec.json.encode(prepared), type=Prepared) == prepared


def test_it_says_whom_it_waits_for_and_takes_no_more_than_one_group_ahead() -> None:
    stage, board, reader = stage_over([make_group(i) for i in range(5)])
    while stage.pump():
        pass
    state, detail = said(board)
    assert state == "waiting"
    assert "the trainer" in detail
    taken = reader.read(9)  # type: ignore[attr-defined]
    assert [item.index for _, item in taken] == [0, 1]
    assert stage.pump()
    assert stage.pump()
    assert [item.index for _, item in reader.read(9)] == [2, 3]  # type: ignore[attr-defined]
    assert stage.pump()
    assert not stage.pump()
    assert said(board)[0] == "waiting"
    assert "the actor" in said(board)[1]


def test_an_error_is_on_the_board_and_raised() -> None:
    stage, board, _ = stage_over([make_group(0, rewards=[float("nan")] * 3)])
    with pytest.raises(RolloutError, match="group 0: reward nan"):
        stage.run(lambda: False)
    assert said(board) == ("failed", "RolloutError")


def test_it_ends_when_told_to() -> None:
    stage, board, _ = stage_over([make_group(0)])
    turns = iter([False, False, True])
    stage.run(lambda: next(turns))
    assert said(board)[0] == "done"


class KilledError(Exception):
    """What stands for a death between two system calls."""


class Mortal:
    """A reader whose process dies, once `dying`, when it is about to commit."""

    def __init__(self, reader: PreparingReader) -> None:
        self.reader = reader
        self.dying = False

    def read(self, limit: int) -> Sequence[tuple[int, Prepared]]:
        return self.reader.read(limit)

    def commit(self, offset: int) -> None:
        if self.dying:
            raise KilledError
        self.reader.commit(offset)


class Run:
    """All but the engine: `write` stands for an actor, `train` for the trainer. Groups have a rollout of each attempt."""

    def __init__(self, root: Path, groups: Sequence[Group]) -> None:
        self.store = FileStore(root)
        self.groups = groups
        self.version = 0
        self.trained: list[str] = []
        self.saved: tuple[QueuePosition, QueueCounts, int, list[str]] = (QueuePosition(), QueueCounts(), 0, [])
        self.to_write = list(range(len(groups)))

    @contextmanager
    def session(self) -> Iterator[None]:
        position, counts, self.version, trained = self.saved
        self.trained = list(trained)
        with ExitStack() as ends:
            self.writer = ends.enter_context(closing(group_writer(self.store, APART, lambda _: None)))
            reader = ends.enter_context(closing(group_reader(self.store)))
            second = ends.enter_context(closing(prepared_writer(self.store)))
            self.reader = Mortal(PreparingReader(reader, Preprocessor(APART.preprocess)))
            self.stage = PreprocessorStage(self.reader, second, board=MemoryBoard())  # type: ignore[arg-type]
            self.queue = SampleQueue(
                ends.enter_context(closing(prepared_reader(self.store))), position=position, counts=counts
            )
            yield

    def act(self, action: str, count: int) -> None:
        match action:
            case "write":
                for _ in range(count):
                    self.write()
            case "prepare" if not self.reader.dying:
                for _ in range(count):
                    self.stage.pump()
            case "train":
                self.train(count)
            case "checkpoint" if not self.reader.dying:  # else it may count twice: see `rollouts_in_streams`
                self.checkpoint()
            case "die" if not self.reader.dying:
                self.reader.dying = True
                with suppress(KilledError):  # if there is nothing to write, it dies idle
                    while self.stage.pump():
                        pass

    def write(self) -> None:
        if self.to_write:
            group = self.groups[self.to_write[0]]
            if self.writer.try_write(group):
                self.to_write.pop(0)

    def train(self, count: int) -> None:
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

    def account(self) -> tuple[int, int]:
        """Rollouts that were written, and those that are somewhere, counted by who has them. All ends are closed."""
        in_streams = rollouts_in_streams(self.store, APART)
        written = sum(len(group.rollouts) for group in self.groups if group.index not in self.to_write)
        return written, sum(in_streams.values()) + self.queue.outstanding + self.queue.trained

    def take_back(self) -> None:
        position, _, version, _ = self.saved
        ledger = GroupLedger.from_record(position.ledger)
        kept = take_back(self.store, position, ledger, version, apart=True, waiting={})
        assert len({item.index for item in kept}) == len(kept)
        assert all(newest_version(self.groups[item.index]) <= version for item in kept)
        self.to_write = [index for index in range(len(self.groups)) if index not in ledger]


def test_a_group_in_both_streams_counts_once(tmp_path: Path) -> None:
    """The preprocessor was killed after it wrote the group, and the trainer has it already."""
    run = Run(tmp_path, [make_group(0), make_group(1)])
    with run.session():
        run.act("write", 2)
        run.act("die", 0)
        run.act("train", 3)
    assert rollouts_in_streams(run.store, APART) == {1: 3}
    assert run.account() == (6, 6)
    run.take_back()
    assert run.to_write == []
    with run.session():
        run.act("prepare", 2)
        run.act("train", 6)
        assert run.trained == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]


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
def test_no_group_is_lost_or_trained_on_twice_however_the_preprocessor_dies(
    sessions: list[list[tuple[str, int]]], newest: list[int]
) -> None:
    """It is killed between writing a group and committing it, or while it waits; the others go on for a while."""
    groups = [make_group(index, 2, versions=(0, newest[index])) for index in range(8)]
    with TemporaryDirectory() as root:
        run = Run(Path(root), groups)
        for actions in sessions:
            with run.session():
                for action, count in actions:
                    run.act(action, count)
            written, found = run.account()
            assert written == found
            run.take_back()
        with run.session():
            for _ in range(20):
                for action in ("write", "prepare", "train"):
                    run.act(action, 1)
            assert sorted(run.trained) == sorted(rollout.id for group in groups for rollout in group.rollouts)
            assert run.queue.outstanding == 0
